"""Connecting the ranks of a group, once all of them have come: all groups, of any backend, are connected here.

Neither gloo nor torch can be interrupted while they connect, or tell which rank is missing. So they connect in a
thread, while the caller asks its monitor whether the others can still be connected.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, Store

from easydist.base import torch_groups
from easydist.errors import EasydistError, PeerLostError
from easydist.liveness import keepalive, texts
from easydist.liveness.background import NoAnswerError, within
from easydist.liveness.monitor import Monitor
from easydist.liveness.rules import GRACE, PATIENCE
from easydist.liveness.timed_store import POLL, InterruptibleStore
from easydist.transport.backends.c10d import Gloo

T = TypeVar("T")


def connect(
    make: Callable[[], T], seconds: float, monitor: Monitor | None = None, check: Callable[[], None] | None = None
) -> T:
    """Connect ranks, and return the result.

    Args:
        make: Makes the connections, in a thread and within the time limit. A group that it returns after it was given
            up is destroyed; None stands for torch's default group.
        seconds: The time limit.
        monitor: The monitor of the ranks. It ends the wait, and explains why they were not connected.
        check: Called again and again meanwhile in place of the monitor's ``guard`` for all ranks; it raises once they
            cannot be connected any more.

    Raises:
        EasydistError: The error of ``check``; or a rank has ended, left or failed, or did not connect in time, or the
            store is gone.
        RuntimeError: The machine cannot connect at all; without a monitor, also if ranks are missing.
    """
    if check is None and monitor is not None:
        check = functools.partial(monitor.guard, [*monitor.peers])
    try:
        with keepalive.watching():
            return within(seconds + PATIENCE, make, check, discard=_destroyed)
    except RuntimeError as error:
        if monitor is None or isinstance(error, EasydistError) or not is_of_connections(error):
            raise
        raise _explained(error, monitor, seconds) from error


def _explained(error: RuntimeError, monitor: Monitor, seconds: float) -> EasydistError:
    """Return the reason why ranks were not connected: the end of a process may be seen after that of its store."""
    text = str(error).replace(keepalive.TEXT, "").lower()  # of a host that does not answer
    if not any(word in text for word in ("timed out", "timeout", "not answered")):
        deadline = time.monotonic() + GRACE
        while (reason := monitor.in_vain()) is None and time.monotonic() < deadline:
            time.sleep(POLL)
        if reason is None and isinstance(error, DistError):
            reason = PeerLostError(texts.without_store(monitor.operation))
        if reason is not None:
            monitor.give_up(reason)
    return monitor.unconnected(seconds)


def is_of_connections(error: RuntimeError) -> bool:
    """True unless torch cannot make such a group at all.

    The store's errors have types. gloo's are plain: "Gloo connectFullMesh failed with …", "Timed out …". The word gloo
    says nothing, because it is in the path of each of its source files.
    """
    if isinstance(error, DistError | NoAnswerError):
        return True
    return any(word in str(error).lower() for word in ("connect", "timed out"))


def gloo_connections(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    monitor: Monitor | None = None,
    check: Callable[[], None] | None = None,
    **where: str,
) -> Any:
    """Connect ranks by gloo alone, and return a backend that belongs to no group.

    Args:
        store: The store of these ranks, used for this backend only.
        rank: The rank of this process among them.
        size: Their number.
        timeout: The time limit for connecting, and for each operation of the backend.
        monitor: As for ``connect``.
        check: As for ``connect``.
        where: ``hostname``, this process's own address, or ``interface``. If neither is given, the interfaces in
            ``GLOO_SOCKET_IFNAME`` count, as in torch; without them gloo chooses.

    Raises:
        EasydistError: As for ``connect``.
        RuntimeError: As for ``connect``.
    """
    options = _Gloo._Options()
    options._timeout = timeout
    try:
        options._devices = _devices(where)
    except RuntimeError as error:  # there is no such interface, or address: the others need not wait
        if monitor is not None:
            monitor.failed(error)
        raise
    there = InterruptibleStore(store, timeout.total_seconds())
    try:
        return connect(lambda: _Gloo(there, rank, size, options), timeout.total_seconds(), monitor, check)
    except BaseException:
        # Otherwise the thread in which gloo connects would wait in the store until the time is over.
        there.give_up()
        raise


def _devices(where: Mapping[str, str]) -> list[Any]:
    """Return gloo's devices; torch reads the variable only for groups whose devices it chooses itself."""
    if where:
        return [_Gloo.create_device(**where)]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [_Gloo.create_device(interface=name) for name in names] or [_Gloo.create_default_device()]


def gloo_group(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    monitor: Monitor | None = None,
    check: Callable[[], None] | None = None,
    **where: str,
) -> dist.ProcessGroup:
    """Connect ranks by gloo, and return their group, of which torch does not know.

    The arguments and errors are those of ``gloo_connections``, and the name of the group.
    """
    kind = dist.ProcessGroup.BackendType.GLOO
    group: Any = dist.ProcessGroup(PrefixStore("group", store), rank, size)
    group._set_default_backend(kind)
    gloo = gloo_connections(PrefixStore("gloo", store), rank, size, timeout, monitor, check, **where)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_group_name(name)
    return group  # type: ignore[no-any-return]


def gloo_beside(group: dist.ProcessGroup, store: Store, timeout: float, monitor: Monitor | None = None) -> Gloo:
    """Connect the members of a group by gloo once more.

    Args:
        group: A group that this process belongs to.
        store: The store in which the members connect; no other group uses it.
        timeout: Seconds that connecting may take, and each wait of the new connections.
        monitor: The group's monitor, which ends connecting if it cannot succeed.
    """
    gloo = gloo_connections(store, group.rank(), group.size(), timedelta(seconds=timeout), monitor)
    return Gloo(gloo, torch.device("cpu"), "gloo")


def registered_group(
    ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Store,
    name: str,
    limit: timedelta,
    monitor: Monitor | None = None,
    check: Callable[[], None] | None = None,
) -> dist.ProcessGroup:
    """Connect some ranks of torch's default group, and return their group, of which torch knows.

    Args:
        ranks: The members, as ranks of the default group.
        rank: The rank of this process among them.
        backend: As in ``new_group``.
        store: The store of the members.
        name: The name of the group, which no other group has.
        limit: The time limit for connecting, and for each call of the group.
        monitor: As for ``connect``.
        check: As for ``connect``.
    """

    def make() -> dist.ProcessGroup:
        return torch_groups.made(ranks, rank, backend, own_connection(store), name, limit)

    return connect(make, limit.total_seconds(), monitor, check)


def own_connection(store: Any) -> Store:
    """Return the store over a connection of its own, if it has one.

    torch holds the connection while it waits in the store for the other ranks, which may wait there for another thread
    of this process.
    """
    own: Store = store
    with contextlib.suppress(AttributeError, RuntimeError):  # a store that is written in Python, or has ended
        own = store.clone()
    return own


def _destroyed(group: object) -> None:
    if group is None or isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


_Gloo: Any = ProcessGroupGloo
"""The backend class, as ``Any``: its type stubs depend on the build of torch."""
