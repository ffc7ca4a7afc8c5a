"""Gloo groups of processes that meet in a store of their own, and that torch does not know of."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from easydist.liveness.limited import within
from easydist.liveness.rules import PATIENCE
from easydist.liveness.timed_store import InterruptibleStore


def gloo_group(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    host: str | None = None,
    check: Callable[[], None] | None = None,
) -> dist.ProcessGroup:
    """Connect the members, and return their group.

    Args:
        store: The store of all members, used for this group only.
        rank: The rank of this process among the members.
        size: The number of members.
        name: The name of the group.
        timeout: The time limit for connecting, and for each call of the group.
        host: The address under which the others can reach this process; None to let gloo choose.
        check: As in ``gloo_connections``.

    Raises:
        RuntimeError: Some members did not come.
    """
    kind = dist.ProcessGroup.BackendType.GLOO
    group: Any = dist.ProcessGroup(PrefixStore("group", store), rank, size)
    group._set_default_backend(kind)
    where = {"hostname": host} if host else {}
    gloo = gloo_connections(PrefixStore("gloo", store), rank, size, timeout, check, **where)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_group_name(name)
    return group  # type: ignore[no-any-return]


def gloo_connections(
    store: Store, rank: int, size: int, timeout: timedelta, check: Callable[[], None] | None = None, **where: str
) -> Any:
    """Connect the members by gloo alone, and return a backend that belongs to no group.

    Args:
        store: As in ``gloo_group``.
        rank: As in ``gloo_group``.
        size: As in ``gloo_group``.
        timeout: As in ``gloo_group``.
        check: Called again and again meanwhile; it raises to give up.
        where: ``hostname``, this process's own address, or ``interface``; if neither is given, gloo chooses.

    Raises:
        RuntimeError: Some members did not come.
    """
    options = _Gloo._Options()
    options._timeout = timeout
    options._devices = [_Gloo.create_device(**where) if where else _Gloo.create_default_device()]
    seconds = timeout.total_seconds()
    there = InterruptibleStore(store, seconds)
    try:
        return within(seconds + PATIENCE, lambda: _Gloo(there, rank, size, options), check)
    except BaseException:
        # Otherwise the thread in which gloo connects would wait in the store until the time is over.
        there.give_up()
        raise


_Gloo: Any = ProcessGroupGloo
"""The backend class, as ``Any``: its type stubs depend on the build of torch."""
