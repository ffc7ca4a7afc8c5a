"""Memory of one host in which each rank of a communicator has a region and signals that all other ranks can access.

the futex                        one cache line
per rank: its signals            numbers of 8 bytes
          its waits              two such numbers, see ``SignalWait``
per rank: its region             at a multiple of 64 bytes
"""

from __future__ import annotations

import ctypes
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch

from easydist.comms.failures import BROKEN, CommPeerLost, CommTimeout, conditions, explained, how, lost, named
from easydist.groups.sharing import Exchange, is_wanted
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer, host_id
from easydist.shm.futex import Futex
from easydist.shm.segment import Segment
from easydist.transport.comm import Collectives

_LINE = 64
_LOOK = 0.05
"""The longest sleep in seconds. A wake-up may get lost, so a waiting rank looks again after this time."""

_WAITS = 32
"""The bit from which a rank's first number counts its waits; the bits below count the looks of the present one."""


class SignalWait:
    """One wait of this rank for a signal that any rank may send, as the other ranks see it.

    Once a rank has ended, all others may wait for a signal that never comes.

    In shared memory each rank has two numbers: which of its waits it is in, and how often it has looked there without
    success (0 outside of a wait); and the last wait that another rank has found to be hopeless.

    Args:
        numbers: The two numbers of each rank.
        rank: This rank.
        number: The number of this wait among those of this rank, from 1; 0 if this rank may signal others meanwhile.
    """

    NUMBERS = 2

    def __init__(self, numbers: Sequence[memoryview], rank: int, number: int) -> None:
        self._numbers, self._mine, self._wait = numbers, numbers[rank], number
        self._looks = 0
        self._seen = dict[int, int]()

    def look(self) -> None:
        """Count a look that found no signal."""
        if self._wait:
            self._looks += 1
            self._mine[0] = (self._wait << _WAITS) + self._looks

    def end(self) -> None:
        """End the wait."""
        if self._wait:
            self._mine[0] = 0

    def is_in_vain(self, others: Iterable[int]) -> bool:
        """True if none of these ranks, which are all that are left, can signal any more: each of them waits as well.

        Each has then looked twice in one wait since this rank saw it there before. The second of these looks began
        when all were waiting already, so it missed no signal.
        """
        now = {rank: self._numbers[rank][0] for rank in others}
        if not now or (self._wait and self._mine[1] == self._wait):
            return True
        if not all(rank in self._seen and _is_same_wait(self._seen[rank], seen) for rank, seen in now.items()):
            self._seen = now
        elif self._wait and all(seen >= self._seen[rank] + 2 for rank, seen in now.items()):
            for rank, seen in now.items():  # this rank may signal again: let them hear of it before it does
                self._numbers[rank][1] = seen >> _WAITS
            return True
        return False


def _is_same_wait(before: int, now: int) -> bool:
    return now > 0 and before >> _WAITS == now >> _WAITS


class Regions:
    """Memory that all ranks of a communicator share. All of them create it together.

    Args:
        core: The communicator.
        exchange: An exchange among its ranks.
        nbytes: The bytes of each region, the same number on all ranks.
        signals: The number of signals of each rank.
        fault: The reason for which this rank cannot create it; empty if there is none.

    Raises:
        RuntimeError: A rank has a fault, or the ranks cannot share memory, or want different sizes. The text is the
            same on all ranks.
    """

    def __init__(self, core: Collectives, exchange: Exchange, nbytes: int, signals: int, fault: str = "") -> None:
        self.rank, self.size, self.nbytes, self.count = core.get_rank(), core.get_size(), nbytes, signals
        self._name = core.get_name()
        row = _aligned(8 * (signals + SignalWait.NUMBERS))
        self._regions = _LINE + self.size * row
        self._check(core, exchange, fault)
        segment = self._attached(exchange, max(1, self._regions + self.size * _aligned(nbytes)))
        self._memory = segment.memory
        self._bytes = torch.frombuffer(segment.memory, dtype=torch.uint8)
        view = memoryview(segment.memory)
        self._futex = Futex(view[:4], ctypes.addressof(ctypes.c_char.from_buffer(segment.memory)), self.rank)
        rows = [view[_LINE + r * row : _LINE + (r + 1) * row].cast("q") for r in range(self.size)]
        self._signals = [numbers[:signals] for numbers in rows]
        self._waits, self._begun = [numbers[signals:] for numbers in rows], itertools.count(1)

    def _check(self, core: Collectives, exchange: Exchange, fault: str) -> None:
        """Make sure that all ranks share a host and ask for the same sizes."""
        if core.get_device().type != "cpu":
            raise RuntimeError(f"windows are in CPU memory, but the communicator is on {core.get_device()}")
        mine = json.dumps([self.nbytes, self.count, host_id() if is_wanted() else f"rank {self.rank} alone", fault])
        sizes, counts, hosts, faults = zip(*map(json.loads, exchange(mine.encode())), strict=True)
        if any(faults):
            raise RuntimeError("; ".join(f"{text} (rank {rank})" for rank, text in enumerate(faults) if text))
        if len(set(hosts)) > 1:
            raise RuntimeError(
                f"windows need ranks that share a host's memory; those of {self._name!r} are on {len(set(hosts))} "
                f"hosts (or have EASYDIST_SHM=0): use send and recv between hosts, or split() the ranks of one host"
            )
        if len(set(sizes)) > 1 or len(set(counts)) > 1:
            raise RuntimeError(f"the ranks ask for different windows: {list(sizes)} bytes, {list(counts)} signals")

    def _attached(self, exchange: Exchange, nbytes: int) -> Segment:
        segment, failure = None, ""
        if self.rank == 0:
            try:
                segment = Segment.create(nbytes)
            except (OSError, OverflowError) as error:
                failure = f"rank 0 has no room for {nbytes} bytes in /dev/shm ({error})"
        name = json.loads(exchange(json.dumps(segment.name if segment else "").encode())[0])
        if name and segment is None:
            try:
                segment = Segment.attach(name, nbytes)
            except OSError as error:
                failure = f"rank {self.rank} cannot attach the memory of rank 0 ({error})"
        failures = [text.decode().strip() for text in exchange(failure.encode())]
        if self.rank == 0 and segment is not None:
            segment.unlink()
        if any(failures) or segment is None:
            raise RuntimeError(f"windows need shared memory: {'; '.join(filter(None, failures))}")
        return segment

    def region(self, rank: int) -> torch.Tensor:
        """Return the bytes of a rank's region, as a view."""
        begin = self._regions + rank * _aligned(self.nbytes)
        return self._bytes[begin : begin + self.nbytes]

    def signal(self, rank: int, slot: int, value: int) -> None:
        """Store a number for a rank and wake it. The rank sees all earlier writes of this process before the number."""
        if self._futex.release is not None:
            self._futex.release()
        self._signals[rank][slot] = value
        self._futex.fence()
        self._futex.wake(1 << rank % 32)

    def value(self, slot: int) -> int:
        """Return this rank's number in a slot."""
        return self._signals[self.rank][slot]

    def wait(
        self,
        slot: int,
        is_met: Callable[[int], bool],
        limit: timedelta,
        senders: Sequence[int],
        monitor: Monitor | None = None,
        *,
        blocks: bool = True,
    ) -> None:
        """Sleep until the number in a slot of this rank meets a condition.

        Args:
            slot: The slot.
            is_met: The condition.
            limit: The time limit.
            senders: The other ranks that may write the number.
            monitor: Knows these ranks; None if there is no monitor.
            blocks: True if this rank signals nobody meanwhile.

        Raises:
            CommPeerLost: A sender has ended, or left the communicator, so have all others or they wait for signals
                themselves, and the number does not meet the condition.
            EasydistError: A sender has left the communicator's exchanges, because of an error or to recover it: the
                same error as in an operation.
            CommTimeout: The number has not met it within ``limit``.
        """
        deadline = time.monotonic() + limit.total_seconds()
        peers = [] if monitor is None else [monitor.peers[rank] for rank in senders]
        gone, error, is_in_vain = list[Peer](), None, False
        wait = SignalWait(self._waits, self.rank, next(self._begun) if blocks else 0)
        try:
            while not is_met(self.value(slot)):
                expected = self._futex.value()
                self._futex.fence()
                if is_met(self.value(slot)):
                    return
                left = deadline - time.monotonic()
                if left <= 0 or is_in_vain:
                    raise self._in_vain(slot, limit, gone, peers, is_late=left <= 0)
                if error is not None:
                    raise explained(error, "wait_signal", limit, [], f"The communicator {BROKEN}") from error
                wait.look()
                self._futex.sleep(expected, min(left, _LOOK))
                # Before the next look, which sees their last signals. The first stays first: others end because of it.
                gone += [peer for peer in peers if peer not in gone and (peer.has_ended() or peer.has_left())]
                error = None if monitor is None else monitor.reported(senders)
                is_in_vain = bool(gone) and wait.is_in_vain({*senders} - {peer.rank for peer in gone})
        finally:
            wait.end()

    def _in_vain(
        self, slot: int, limit: timedelta, gone: Sequence[Peer], senders: Sequence[Peer], is_late: bool
    ) -> CommTimeout | CommPeerLost:
        held = f"slot {slot} of rank {self.rank} holds {self.value(slot)}"
        if not is_late:
            rest = "" if len(gone) == len(senders) else ", and all others wait for signals, too"
            return lost(f"wait_signal: {named(gone)} has {how(gone[0])} without the signal: {held}{rest}", gone)
        ended = f", and {named(gone)} has {how(gone[0])}" if gone else ""
        known = conditions((peer for peer in senders if peer not in gone), even_if_well=False)
        return CommTimeout(f"wait_signal timed out after {limit.total_seconds():g} s: {held}{ended}{known}")


def check_fits(numel: int, offset: int, dtype: torch.dtype, nbytes: int) -> None:
    """Make sure that elements lie inside a region.

    Raises:
        RuntimeError: They do not fit.
    """
    if offset < 0:
        raise RuntimeError(f"the offset in the window must not be negative, got {offset}")
    if (end := (numel + offset) * dtype.itemsize) > nbytes:
        raise RuntimeError(
            f"Requested size ({end} bytes) exceeds the window size ({nbytes} bytes): {numel} elements of {dtype} at "
            f"offset {offset}, which counts elements"
        )


def numel_of(sizes: Sequence[int]) -> int:
    """Return the number of elements of a shape.

    Raises:
        RuntimeError: A size is negative.
    """
    count = 1
    for size in sizes:
        if size < 0:
            raise RuntimeError(f"sizes must not be negative, got {tuple(sizes)}")
        count *= size
    return count


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
