"""Evaluation metrics over all ranks' samples: exact, in order, and whole."""

from easydist.metrics.gather import gather_for_metrics

__all__ = ["gather_for_metrics"]
