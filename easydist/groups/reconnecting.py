"""Connecting a group again after a failure: its ranks meet in the group's store, and a gloo group is made there.

gloo cannot be interrupted while it connects, and cannot tell who is missing. So the ranks wait for one another in the
store, where the monitor can end the wait, and gloo connects once all of them are there.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from easydist.errors import PeerLostError
from easydist.liveness import texts
from easydist.liveness.monitor import Monitor
from easydist.liveness.timed_store import POLL, TimedStore
from easydist.transport.backends.c10d import Gloo

_CONNECTED = 30.0
"""Seconds in which ranks that have all come are connected."""


def reconnect(group: dist.ProcessGroup, store: Store, monitor: Monitor) -> Gloo:
    """Make new connections once all ranks have come to the same call.

    Args:
        group: The group.
        store: The group's, for easydist alone.
        monitor: The group's; its call goes on from the last one that any rank has come to.

    Raises:
        EasydistError: Ranks are missing, as ``Monitor.guard`` says; or one has left again.
    """
    broken = monitor.begin_reconnecting()
    phase = PrefixStore(f"{monitor.phase}", store)
    try:
        last = _meet(TimedStore(phase), monitor)
        return _connect(group, PrefixStore(f"{last}", phase), monitor)
    except BaseException as error:
        monitor.ended_by(error)
        raise
    finally:
        monitor.broken = monitor.broken or broken


def _meet(store: TimedStore, monitor: Monitor) -> float:
    """Wait for all ranks; returns the last call that any of them has come to (``Monitor.at``)."""
    try:
        return _agree_on_call(store, monitor)
    except RuntimeError as error:  # of the store: what the monitor raises is none
        text = texts.without_store(monitor.operation)
        monitor.give_up(PeerLostError(text))
        raise PeerLostError(text) from error


def _agree_on_call(store: TimedStore, monitor: Monitor) -> float:
    """Announce this rank's call, and every later one that another rank announces, until all have announced the same.

    A rank that was interrupted in a call which the others have not come to yet is ahead of them.
    """
    told, last = -1.0, monitor.at
    others = dict.fromkeys(monitor.peers, told)
    while True:
        if told < last:
            store.set(f"here/{monitor.rank}", str(told := last))
        others |= {rank: float(store.get(f"here/{rank}") or -1) for rank, at in others.items() if at < told}
        monitor.guard([rank for rank, at in others.items() if at < told])
        last = max(others.values())
        if told < last:
            monitor.check_reports()  # they may have given up the call that this rank has come to
            monitor.catch_up(last)
        elif min(others.values()) == told:
            monitor.check_reports()
            return told
        else:
            time.sleep(POLL)


def _connect(group: dist.ProcessGroup, store: Store, monitor: Monitor) -> Gloo:
    """Connect ranks that have all come, which takes no time unless one has left again."""
    limit = min(monitor.left or _CONNECTED, _CONNECTED)
    try:
        return gloo_beside(group, store, limit)
    except RuntimeError as error:
        raise monitor.unconnected(limit) from error


def gloo_beside(group: dist.ProcessGroup, store: Store, timeout: float) -> Gloo:
    """Make a gloo group of the members of ``group``.

    Args:
        group: Any group that this process belongs to.
        store: Where they connect; no other group uses it.
        timeout: Seconds that connecting may take, and each of its waits.
    """
    gloo: Any = ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=timeout))
    return Gloo(gloo, torch.device("cpu"), "gloo")
