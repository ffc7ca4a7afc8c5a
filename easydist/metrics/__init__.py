"""Evaluation metrics over all ranks' samples: exact, in order, and whole."""

from easydist.metrics.collector import MetricCollector
from easydist.metrics.columns import Padded
from easydist.metrics.gather import gather_for_metrics
from easydist.metrics.torchmetrics import dist_sync_fn, sync_dist

__all__ = ["MetricCollector", "Padded", "dist_sync_fn", "gather_for_metrics", "sync_dist"]
