"""Evaluation over all ranks: every sample once, in order, with metrics that do not depend on the number of ranks."""

from easydist.metrics.collate import Collate
from easydist.metrics.collector import MetricCollector
from easydist.metrics.gather import gather_for_metrics
from easydist.metrics.joining import Padded
from easydist.metrics.loader import DistributedLoader, distributed_loader, progress
from easydist.metrics.sampler import DistributedBatchSampler
from easydist.metrics.sums import Counts, Sums, WeightedMean, compute
from easydist.metrics.torcheval import (
    get_synced_metric,
    get_synced_metric_collection,
    get_synced_state_dict,
    get_synced_state_dict_collection,
    sync_and_compute,
    sync_and_compute_collection,
)
from easydist.metrics.torchmetrics import dist_sync_fn, sync_dist

__all__ = [
    "gather_for_metrics",
    "MetricCollector",
    "Padded",
    "distributed_loader",
    "DistributedLoader",
    "DistributedBatchSampler",
    "Collate",
    "compute",
    "Counts",
    "Sums",
    "WeightedMean",
    "progress",
    "dist_sync_fn",
    "sync_dist",
    "sync_and_compute",
    "sync_and_compute_collection",
    "get_synced_metric",
    "get_synced_metric_collection",
    "get_synced_state_dict",
    "get_synced_state_dict_collection",
]
