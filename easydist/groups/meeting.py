"""The meeting of the ranks of a new group, through the group's store.

Every rank learns which ranks could attach the memory, so all of them raise the same error, or none does. A process that
ends during the meeting is detected, as in the group's operations later.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed import Store

from easydist.errors import RemoteError
from easydist.groups.sharing import Hosts, introduce, is_wanted, share
from easydist.liveness import texts
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.liveness.status import nothing
from easydist.liveness.timed_store import POLL, TimedStore
from easydist.shm.streams import Guard
from easydist.transport.backends.shm import Shm

_SLOTS = (2 << 20, 1 << 19, 1 << 17, 1 << 14)
"""The bytes that a rank can publish at once: the first size that fits six times per rank into the memory."""

NEVER = 1e9
"""The monitor's timeout in seconds. The group checks the time itself, because it does not reconnect after a timeout."""

_OUTSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class _Member(Peer):
    """Another rank of a group in shared memory. An awaited rank has not come, whatever call number its page shows."""

    @classmethod
    def known(cls, rank: int, peer: Peer) -> _Member:
        """Return the process of a peer of another group as a rank of this one, in which it has no entry yet."""
        member = cls(rank)
        vars(member).update(vars(peer), rank=rank, _entry=-1, _original=peer)  # which closes the descriptors
        return member

    def has_finished(self, number: int) -> bool:
        return False

    def number(self) -> int | None:
        return 0


class Meeting:
    """The exchange of messages through the store while a group is being made.

    Args:
        store: A store that only this group uses.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        timeout: The time limit for the whole meeting.
        name: The name of the group, for errors.
        operation: The call that makes the group.
        instead: The advice in the error if ranks cannot share memory.
        known: The other processes by rank, as far as they are known from a group from which this one is split. The
            meeting does not wait for a process that has ended, or recovers that group.
        look: Called again and again while this rank waits; it raises to end the meeting.

    Attributes:
        monitor: The monitor, which knows the other processes.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str,
        operation: str,
        instead: str,
        known: Mapping[int, Peer] | None = None,
        look: Callable[[], None] = nothing,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout
        self._store, self._name, self._instead = TimedStore(store), name, instead
        self.monitor = Monitor(rank, size, self._timeout, self._store, name)
        self.monitor.waits_in_memory, self.monitor.advice = True, texts.ENDED
        self._known, self._look = known or {}, look
        self.monitor.peers |= {rank: _Member.known(rank, peer) for rank, peer in self._known.items()}
        self.monitor.begin(operation, site(), NEVER)
        self._turns = itertools.count()
        self._guard_of_group: Guard = self.monitor.guard

    def introduce(self, shares: bool) -> Hosts:
        """Exchange the identities of all ranks, and return the ranks that may share memory, by host.

        Args:
            shares: True if this process would use shared memory.

        Raises:
            EasydistError: Some ranks did not come.
        """
        return introduce(self._exchange, self.monitor, shares, _Member)

    def join(self, hosts: Hosts | None = None) -> Shm:
        """Attach the memory that rank 0 creates. Either all ranks attach it, or none does.

        Args:
            hosts: The result of ``introduce``; None to call it here.

        Raises:
            RuntimeError: The ranks cannot share memory; the text is the same on every rank.
        """
        hosts = self.introduce(is_wanted()) if hosts is None else hosts
        if len(hosts) > 1:
            seen = ", ".join(f"rank {r} on {self._host(r)}" for r in range(self.size))
            raise self._impossible(
                [f"ranks are on several hosts, have EASYDIST_SHM=0, or lack Linux's memory files: {seen}"]
            )
        backend, failures = share(self._exchange, self.rank, hosts, _SLOTS, self._guard)
        if backend is None or any(failures):
            # The memory of a rank that has ended cannot be attached, either.
            raise self.monitor.in_vain() or self._impossible([text for text in failures if text])
        self.monitor.bystanders = functools.partial(_bystanders, weakref.ref(backend))
        self.monitor.end()
        return backend

    def arrive(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            EasydistError: Some ranks did not come.
        """
        self._exchange(b"")

    @property
    def left(self) -> timedelta:
        """The time that is left for the meeting, at least a tenth of a second."""
        return timedelta(seconds=max(0.1, self._deadline - time.monotonic()))

    def look_to(self, guard: Guard) -> None:
        """Let ``guard`` decide from now on when waits in the shared memory end."""
        self._guard_of_group = guard

    def leave(self) -> None:
        """Delete this rank's messages from the store, so that the others stop relying on it."""
        for turn in range(next(self._turns)):
            with contextlib.suppress(RuntimeError):
                self._store.delete(f"{turn}/{self.rank}")

    def _guard(self, awaited: Sequence[int], waited: float) -> None:
        self._guard_of_group(awaited, waited)

    def _host(self, rank: int) -> str | None:
        return socket.gethostname() if rank == self.rank else self.monitor.peers[rank].host

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Send a message to all ranks through the store, and return the messages of all ranks."""
        store, turn = self._store, next(self._turns)
        store.set(f"{turn}/{self.rank}", mine.decode())
        told: dict[int, bytes] = {}
        while missing := [r for r in range(self.size) if r not in told]:
            came = [(r, store.get(f"{turn}/{r}", r)) for r in missing]
            told |= {r: message for r, message in came if message is not None}
            if len(told) < self.size:
                self._wait([r for r in missing if r not in told])
        return [told[r] for r in range(self.size)]

    def _wait(self, missing: Sequence[int]) -> None:
        """Wait for a moment, or raise if the wait for these ranks cannot succeed."""
        self.check(missing)
        time.sleep(POLL)

    def check(self, missing: Sequence[int] | None = None) -> None:
        """Raise if the wait for some ranks cannot succeed; None is for all."""
        missing = [*self.monitor.peers] if missing is None else missing
        self.monitor.guard(missing)
        self._look()
        for peer in [self._known[rank] for rank in missing if rank in self._known]:
            if peer.register():
                error = RemoteError(texts.recovers(peer.rank))
                error.rank = peer.rank
                raise self.monitor.in_vain() or error  # it may recover because of a rank that has ended
        if time.monotonic() >= self._deadline:
            raise self.monitor.late(missing, self._timeout)

    def _impossible(self, reasons: Sequence[str]) -> RuntimeError:
        return RuntimeError(f"{self._name} needs memory that all ranks share: {'; '.join(reasons)}. {self._instead}")


def _bystanders(backend: weakref.ref[Shm], ranks: Iterable[int]) -> Sequence[int]:
    """Do as ``Shm.bystanders``; the monitor must not keep the memory of a group that is dropped."""
    shm = backend()
    return [] if shm is None else shm.bystanders(ranks)


def site() -> str:
    """Return the file and line of the first caller outside of torch and easydist."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
