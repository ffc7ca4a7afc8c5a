"""Groups of processes that are no world: each has its own store and connections, and nothing of torch's default group.

So a process may be in any number of them, with any others, beside a world of its own; and when members are lost, the
next generation of the group is simply another one.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from easydist.errors import CollectiveTimeout
from easydist.groups.communicators import Communicators
from easydist.transport.backends.c10d import Gloo
from easydist.transport.comm import Collectives

_CONNECT = 5.0
"""Seconds in which a store that exists answers."""


def serve(host: str) -> TCPStore:
    """A store that listens on one address of this host alone, on a free port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True)


def connect(host: str, port: int) -> TCPStore:
    """The store that another process serves.

    Raises:
        RuntimeError: Nobody listens there.
    """
    return TCPStore(host, port, None, False, timedelta(seconds=_CONNECT), wait_for_workers=False)


class Place(NamedTuple):
    """What a process is in a group.

    Attributes:
        rank: From 0.
        size: How many processes the group has.
        host: This process's own address, where the others can reach it.
    """

    rank: int
    size: int
    host: str


class PrivateGroup:
    """The membership of this process in one generation of a group.

    Args:
        name: The group's.
        store: Shared by its members and nobody else.
        place: This process in the group.
        deadline: When all of them have to be there, on the clock of ``time.monotonic``.
        timeout: Seconds that a call in the group may take.
        wait: Called while members are missing; it sleeps a little, and may raise.

    Raises:
        CollectiveTimeout: Ranks are missing; the text and ``missing`` name them.

    Attributes:
        comm: What verbs take as ``group=``.
    """

    def __init__(
        self, name: str, store: Store, place: Place, deadline: float, timeout: float, wait: Callable[[], None]
    ) -> None:
        self._store = store
        store.set(f"here/{place.rank}", "")
        _meet(name, store, place.size, deadline, wait)
        self._group = _group(f"{name}/{secrets.token_hex(4)}", store, place, timeout)
        self.comm = Collectives(Gloo(self._group, torch.device("cpu"), "gloo"), name)
        self._communicators = Communicators(self.comm, self._group)
        self.comm.communicators = self._communicators

    def close(self) -> None:
        """Leave the group: connections, shared memory and store are given back."""
        self._communicators.stop()
        self._communicators.let_go()
        self.comm.communicators = None
        del self._communicators, self._group, self._store


def _meet(name: str, store: Store, size: int, deadline: float, wait: Callable[[], None]) -> None:
    while missing := [rank for rank in range(size) if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            error = CollectiveTimeout(
                f"group {name!r}: ranks {missing} of {size} did not come in time\nEach member has to call init_group "
                "with its rank; a process that has ended has to be replaced first."
            )
            error.missing = tuple(missing)
            raise error
        wait()


def _group(name: str, store: Store, place: Place, timeout: float) -> dist.ProcessGroup:
    """A process group over gloo that torch does not know of."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timedelta(seconds=timeout), [gloo.create_device(hostname=place.host)]
    own: Any = dist.ProcessGroup
    group: Any = own(PrefixStore("group", store), place.rank, place.size)
    kind = own.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(
        torch.device("cpu"), kind, gloo(PrefixStore("gloo", store), place.rank, place.size, options)
    )
    group._set_group_name(name)
    found: dist.ProcessGroup = group
    return found
