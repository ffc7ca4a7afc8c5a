"""How long a piece of work takes that all ranks do together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def timed(fn: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, all ranks beginning together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        fn()
    return (time.perf_counter() - start) / repeats


def agreed(seconds: float) -> float:
    """The slowest rank's figure, so that all ranks repeat equally often."""
    value = torch.tensor([seconds])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
