"""How the ranks of a ``torch.distributed`` group come to share memory, through the group's store.

Every rank learns which ranks could attach the memory, so all raise the same error, or none does. A process that ends
meanwhile is noticed, as later in the group's operations.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.groups.sharing import introduce, is_wanted, share
from easydist.liveness import texts
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.liveness.timed_store import POLL, TimedStore
from easydist.shm.streams import Guard
from easydist.transport.backends.shm import Shm

NAME = "easydist_shm"
"""What ``init_process_group`` and ``new_group`` are given."""

_SLOTS = (2 << 20, 1 << 19, 1 << 17, 1 << 14)
"""How much a rank can publish at once, in bytes: the first for which there is room, six times for each rank."""

NEVER = 1e9
"""Seconds: the group itself looks at the time, because after a timeout it does not reconnect."""

_OUTSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


_place: ContextVar[Store | None] = ContextVar("easydist_meeting_place", default=None)


@contextlib.contextmanager
def meeting_in(store: Store) -> Iterator[None]:
    """Let the groups that are made in the body meet in this store, whatever torch makes of its own.

    So a process can make a group that exists elsewhere already, and is renewed there (``SharedMemoryGroup.renew``).

    Args:
        store: Of one meeting only.
    """
    token = _place.set(store)
    try:
        yield
    finally:
        _place.reset(token)


class _Member(Peer):
    """Another rank of a group in shared memory. Who is awaited there has not come, whatever number it tells."""

    def has_finished(self, number: int) -> bool:
        return False

    def number(self) -> int | None:
        return 0


class Meeting:
    """What the ranks of a group that is being made tell one another, through its store.

    Args:
        store: The group's.
        rank: This process in the group.
        size: How many processes the group has.
        timeout: How long all of it may last.

    Attributes:
        store: For this generation of the group.
        monitor: Knows the other processes.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout
        store = _place.get() or store
        # A store may have seen a group of this name before: each generation has keys of its own.
        generation = (store.add("came", 1) - 1) // size
        self.store = PrefixStore(f"{generation}", store)
        self._timed_store = TimedStore(self.store)
        self.monitor = Monitor(rank, size, self._timeout, self._timed_store, NAME)
        self.monitor.waits_in_memory, self.monitor.advice = True, texts.ENDED
        self.monitor.begin("init_process_group", site(), NEVER)
        self._turns = itertools.count()
        self._guard_of_group: Guard = self.monitor.guard

    def join(self) -> Shm:
        """Attach the memory that rank 0 makes, all ranks or none of them.

        Raises:
            RuntimeError: They cannot share memory; the same text on every rank.
        """
        hosts = introduce(self._exchange, self.monitor, is_wanted(), _Member)
        if len(hosts) > 1:
            seen = ", ".join(f"rank {r} on {self._host(r)}" for r in range(self.size))
            raise _impossible(
                [f"ranks are on several hosts, have EASYDIST_SHM=0, or lack Linux's memory files: {seen}"]
            )
        backend, failures = share(self._exchange, self.rank, hosts, _SLOTS, self._guard)
        if backend is None or any(failures):
            raise _impossible([text for text in failures if text])
        self.monitor.end()
        return backend

    def look_to(self, guard: Guard) -> None:
        """From now on ``guard`` says how waits in the memory end."""
        self._guard_of_group = guard

    def _guard(self, awaited: Sequence[int], waited: float) -> None:
        self._guard_of_group(awaited, waited)

    def _host(self, rank: int) -> str | None:
        return socket.gethostname() if rank == self.rank else self.monitor.peers[rank].host

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Send a message to all ranks through the store; returns the messages of all ranks."""
        store, turn = self._timed_store, next(self._turns)
        store.set(f"{turn}/{self.rank}", mine.decode())
        missing = list(range(self.size))
        while missing := [r for r in missing if not store.check([f"{turn}/{r}"])]:
            self._check(missing)
            time.sleep(POLL)
        return [self.store.get(f"{turn}/{r}") for r in range(self.size)]

    def _check(self, missing: Sequence[int]) -> None:
        self.monitor.guard(missing)
        if time.monotonic() >= self._deadline:
            raise self.monitor.late(missing, self._timeout)


def _impossible(reasons: Sequence[str]) -> RuntimeError:
    text = "; ".join(reasons)
    return RuntimeError(f"{NAME} needs memory that all ranks share: {text}. Use gloo: init_process_group('gloo')")


def site() -> str:
    """File and line of the caller outside of torch and easydist."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
