"""Groups of processes that are no world: each has its own store and connections, and nothing of torch's default group.

So a process may be in any number of them, with any others, beside a world of its own; and when members are lost, the
next generation of the group is simply another one.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from easydist.errors import CollectiveTimeout, PeerLostError
from easydist.groups.communicators import Communicators
from easydist.groups.standalone import gloo_group
from easydist.transport.backends.c10d import Gloo
from easydist.transport.comm import Collectives

_LATE = "late"
"""The ranks that one has waited for in vain; the group is not going to be."""

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
        PeerLostError: One that had come has ended again.

    Attributes:
        comm: What verbs take as ``group=``.
    """

    def __init__(
        self, name: str, store: Store, place: Place, deadline: float, timeout: float, wait: Callable[[], None]
    ) -> None:
        self._store = store
        try:
            store.set(f"here/{place.rank}", "")
            _meet(name, store, place.size, deadline, wait)
            own, limit = f"{name}/{secrets.token_hex(4)}", timedelta(seconds=timeout)
            self._group = gloo_group(store, place.rank, place.size, own, limit, place.host)
        except RuntimeError as error:  # of the store or of gloo; nobody has said who it is
            raise PeerLostError(
                f"group {name!r}: a member was lost while the group was being made ({error})"
            ) from error
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
        if is_given_up(store):
            raise _incomplete(name, json.loads(store.get(_LATE)), size)
        if time.monotonic() > deadline:
            store.set(_LATE, json.dumps(missing))
            raise _incomplete(name, missing, size)
        wait()


def is_given_up(store: Store) -> bool:
    """True if a member has waited for the others in vain."""
    return bool(store.check([_LATE]))


def _incomplete(name: str, missing: list[int], size: int) -> CollectiveTimeout:
    error = CollectiveTimeout(
        f"group {name!r}: ranks {missing} of {size} did not come in time\nEach member has to call init_group "
        "with its rank; a process that has ended has to be replaced first."
    )
    error.missing = tuple(missing)
    return error
