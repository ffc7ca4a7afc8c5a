"""The detection of forked processes, which may or may not be ranks of their own.

``notebook_launcher``, ``debug_launcher`` and ``multiprocessing`` fork ranks, whereas a ``DataLoader`` forks workers
that are not ranks. The difference is in the environment: a launcher gives each child a rank (``RANK``, ``WORLD_SIZE``)
that its parent did not have, and a worker has its parent's rank.

The package's root loads only this module of easydist. So a forked child knows even a group that ``torch.distributed``
made before the first use of easydist.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterable
from typing import Any

NOT_A_RANK = (
    "this process is a child of a rank of the group and not a rank itself (a DataLoader worker, for instance), so "
    "it cannot exchange data. Exchange data in the process that was launched, or give the child a RANK of its own"
)

groups_of_parents: list[Any] = []
"""The process groups of the processes from which this one was forked."""

generation = 0
"""The number of forks on the way to this process, since the package was imported."""

_parents_rank: tuple[str | None, str | None] | None = None


def demand_own(since: int) -> None:
    """Check that this process has not been forked since it joined a group, and so does not pose as its parent.

    Args:
        since: The value of ``generation`` at that time.

    Raises:
        RuntimeError: It has.
    """
    if generation != since:
        raise RuntimeError(NOT_A_RANK)


def _rank() -> tuple[str | None, str | None]:
    return os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def is_copy() -> bool:
    """True if this process was forked and has its parent's rank, so that it must not pose as the parent.

    Example:
        >>> is_copy()
        False
    """
    return _parents_rank is not None and _rank() == _parents_rank


def is_worker() -> bool:
    """True in a worker of a ``DataLoader``; even if it was not forked, it has its parent's environment."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def keep(groups: Iterable[Any]) -> None:
    """Record groups of a parent, and keep them forever: their destructors wait for threads that a child lacks."""
    for group in groups:
        groups_of_parents.append(group)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _after_fork() -> None:
    global generation, _parents_rank
    generation, _parents_rank = generation + 1, _rank()
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        gc.freeze()  # cycles that the parent has not collected may hold groups of which nobody knows any more
    if (world := getattr(c10d, "_world", None)) is not None:
        keep(list(world.pg_map))


os.register_at_fork(after_in_child=_after_fork)
