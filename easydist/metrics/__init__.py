"""Evaluation over all ranks."""

from easydist.metrics.torchmetrics import dist_sync_fn, sync_dist

__all__ = ["dist_sync_fn", "sync_dist"]
