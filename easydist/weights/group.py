"""Groups of processes beside torch's default group, each with its own store and connections.

A process can be in any number of them, with any other processes, beside a world of its own. After the loss of members,
the next generation of the group is simply another group.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import Store

from easydist.errors import CollectiveTimeout, PeerLostError
from easydist.groups.communicators import Communicators
from easydist.groups.standalone import gloo_group
from easydist.liveness.stored import decoded, in_store
from easydist.liveness.timed_store import TimedStore
from easydist.transport.backends.c10d import Gloo
from easydist.transport.comm import Collectives

_LATE = "late"
"""The key for the ranks that a member has waited for in vain. It marks the group as abandoned."""

CONNECT = 5.0
"""Seconds within which an existing store answers."""


class Endpoint(NamedTuple):
    """A process in a group, as the others see it.

    Attributes:
        rank: The rank, from 0.
        size: The number of processes in the group.
        host: This process's own address, where the others can reach it.
    """

    rank: int
    size: int
    host: str


class PrivateGroup:
    """The membership of this process in one generation of a group.

    Args:
        name: The name of the group.
        store: A store for the members of the group alone.
        endpoint: This process in the group.
        deadline: The time by which all members must have joined, on the clock of ``time.monotonic``.
        timeout: The seconds that a call in the group may take.
        wait: A function to call while members are missing. It sleeps for a moment, and may raise.

    Raises:
        CollectiveTimeout: Ranks are missing; the text and ``missing`` name them.
        PeerLostError: A member that had joined has ended.

    Attributes:
        comm: The communicator that verbs accept as ``group=``.
    """

    def __init__(
        self, name: str, store: Store, endpoint: Endpoint, deadline: float, timeout: float, wait: Callable[[], None]
    ) -> None:
        self._store = store
        try:
            _meet(name, TimedStore(store), endpoint, deadline, wait)
            own, limit = f"{name}/{secrets.token_hex(4)}", timedelta(seconds=timeout)
            self._group = gloo_group(store, endpoint.rank, endpoint.size, own, limit, endpoint.host)
        except RuntimeError as error:  # from the store or from gloo; it names no rank
            raise PeerLostError(
                f"group {name!r}: a member was lost while the group was being made ({error})"
            ) from error
        self.comm = Collectives(Gloo(self._group, torch.device("cpu"), "gloo"), name)
        self._communicators = Communicators(self.comm, self._group)
        self.comm.communicators = self._communicators

    def close(self) -> None:
        """Leave the group, and release connections, shared memory and store."""
        self._communicators.leave()
        self._communicators.stop()
        self._communicators.let_go()
        self.comm.communicators = None
        del self._communicators, self._group, self._store


def _meet(name: str, store: TimedStore, endpoint: Endpoint, deadline: float, wait: Callable[[], None]) -> None:
    store.set(f"here/{endpoint.rank}", "")
    while missing := [rank for rank in range(endpoint.size) if store.get(f"here/{rank}", rank) is None]:
        if (text := store.get(_LATE)) is not None:
            raise _incomplete(name, decoded(in_store(_LATE), text, [int]), endpoint.size)
        if time.monotonic() > deadline:
            store.set(_LATE, json.dumps(missing))
            raise _incomplete(name, missing, endpoint.size)
        wait()


def is_given_up(store: Store) -> bool:
    """True if a member has waited for the others in vain."""
    return TimedStore(store).check([_LATE])


def _incomplete(name: str, missing: list[int], size: int) -> CollectiveTimeout:
    error = CollectiveTimeout(
        f"group {name!r}: ranks {missing} of {size} did not come in time\nEach member has to call init_group "
        "with its rank; a process that has ended has to be replaced first."
    )
    error.missing = tuple(missing)
    return error
