"""The making of a group by ranks that a launcher has started: in their first call, by its time limit."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import DistError, DistNetworkError, PrefixStore, Store

from easydist.base.forks import NOT_A_RANK
from easydist.errors import EasydistError, PeerLostError, WireError
from easydist.groups.first_meeting import FirstMeeting
from easydist.groups.reconnecting import reconnect
from easydist.liveness import texts
from easydist.liveness.background import NoAnswerError
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.liveness.status import WHO, nothing
from easydist.liveness.timed_store import TimedStore
from easydist.liveness.watchdog import signals_wake_watchdog, watchdog

_APPEARS_WITHIN = 5.0
"""Seconds that a rank takes to reach the store before its first call: rank 0, which may serve it, may start later."""


class Founding(NamedTuple):
    """A group that its ranks have not made yet.

    Attributes:
        rank: The rank of this process.
        size: The number of ranks.
        timeout: Seconds that a call may take, unless it sets its own limit.
        backend: As in ``init_process_group``.
        where: The words for the place of the store, for errors.
        is_served_by_rank_0: True if rank 0 serves the store, and not the launcher.
        reach: Returns the store, within a number of seconds; it calls the function that it gets while it waits.
        make: Makes the group in a store for it alone, within a number of seconds, or as long as the monitor agrees.
    """

    rank: int
    size: int
    timeout: float
    backend: str
    where: str
    is_served_by_rank_0: bool
    reach: Callable[[float, Callable[[], None]], Store]
    make: Callable[[Monitor, Store, float], dist.ProcessGroup]


class Founded(NamedTuple):
    """The group, and the store in which its ranks meet again."""

    store: Store
    group: dist.ProcessGroup


def found(founding: Founding, monitor: Monitor, store: Store | None, call: tuple[str, str, float | None]) -> Founded:
    """Make the group, in a call of its own; all ranks have to come.

    Args:
        founding: The group.
        monitor: The group's monitor.
        store: The group's store if this rank has reached it in an earlier attempt.
        call: The operation, the site and the time limit of the call for which the group is made.

    Raises:
        CollectiveTimeout: Some ranks did not come. The next call tries again.
        PeerLostError: A rank has ended.
        RuntimeError: Another process is this rank, or this is rank 0 and cannot serve the store (DistNetworkError).
    """
    if monitor.broken is not None and monitor.broken.is_final:
        monitor.raise_if_broken()
    watchdog().add(monitor)
    monitor.broken = None
    monitor.begin(*call)
    is_done = False
    try:
        with signals_wake_watchdog():
            own = store or _reached(founding, monitor)
            FirstMeeting(own, monitor).announce()
            group = reconnect(TimedStore(own), monitor, functools.partial(founding.make, monitor))
        is_done = True
        return Founded(own, group)
    except BaseException as error:
        monitor.ended_by(error)
        raise
    finally:
        monitor.end(is_done)


def appear(founding: Founding, monitor: Monitor) -> Store | None:
    """Reach the store before the first call, and publish the identity of this rank there.

    Returns:
        The group's store; None if it is not reached in some seconds, for a reason that the first call will name.

    Raises:
        RuntimeError: Another process is this rank.
    """
    limit = min(founding.timeout, _APPEARS_WITHIN)
    try:
        store = PrefixStore("easydist", founding.reach(limit, nothing))
    except (NoAnswerError, DistError):
        return None
    _use(store, monitor)
    FirstMeeting(store, monitor).announce()
    return store


def report_end(founding: Founding, monitor: Monitor, error: PeerLostError) -> None:
    """Report the end of a rank, by another process, unless the rank has come: then the others notice it themselves.

    Args:
        founding: The group.
        monitor: A monitor of the group for that rank.
        error: The error for the other ranks.
    """
    if founding.is_served_by_rank_0:
        return
    with contextlib.suppress(NoAnswerError, DistError):
        store = TimedStore(PrefixStore("easydist", founding.reach(_APPEARS_WITHIN, nothing)))
        monitor.use(store)
        if monitor.log(WHO).last_of(store, founding.rank) is None:
            monitor.leave_for_good(error)


def _reached(founding: Founding, monitor: Monitor) -> Store:
    """Return the store of the group, with a prefix that only easydist uses."""
    limit = monitor.left or 0.0
    monitor.unreached = founding.where, founding.is_served_by_rank_0
    try:
        store = PrefixStore("easydist", founding.reach(limit, lambda: monitor.guard([])))
    except EasydistError:
        raise
    except (NoAnswerError, DistError) as error:
        if founding.is_served_by_rank_0 and founding.rank == 0:
            raise DistNetworkError(texts.unserved(founding.where, "EADDRINUSE" in str(error))) from error
        raise monitor.late([], limit) from error
    monitor.unreached = None
    _use(store, monitor)
    return store


def _use(store: Store, monitor: Monitor) -> None:
    """Let the monitor use the store, unless another process is this rank, which a child must not speak for."""
    monitor.use(timed := TimedStore(store))
    if (pid := _other_process(timed, monitor)) is not None:
        monitor.use(None)  # so that the other ranks hear nothing of this process
        raise RuntimeError(f"rank {monitor.rank} is process {pid}; {NOT_A_RANK}")


def _other_process(store: TimedStore, monitor: Monitor) -> int | None:
    """Return the id of another process of this host that has come as this rank, and lives; None if there is none."""
    with contextlib.suppress(RuntimeError, WireError):  # what is wrong with the store, the meeting says
        if (told := monitor.log(WHO).last_of(store, monitor.rank)) is not None:
            peer = Peer(monitor.rank, told)
            return peer.pid if peer.pid != os.getpid() and peer.is_visible and not peer.has_ended() else None
    return None
