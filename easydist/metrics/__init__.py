"""Evaluation metrics over all ranks' samples: exact, in order, and whole."""

from easydist.metrics.collector import MetricCollector
from easydist.metrics.columns import Padded
from easydist.metrics.gather import gather_for_metrics

__all__ = ["MetricCollector", "Padded", "gather_for_metrics"]
