"""Groups that torch knows, of some ranks of a group: made by torch as soon as the ranks have agreed to make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import DistError, Store

from easydist.base import torch_groups
from easydist.errors import PeerLostError
from easydist.groups.reconnecting import is_of_connections
from easydist.liveness import texts
from easydist.liveness.limited import NoAnswerError, within
from easydist.liveness.monitor import Monitor
from easydist.liveness.rules import GRACE, PATIENCE
from easydist.liveness.timed_store import POLL

T = TypeVar("T")


def registered(
    ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Store,
    name: str,
    limit: timedelta,
    description: str,
    check: Callable[[], None] | None = None,
) -> dist.ProcessGroup:
    """Return a group that torch knows, see ``torch_groups.made``, or raise once its members cannot be connected.

    ``check`` is called again and again meanwhile; it raises to give up.
    """
    return within(
        limit.total_seconds(),
        lambda: torch_groups.made(ranks, rank, backend, store, name, limit, description),
        check,
        discard=_destroyed,
    )


def connected(make: Callable[[], T], monitor: Monitor, members: Sequence[int], seconds: float) -> T:
    """Make a group of some ranks in a call of a larger one, whose monitor ends the wait for ranks that cannot come.

    Args:
        make: Makes the group; torch cannot be interrupted while it connects.
        monitor: The monitor of the larger group.
        members: The ranks in the larger group that make the group with this one, or wait for others that do.
        seconds: The time limit.

    Raises:
        EasydistError: A member has ended, left or failed, or did not connect in time; or the store is gone.
    """
    awaited = [rank for rank in members if rank in monitor.peers]
    check: Callable[[], None] | None = (lambda: monitor.guard(awaited)) if awaited else None
    try:
        return within(seconds + PATIENCE, make, check, discard=_destroyed)
    except RuntimeError as error:
        if not awaited or not is_of_connections(error):
            raise
        _explain(error, monitor, seconds)
        raise AssertionError from error


def _explain(error: RuntimeError, monitor: Monitor, seconds: float) -> None:
    """Raise the reason why the ranks were not connected: the end of a process may be seen after that of its store."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        try:
            monitor.guard(list(monitor.peers))
        except Exception as reason:
            raise reason from error
        time.sleep(POLL)
    if not isinstance(error, DistError) or isinstance(error, NoAnswerError) or "timeout" in str(error):
        raise monitor.unconnected(seconds) from error
    monitor.give_up(PeerLostError(texts.without_store(monitor.operation)))
    monitor.raise_if_broken()


def _destroyed(group: object) -> None:
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)
