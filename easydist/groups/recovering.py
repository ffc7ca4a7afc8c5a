"""Recovering a group after ranks were lost: the survivors agree on the members of a new group, and connect.

The agreement itself is in ``groups/membership.py``; this module carries its events and actions between processes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from torch.distributed import PrefixStore, Store

from easydist.errors import (
    CollectiveTimeout,
    EasydistError,
    LeftOutError,
    OverlappingCallError,
    PeerLostError,
    RemoteError,
)
from easydist.groups.membership import (
    CONNECTING,
    Action,
    Connect,
    Membership,
    Raise,
    Reason,
    Register,
    Return,
    Stage,
    Write,
)
from easydist.groups.registers import (
    PageRegisters,
    RecoveryState,
    Registers,
    StoreRegisters,
    are_on_one_host,
    this_host,
    unseen,
)
from easydist.liveness import texts
from easydist.liveness.monitor import Monitor
from easydist.liveness.timed_store import POLL, TimedStore, reached, served, underlying

T = TypeVar("T")
U = TypeVar("U")

TIMEOUT = 60.0
"""Seconds within which living ranks have to come."""

LIMIT = 10.0
"""Seconds within which members that have all come are connected."""

PAUSE = 0.05
"""The least seconds between two looks at the members while they are being connected."""

ALREADY_RECOVERED = "recover: this group has already been recovered. Continue with the group that recover() returned"

_TWO_AT_ONCE = (
    "recover: another thread of this process is recovering this group, or this call interrupts it\n"
    "One thread recovers a group for all of them: let the others wait for the group that recover() returns there."
)

_kept: list[Monitor] = []
"""The monitors of recovered groups, kept so that late ranks still find the groups' entries on this process's page."""


@contextlib.contextmanager
def alone(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock under which this process recovers a group.

    Raises:
        OverlappingCallError: It is held already.
    """
    if not lock.acquire(blocking=False):
        raise OverlappingCallError(_TWO_AT_ONCE)
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Attempt:
    """An attempt to connect the members of a new group.

    Attributes:
        number: The number of the attempt; no two attempts have the same one.
        members: The members' ranks in the old group, ascending.
        rank: The rank of this process among the members.
        store: The store of this attempt alone; it lives as long as the group.
        deadline: The time (``time.monotonic``) at which the attempt is given up.
        check: A function to call again and again while waiting for a member; it raises ``EasydistError`` once the
            attempt cannot succeed, because a member has ended or given it up.
    """

    number: int
    members: tuple[int, ...]
    rank: int
    store: Store
    deadline: float
    check: Callable[[], None]

    @property
    def left(self) -> timedelta:
        """The time that is left, at least a tenth of a second."""
        return timedelta(seconds=max(0.1, self.deadline - time.monotonic()))


@dataclass(frozen=True)
class Recovered(Generic[T]):
    """The new group.

    Attributes:
        members: The members' ranks in the old group, ascending.
        made: The result of connecting.
        hosts: One text per member; equal for members of one host.
    """

    members: tuple[int, ...]
    made: T
    hosts: tuple[str, ...]


class Recovery:
    """One rank's part in recovering one group, over any number of attempts.

    Args:
        monitor: The group's monitor, which knows the other processes.
        store: The group's store, with a prefix that only recovering uses; None if the group has none.
        has_met: True if the ranks have met, so that all of them know the others' pages.
    """

    def __init__(self, monitor: Monitor, store: Store | None, has_met: bool = True) -> None:
        self.monitor, self._has_met = monitor, has_met
        self._store = store
        self._timed = None if store is None else TimedStore(store)
        self._host = this_host()
        self._place = f"r{uuid.uuid4().hex[:16]}"  # short: it stands in the register, which has to fit a page
        self._told = RecoveryState(host=self._host)
        self._heard: list[RecoveryState] = []
        self._served: Store | None = None
        self._is_done = False
        self._on_pages = False
        self._registers: Registers
        _kept.append(monitor)

    def run(self, timeout: float, connect: Callable[[Attempt], T]) -> Recovered[T]:
        """Agree with the other survivors, and connect; all of them have to come.

        Args:
            timeout: Seconds after which living ranks that have not come are left out.
            connect: Connects the members; if it raises, they try again, without ranks that were lost meanwhile.

        Raises:
            LeftOutError: The others have continued without this rank.
            CollectiveTimeout: The ranks could not be connected in time.
            PeerLostError: The ranks cannot agree: the store is gone, and they are on several hosts or had not met.
            RuntimeError: The group has been recovered already.
        """
        if self._is_done:
            raise RuntimeError(ALREADY_RECOVERED)
        self.monitor.recovers()
        self._registers = self._found_registers()
        try:
            found = self._play(self._machine(timeout), connect)
        finally:
            self.monitor.questions.end()
        self._is_done = True
        self.monitor.retire()
        return found

    def _machine(self, timeout: float) -> Membership:
        monitor = self.monitor
        return Membership(monitor.rank, monitor.size, time.monotonic(), timeout, LIMIT, self._told.register)

    def _reach(self, access: Callable[[Registers], U]) -> U:
        """Read or write the registers. Once the store is gone, ranks of one host continue on their pages.

        The store is gone for all ranks, and each has written its page before the store. So nothing that was decided in
        the store is lost.

        Raises:
            PeerLostError: The store is gone, and the ranks are not on one host, or not all of them are known.
        """
        try:
            return access(self._registers)
        except RuntimeError as error:
            if isinstance(error, EasydistError) or self._on_pages:
                raise
            self._has_met, self._timed = True, None  # the store cannot contradict this any more
            try:
                self._registers = self._found_registers()
            except PeerLostError as lost:
                raise lost from error
            self._registers.write(self._told)
        return access(self._registers)

    def _found_registers(self) -> Registers:
        monitor = self.monitor
        if self._has_met and monitor.own_page is not None and are_on_one_host(monitor.peers, monitor.entry):
            self._on_pages = True
            if hidden := unseen(monitor.peers):
                raise PeerLostError(
                    f"recover: this process is not allowed to read the status of rank {hidden[0]} on this host"
                )
            return PageRegisters(monitor.own_page, monitor.entry, monitor.rank, monitor.peers)
        if self._timed is None:
            raise PeerLostError(texts.unrecoverable(monitor.rank, monitor.name))
        return StoreRegisters(self._timed, monitor.rank, monitor.size, monitor.own_page, monitor.entry)

    def _play(self, machine: Membership, connect: Callable[[Attempt], T]) -> Recovered[T]:
        """Carry out the actions until the last one."""
        made: T | None = None
        actions = machine.begin()
        try:
            while True:
                *written, last = actions
                # Written before anything is read: the agreement rests on that order.
                for action in written:
                    self._write(action)
                if isinstance(last, Return):
                    assert made is not None
                    return Recovered(last.members, made, tuple(self._heard[rank].host for rank in last.members))
                if isinstance(last, Raise):
                    raise _error(last, self.monitor)
                if isinstance(last, Connect):
                    made = self._connected(machine, last, connect)
                    actions = machine.connected(time.monotonic(), made is not None)
                else:
                    actions = self._look(machine)
        except BaseException as error:
            if not isinstance(error, LeftOutError | CollectiveTimeout):
                with contextlib.suppress(RuntimeError, PeerLostError):  # the store may be gone
                    self._write(machine.interrupted()[0])
            raise

    def _write(self, action: Action) -> None:
        assert isinstance(action, Write)
        address = self._told.address
        if action.register.stage == Stage.READY and action.register.members[0] == self.monitor.rank:
            address = self._address(action.register)
        told = self._told = RecoveryState(action.register, self._host, address)
        self._reach(lambda registers: registers.write(told))

    def _look(self, machine: Membership) -> list[Action]:
        """Read until all registers have been read, or the time is over; return the next actions."""
        while True:
            # Sleep between writing and reading: a switch in the scheduler orders this process's memory accesses.
            time.sleep(POLL)
            now, heard = time.monotonic(), self._reach(lambda registers: registers.read())
            if heard is not None:
                self._heard = heard
                return machine.heard(now, [told.register for told in heard], self._ended(heard))
            if actions := machine.tick(now):
                return actions

    def _ended(self, heard: list[RecoveryState]) -> set[int]:
        """Return the ranks that have ended or left, and the lost ranks of other hosts that have not come since.

        A rank of this host with a broken connection is not lost as long as its process lives: it may come any moment.
        """
        ended = {peer.rank for peer in self.monitor.peers.values() if peer.is_gone() or peer.has_left()}
        lost = {*self._lost_with_hosts(), *(self.monitor.silent() if self._asks(heard, ended) else ())}
        return ended | {rank for rank in lost if heard[rank].register.stage == Stage.AWAY}

    def _lost_with_hosts(self) -> list[int]:
        """Return the rank of another host whose loss ended the group; if its host does not answer, all of that host."""
        error, peers = self.monitor.broken, self.monitor.peers
        if not isinstance(error, PeerLostError) or error.rank not in peers:
            return []
        lost = peers[error.rank]
        far = [peer for peer in peers.values() if not peer.is_visible]
        return [one.rank for one in far if one is lost or (error.is_unreachable and one.host_id == lost.host_id)]

    def _asks(self, heard: list[RecoveryState], ended: set[int]) -> bool:
        """True if this is or was the lowest rank of its host that has come, which asks the other hosts for all."""
        if self.monitor.questions.have_begun:
            return True
        lower = [r for r, peer in self.monitor.peers.items() if r < self.monitor.rank and peer.is_visible]
        return all(rank in ended or heard[rank].register.stage < Stage.HERE for rank in lower)

    # The store of the new group.

    def _address(self, register: Register) -> str:
        """Return the port of a store that this process serves for the members, or their place in the old group's.

        This process serves one if the old store does not answer, or an attempt in it has failed.
        """
        if self._served is None:
            if not self._on_pages or (register.slot == 1 and self._answers()):
                return self._place
            self._served = served("127.0.0.1", 0, LIMIT)
        return str(self._served.port)  # type: ignore[attr-defined]

    def _answers(self) -> bool:
        """True if the old group's store answers."""
        if self._timed is None:
            return False
        with contextlib.suppress(RuntimeError):
            self._timed.check(["recover"])
            return not self._timed.is_silent
        return False

    def _connected(self, machine: Membership, action: Connect, connect: Callable[[Attempt], T]) -> T | None:
        """Connect the members, and return the result; None if that has failed."""
        limit = CONNECTING * LIMIT
        deadline = time.monotonic() + limit
        check = functools.partial(self._check, machine, [time.monotonic() + PAUSE])
        try:
            store = PrefixStore(f"recover/{action.attempt}", self._meeting_place(action, limit, check))
            rank = action.members.index(self.monitor.rank)
            return connect(Attempt(action.attempt, action.members, rank, store, deadline, check))
        except (RuntimeError, EasydistError):
            return None

    def _check(self, machine: Membership, due: list[float]) -> None:
        """Raise if the members cannot be connected any more; look only when it is ``due``."""
        if (now := time.monotonic()) < due[0]:
            return
        due[0] = now + PAUSE
        heard = self._reach(lambda registers: registers.read())
        if heard and machine.is_in_vain(now, [told.register for told in heard], self._ended(heard)):
            raise RemoteError("recover: a member has ended, or has given up this attempt")

    def _meeting_place(self, action: Connect, limit: float, check: Callable[[], None]) -> Store:
        """Return the store that the first member has named: the one that it serves, or a part of the old group's.

        That part is not inside the one of the old group, whose keys would grow with each recovery.
        """
        leads = action.members[0] == self.monitor.rank
        address = (self._told if leads else self._heard[action.members[0]]).address
        if not address.isdigit():
            return PrefixStore(f"recovered/{address}", underlying(self._store))
        if not leads:
            return reached("127.0.0.1", int(address), limit, check)
        assert self._served is not None
        return self._served


def _error(action: Raise, monitor: Monitor) -> EasydistError:
    if action.reason is Reason.LEFT_OUT:
        left_out = LeftOutError(texts.left_out(monitor.rank, monitor.name, action.members))
        left_out.members = action.members
        return left_out
    late = CollectiveTimeout(texts.not_recovered(monitor.rank, monitor.name))
    late.is_final = True
    return late
