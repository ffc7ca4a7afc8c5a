"""A rendezvous: the ranks of a new group meet in a store, learn of one another, and share memory or connect.

All groups meet here that are made outside of the calls of an older group: communicators, groups of ``easydist_shm``,
of actors and of processes that share no world. Every wait asks the monitor, so a process that ends is detected as in
the group's operations later.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

import torch
import typing_extensions
from torch.distributed import DistError, PrefixStore, Store

from easydist.errors import EasydistError, PeerLostError, RemoteError, WireError
from easydist.groups.sharing import Hosts, introduce, share
from easydist.liveness import texts
from easydist.liveness.background import NoAnswerError
from easydist.liveness.log import Log, pause
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.liveness.rules import PATIENCE
from easydist.liveness.status import nothing
from easydist.liveness.timed_store import TimedStore
from easydist.shm.streams import Guard
from easydist.transport.backends.shm import Shm

_SLOTS = (2 << 20, 1 << 19, 1 << 17, 1 << 14)
"""The bytes that a rank can publish at once: the first size that fits six times per rank into the memory."""

NEVER = 1e9
"""The monitor's timeout in seconds. The group checks the time itself, because it does not reconnect after a timeout."""

_OUTSIDE = (
    os.path.dirname(torch.__file__) + os.sep,
    typing_extensions.deprecated.__call__.__code__.co_filename,  # torch's own decorators
    contextlib.__file__,
    "<eval_with_key>",  # torch.fx's name for the code that torch.compile generates
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)


class _ArrivingPeer(Peer):
    """Another rank of a rendezvous. An awaited rank has not come, whatever call number its page shows."""

    @classmethod
    def known(cls, rank: int, peer: Peer) -> _ArrivingPeer:
        """Return the process of a peer of another group as a rank of this one, in which it has no entry yet."""
        member = cls(rank)
        vars(member).update(vars(peer), rank=rank, _entry=-1)
        return member

    def has_finished(self, number: int) -> bool:
        return False

    def number(self) -> int | None:
        return 0


class Rendezvous:
    """One attempt of the ranks of a new group to meet. As a context it begins with the arrival of this rank.

    The i-th arrival of each rank meets the i-th of all others. A rank that gives up in the context before all have come
    leaves as if it had not come: the others wait on, and it may come again. After that the others hear if it is
    interrupted, and the next attempt of each rank is another one.

    Args:
        store: A store for groups of these ranks and this name, one after another.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        timeout: The time limit for the whole rendezvous.
        name: The name of the group, for errors.
        operation: The call that makes the group; empty for the name.
        advice: The advice at the end of errors.
        known: The other processes by rank, as far as they are known from a group from which this one is split. The
            rendezvous does not wait for a process that has ended, or recovers that group.
        look: Called again and again while this rank waits; it raises to end the rendezvous.

    Attributes:
        store: The part of the store for this attempt alone, once this rank has arrived.
        monitor: The monitor, which knows the other processes.
    """

    store: Store
    _messages: TimedStore

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str,
        operation: str = "",
        advice: texts.Advice = texts.ENDED,
        known: Mapping[int, Peer] | None = None,
        look: Callable[[], None] = nothing,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout
        self._place, self._arrivals, self._name = store, TimedStore(store), name
        self.monitor = Monitor(rank, size, self._timeout, None, name)
        self.monitor.waits_in_memory, self.monitor.advice = True, advice
        self._known, self._look = known or {}, look
        self.monitor.peers |= {rank: _ArrivingPeer.known(rank, peer) for rank, peer in self._known.items()}
        self._strangers = dict(self.monitor.peers)
        self.monitor.begin(operation or name, site(), NEVER)
        self._rounds: list[Log] = []
        self._have_all_come = False
        self._guard_of_group: Guard = self.monitor.guard

    def __enter__(self) -> Rendezvous:
        with self._explaining():
            number = self._arrivals.add(f"came/{self.rank}", 1, max(self._timeout, PATIENCE))
        self.store = PrefixStore(str(number), self._place)
        self._messages = TimedStore(PrefixStore("meeting", self.store))
        self.monitor.use(self._messages)
        self.monitor.is_awaited = self.monitor.is_meeting = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.monitor.is_meeting = False
        self.monitor.questions.end()
        if self._have_all_come and error is not None and not isinstance(error, Exception):
            self.monitor.interrupted(error)
        is_shared = self._have_all_come or not self.monitor.is_awaited
        if is_shared or not isinstance(error, EasydistError | KeyboardInterrupt):
            return  # all ranks raise it, for which each needs the messages of the others
        with contextlib.suppress(RuntimeError):
            if isinstance(error, PeerLostError) and self._has_come(error.rank):
                return  # all ranks raise it, and the lost one has used up this attempt, too
            for log in self._rounds:
                log.withdraw(self._messages, self.rank)
            self._arrivals.add(f"came/{self.rank}", -1, PATIENCE)

    def _has_come(self, rank: int | None) -> bool:
        if rank is None or not self._rounds:
            return False
        with contextlib.suppress(WireError):  # it has come with another job key
            return self._rounds[0].last_of(self._messages, rank) is not None
        return True

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raise an error of the store as one that says who is lost."""
        try:
            yield
        except DistError as error:
            text = texts.without_store(self.monitor.operation)
            raise self.monitor.in_vain() or PeerLostError(text) from error
        except NoAnswerError as error:
            raise self.monitor.in_vain() or self.monitor.late([*self.monitor.peers], self._timeout) from error

    def introduce(self, shares: bool) -> Hosts:
        """Exchange the identities of all ranks, and return the ranks that may share memory, by host.

        Args:
            shares: True if this process would use shared memory.

        Raises:
            EasydistError: Some ranks did not come.
        """
        with self._explaining():
            hosts = introduce(functools.partial(self._exchange, is_first=True), self.monitor, shares, _ArrivingPeer)
        self._have_all_come = True
        return hosts

    def join(self, hosts: Hosts, instead: str) -> Shm:
        """Attach the memory that rank 0 creates. Either all ranks attach it, or none does.

        Args:
            hosts: The result of ``introduce``.
            instead: The advice in the error if ranks cannot share memory.

        Raises:
            RuntimeError: The ranks cannot share memory; the text is the same on every rank.
        """
        if len(hosts) > 1:
            seen = ", ".join(f"rank {r} on {self._host(r)}" for r in range(self.size))
            reason = f"ranks are on several hosts, have EASYDIST_SHM=0, or lack Linux's memory files: {seen}"
            raise self._impossible([reason], instead)
        backend, failures = share(self.exchange, self.rank, hosts, _SLOTS, self._guard)
        if backend is None or any(failures):
            # The memory of a rank that has ended cannot be attached, either.
            raise self.monitor.in_vain() or self._impossible([text for text in failures if text], instead)
        self.monitor.parts = functools.partial(_parts, weakref.ref(backend))
        self.monitor.end()
        return backend

    def arrive(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            EasydistError: Some ranks did not come.
        """
        self.exchange(b"")

    @property
    def left(self) -> timedelta:
        """The time that is left for the rendezvous, at least a tenth of a second."""
        return timedelta(seconds=max(0.1, self._deadline - time.monotonic()))

    def look_to(self, guard: Guard) -> None:
        """Let ``guard`` decide from now on when waits in the shared memory end."""
        self._guard_of_group = guard

    def _guard(self, awaited: Sequence[int], waited: float) -> None:
        self._guard_of_group(awaited, waited)

    def _host(self, rank: int) -> str | None:
        return socket.gethostname() if rank == self.rank else self.monitor.peers[rank].host

    def exchange(self, mine: bytes) -> list[bytes]:
        """Send a message to all ranks through the store, and return the messages of all ranks.

        Raises:
            EasydistError: Some ranks did not come.
        """
        with self._explaining():
            return self._exchange(mine)

    def _exchange(self, mine: bytes, is_first: bool = False) -> list[bytes]:
        self._rounds.append(log := Log(str(len(self._rounds))))
        log.append(self._messages, self.rank, mine.decode())
        known, began = dict[int, bytes](), time.monotonic()
        while missing := sorted({*range(self.size)} - (told := log.last(self._messages)).keys()):
            if is_first:  # ranks that have come are needed for what follows, too: their end ends the wait
                changed = [r for r in self._strangers if told.get(r) != known.get(r)]
                self.monitor.peers |= {r: Peer(r, told[r]) if r in told else self._strangers[r] for r in changed}
                known = told
            # Ranks whose time was over just before did come; the last one to give up names the same ranks as the first.
            absent = [r for r in missing if not log.has_withdrawn(r)] or missing
            self.check(absent, [*missing, *self._present(told, log)] if is_first else missing)
            time.sleep(pause(self.size, time.monotonic() - began))
        return [told[r] for r in range(self.size)]

    def _present(self, told: Iterable[int], log: Log) -> list[int]:
        """Return the ranks that have come and can be observed, but for those that gave up before they ended."""
        peers = self.monitor.peers
        came = [r for r in told if r in peers]
        ended = [r for r in came if peers[r].has_ended()]  # perhaps before it could be seen
        gave_up = {*ended} - {*log.last(self._messages)} if ended else ()
        return [r for r in came if r not in gave_up and (r in ended or peers[r].is_visible)]

    def check(self, missing: Sequence[int] | None = None, awaited: Sequence[int] | None = None) -> None:
        """Raise if ranks cannot come or be connected any more, or the time is over.

        Args:
            missing: The ranks that have not come; None for all.
            awaited: The ranks whose end ends the wait; None for those that have not come.
        """
        missing = [*self.monitor.peers] if missing is None else missing
        awaited = missing if awaited is None else awaited
        self.monitor.guard(awaited)
        self._look()
        for peer in [self._known[rank] for rank in awaited if rank in self._known]:
            if peer.register():
                error = RemoteError(texts.recovers(peer.rank), rank=peer.rank)
                raise self.monitor.in_vain() or error  # it may recover because of a rank that has ended
        if time.monotonic() >= self._deadline:
            raise self.monitor.late(missing, self._timeout)

    def _impossible(self, reasons: Sequence[str], instead: str) -> RuntimeError:
        return RuntimeError(f"{self._name} needs memory that all ranks share: {'; '.join(reasons)}. {instead}")


def _parts(backend: weakref.ref[Shm], awaited: Sequence[int]) -> dict[int, bool | None] | None:
    """Do as ``Shm.parts``; the monitor must not keep the memory of a group that is dropped."""
    shm = backend()
    return None if shm is None else shm.parts(awaited)


def site() -> str:
    """Return the file and line of the first caller outside of torch and easydist."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
