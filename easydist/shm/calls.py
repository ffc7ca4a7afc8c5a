"""The calls of a communicator in shared memory, which the ranks describe and compare.

Each rank numbers its collectives, and describes each in its cells: a code (operation, dtype, root, …) and a number of
elements. All calls up to one have a *word*: the number of the call, and a fingerprint of the codes so far. The word is
published with the slot, or with the chunk of a pipe, that carries the data, so a rank that reads the data compares the
word without a further step. A rank that waits compares the descriptions, too: the other rank may have chosen an
operation that publishes nothing for it.

A rank that finds a difference begins a *dispute*. It ends the *epoch* for all ranks: each of them ends all its
operations under way with the same error, in the operation in which it is, or in the next one that it begins. What was
under way is dropped. In the next epoch the ranks number their calls alike again; its first collective waits until all
ranks have left the epoch before. Messages do not wait for that. So a rank that computes meanwhile may find that several
epochs have ended, and raises one error about all whose statements are gone.

Several ranks may find a difference at the same time, and the difference that they find may not be the same. So each of
them states what it has found and takes a ticket, as in Lamport's bakery, and the statement with the lowest ticket
counts. That needs no atomic operation but reading and writing a number.

A message between two ranks has a *kind*, its dtype. If it is not what its receiver expects, that is a dispute, too: the
sender may be in any operation by then, and has to hear of it in one that the other ranks do not wait for.

    40 numbers per rank, written by that rank:
        code, elements                   of each of its last 16 calls
        left                             the epochs that it has left
        choosing, ticket                 1 while it takes a ticket; the epoch and the number of its last one
        sender, receiver, sent, awaited  its statement: the message that is not what is expected, or -1 and zeros,
    2 numbers per rank and other rank:
        code, elements                   and the call of that rank
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from easydist.errors import DisagreementError
from easydist.shm.cycles import Cycles
from easydist.shm.futex import give_core
from easydist.shm.slots import BEGUN, EPOCH, NEVER, NOTICE, TAG, Need, Slots

_KEPT = 16
_LEFT, _CHOOSING, _TICKET, _STATEMENT = 32, 33, 34, 36
_NUMBERS = 0xFFF
_FACTOR, _FINGERPRINT = 1000003, 0xFFFFFFFF
_EPOCH_OF_NUMBER = 40
"""The lowest bit of the epoch in the number of a call."""

_GRACE = 1.0
"""Seconds that the others have to reach a call about which two ranks disagree, so that the error names all calls."""

_LOOK = 0.01
"""Seconds between two looks at them."""

_CHOICE = 1.0
"""Seconds within which a rank has taken its ticket, unless its process has ended meanwhile."""

UNKNOWN, NOT_BEGUN, ABSENT = -1, -2, -3
"""In place of the code of a call: it is too long ago, it has not begun, or the rank takes no part."""

EQUAL = 1 << 30
"""In a code: the number of elements is the same on all ranks."""


class Description(NamedTuple):
    """A rank's description of its call: a code (``UNKNOWN``, ``NOT_BEGUN``) and a number of elements."""

    code: int
    numel: int


class Mismatch(NamedTuple):
    """A message whose receiver expects another length or dtype: its bytes, and those that are expected."""

    sender: int
    receiver: int
    sent: int
    awaited: int


class Dispute(NamedTuple):
    """A difference: the call of each rank, and the mismatch of a message if it is about one.

    If that message is no part of a collective, the codes are the dtypes of the two ranks, and 0 for the others.
    """

    calls: Sequence[Description]
    mismatch: Mismatch | None


_NO_MISMATCH = Mismatch(-1, 0, 0, 0)


def _silent(dispute: Dispute) -> DisagreementError:
    return DisagreementError(f"the ranks made different calls: {dispute}")


class Calls:
    """One rank's calls.

    Args:
        slots: The memory.

    Attributes:
        compares: True if the ranks compare their calls.
        error_of: Makes the error that the ranks raise.
        restart: Begins the steps again at a number.
        end: Ends all operations under way with an error.
        lock: Held while operations are moved or ended.
        untold: The error that has ended operations, while no operation and no wait has raised it.
        high: The epoch, as in words and kinds.
        is_entering: True until all ranks are known to have left the epoch before.
        number: The number of the last call; its upper bits are the epoch.
        cycles: The ranks' waits for one another.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots, self._words, self._rank = slots, slots.words, slots.rank
        self._at = [slots.calls_cell(rank) for rank in range(slots.size)]
        self._own = self._at[slots.rank]
        self._begun_at = [slots.cell(rank, BEGUN) for rank in range(slots.size)]
        self._begun, self._notice = self._begun_at[slots.rank], slots.cell(slots.rank, NOTICE)
        self.compares = False
        self.error_of: Callable[[Dispute], DisagreementError] = _silent
        self.restart: Callable[[int], None]
        self.end: Callable[[DisagreementError], None]
        self._epoch = self.number = self._fingerprint = self.high = 0
        self.is_entering = False
        self.lock: AbstractContextManager[object] = nullcontext()
        self.untold: DisagreementError | None = None
        self._suspected: int | None = None
        self.cycles = Cycles(slots)

    def begin(self, call: tuple[int, int]) -> int:
        """Describe the next collective by its code and its number of elements, and return its word.

        Raises:
            DisagreementError: The ranks have disagreed about an earlier call.
        """
        words = self._words
        if words[self._notice]:
            self.look()
        self.number = number = self.number + 1
        at = self._own + (number % _KEPT << 1)
        code, words[at + 1] = call
        words[at] = code
        # Last: the others read a description only once its call has begun.
        words[self._begun] = number
        self._fingerprint = fingerprint = (self._fingerprint * _FACTOR + code) & _FINGERPRINT
        return self.high | (number & _NUMBERS) << 32 | fingerprint

    def check(self) -> None:
        """Raise the error of an earlier call or message, as ``begin`` does."""
        if self._words[self._notice]:
            self.look()

    def look(self) -> None:
        """Read the notice of the other ranks, and raise the error that it is about."""
        # Before the look: a notice that comes after it leads to another look.
        self._words[self._notice] = 0
        self._slots.futex.fence()
        with self.lock:
            if self._has_ended():
                self.end(self.leave())
        self.tell()

    def tell(self) -> None:
        """Raise the error that has ended operations, if no operation and no wait has raised it."""
        untold, self.untold = self.untold, None
        if untold is not None:
            self._restart()  # a call may have been numbered while another thread left the epoch
            if not untold.is_told:
                raise told(untold)

    def keep(self, error: DisagreementError) -> None:
        """Raise an error in the next operation, if no wait raises it before."""
        self.untold = error
        self._words[self._notice] = 1

    def _has_ended(self) -> bool:
        """True if another rank has left this epoch."""
        return any(self._words[at + _LEFT] > self._epoch for at in self._at)

    # Finding differences.

    def differ(self, word: int, peer: int, found: int, expected: int) -> DisagreementError:
        """Return the error for data of another call than this rank's, or of another length.

        Args:
            word: The word of the call.
            peer: The rank that has passed the data.
            found: The bytes that it has passed.
            expected: The bytes that this rank expects.
        """
        number = self._first_difference()
        if number is not None or found == expected:
            mismatch = None
        else:
            mismatch = Mismatch(peer, self._rank, found, expected)
        if number is None:
            number = self.number - ((self.number - (word >> 32)) & _NUMBERS)
        return self._differ_at(number, mismatch)

    def _differ_at(self, number: int, mismatch: Mismatch | None) -> DisagreementError:
        words, until = self._words, time.monotonic() + _GRACE
        while time.monotonic() < until and not self._has_ended() and any(words[at] < number for at in self._begun_at):
            self._slots.sleep(self._has_ended, _LOOK)
        return self._dispute([self._call(rank, number) for rank in range(self._slots.size)], mismatch)

    def differ_in_message(self, kind: int, peer: int, found: tuple[int, int], expected: int) -> DisagreementError:
        """Return the error for a message of another dtype, or of another length, than this rank expects.

        Args:
            kind: The kind that this rank expects.
            peer: The sender.
            found: The kind and the bytes of the message.
            expected: The bytes that this rank expects.
        """
        calls = [Description(0, 0)] * self._slots.size
        calls[peer], calls[self._rank] = Description(found[0] % (1 << TAG), 0), Description(kind % (1 << TAG), 0)
        return self._dispute(calls, Mismatch(peer, self._rank, found[1], expected))

    def compare(self) -> DisagreementError | None:
        """Compare the last calls of all ranks; return the error to raise if they differ, or if a rank has found so.

        A difference counts at the second look: the other rank may have been writing its description.
        """
        if self._has_ended():
            return self.leave()
        number, before = None if self.is_entering else self._first_difference(), self._suspected
        self._suspected = number
        return None if number is None or number != before else self._differ_at(number, None)

    def cycle(self, flags: Sequence[int], call: tuple[int, int] | None) -> DisagreementError | None:
        """Return the error to raise if this rank and others wait for one another, or if a rank has found so.

        Args:
            flags: What this rank waits for, see ``cycles``.
            call: The description of the message for which it waits; None if that is a collective.
        """
        if self._has_ended():
            return self.leave()
        found = self.cycles.look(flags, self._call(self._rank, self.number) if call is None else call)
        if found is None:
            return None
        return self._dispute([Description(*found.get(rank, (ABSENT, 0))) for rank in range(self._slots.size)], None)

    def _first_difference(self) -> int | None:
        found = [number for rank in self._slots.others if (number := self._difference(rank)) is not None]
        return min(found, default=None)

    def _difference(self, rank: int) -> int | None:
        """Return the number of the first known call that differs from that of another rank."""
        last = min(self.number, self._words[self._begun_at[rank]])
        for number in range(max(last - _KEPT + 1, (self._epoch << _EPOCH_OF_NUMBER) + 1), last + 1):
            mine, other = self._call(self._rank, number), self._call(rank, number)
            if min(mine.code, other.code) < 0:
                continue
            if mine.code != other.code or (mine.code & EQUAL and mine.numel != other.numel):
                return number
        return None

    def _call(self, rank: int, number: int) -> Description:
        words, at = self._words, self._at[rank] + (number % _KEPT << 1)
        if words[self._begun_at[rank]] < number:
            return Description(NOT_BEGUN, 0)
        call = Description(words[at], words[at + 1])
        return (
            call if words[self._begun_at[rank]] < number + _KEPT - 1 else Description(UNKNOWN, 0)
        )  # read last: see ``begin``

    # Disputes.

    def _dispute(self, calls: Sequence[Description], mismatch: Mismatch | None) -> DisagreementError:
        """State a difference, unless another rank has done so; end the epoch, and return the error to raise."""
        if not self._has_ended():
            words, at = self._words, self._own + _STATEMENT
            for value in (*(mismatch or _NO_MISMATCH), *itertools.chain(*calls)):
                words[at] = value
                at += 1
            self._take_ticket()
        return self.leave()

    def _take_ticket(self) -> None:
        words, own, fence = self._words, self._own, self._slots.futex.fence
        words[own + _CHOOSING] = 1
        fence()
        last = max([0, *(ticket for ticket, _ in self._tickets())])
        fence()  # the statement comes before the ticket
        words[own + _TICKET] = self._epoch << 32 | (last + 1)
        fence()
        words[own + _CHOOSING] = 0

    def _tickets(self) -> list[tuple[int, int]]:
        """Return the tickets of this epoch, and the ranks that have them."""
        found = [(self._words[at + _TICKET], rank) for rank, at in enumerate(self._at)]
        return [(ticket & _FINGERPRINT, rank) for ticket, rank in found if ticket >> 32 == self._epoch and ticket]

    def leave(self) -> DisagreementError:
        """Leave this epoch, which a rank has ended; return the error to raise."""
        words, slots, until = self._words, self._slots, time.monotonic() + _CHOICE
        # A rank that is choosing may get the lowest ticket; one that has ended meanwhile never stops choosing.
        while any(words[at + _CHOOSING] for at in self._at) and time.monotonic() < until:
            give_core()
        # The others may have disagreed about messages of later epochs since: then the first statement left counts.
        while not (tickets := self._tickets()) and self._has_ended():
            self._epoch += 1
        error = self.error_of(self._statement(min(tickets)[1]))
        self._epoch += 1
        self.high, self.is_entering = self._epoch << EPOCH, True
        self._restart()
        # Before the notices: a rank with a notice looks at the epochs that the others have left.
        slots.write(self._own + _LEFT, self._epoch)
        for rank in slots.others:
            words[slots.cell(rank, NOTICE)] = 1
        slots.wake_all()
        return error

    def _restart(self) -> None:
        self.number = self._epoch << _EPOCH_OF_NUMBER
        self._fingerprint, self._suspected = 0, None
        self._words[self._begun] = self.number

    def _statement(self, rank: int) -> Dispute:
        at = self._at[rank] + _STATEMENT
        numbers = self._words[at : at + 4 + 2 * self._slots.size].tolist()
        mismatch, calls = (
            Mismatch(*numbers[:4]),
            itertools.starmap(Description, zip(numbers[4::2], numbers[5::2], strict=True)),
        )
        return Dispute([*calls], None if mismatch == _NO_MISMATCH else mismatch)

    def entered(self, task: Iterator[Need]) -> Iterator[Need]:
        """Run the first collectives of an epoch once all ranks have left the epoch before."""
        for rank in self._slots.others:
            while self._words[self._at[rank] + _LEFT] < self._epoch:
                yield NEVER, (rank,)
        if self.is_entering:
            self.is_entering = False
            self.restart(self._epoch << _EPOCH_OF_NUMBER)
        yield from task

    def close(self) -> None:
        """Release the memory."""
        self.cycles.close()
        del self._slots, self._words


def told(error: DisagreementError) -> DisagreementError:
    """Mark an error as raised to the caller, and return it."""
    error.is_told = True
    return error
