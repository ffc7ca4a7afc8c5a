"""The layout of the segment of one group, and the numbers by which ranks announce data.

    the futex                                 8 bytes on a cache line of its own
    per rank, numbers of 8 bytes              four or more cache lines, written by that rank only:
        step, length, length                  the last step published; the lengths of the data in its slots
        begun, waits                          the collectives begun; 1 if a thread waits in this group
        word, word                            the calls to which the data in its slots belongs, see ``calls``
        notice                                1 if another rank has something to tell it; the others write this one
        asleep                                1 if this rank has to be woken, else 0
        posted, per lane and peer             chunks written to the pipe to that peer
        taken, per lane and peer              chunks copied out of the pipe from that peer
        eight numbers, per peer               the numbers of the mailboxes, see ``mailbox``
        two pairs, per lane and peer          the bytes left of the message with each chunk of the pipe to that peer,
                                              and the kind of that message
        its calls, and its wait               see ``calls`` and ``cycles``
    per rank, data                            two slots, and two chunks of a pipe per lane and peer
    per rank, messages                        two chunks of a mailbox per peer

A *slot* is read by all other ranks. Its owner fills it for a step and publishes the step's number; the others wait for
that number. A rank that has published step k has finished all its reads up to step k - 1. So data that is read in step
k may be overwritten once all ranks have published k + 1, and no acknowledgements are sent.
A rank that publishes wakes all sleeping ranks. If only the last of the awaited ranks did so, there would be fewer
context switches, but it took 40 % more time on four ranks and two cores, because then all ranks run at once.

A *pipe* leads from one rank to one other. Both count its chunks, and two chunks may be under way. There is one pipe per
*lane* (collectives and messages). Together a rank's pipes take as much room as four slots: a pipe's chunk is a slot
divided by W. The mailboxes of a rank take 128 KiB, independent of the size of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

import torch

from easydist.memory import copy
from easydist.shm.futex import Futex
from easydist.shm.segment import Segment

COLLECTIVES, POINT_TO_POINT = 0, 1
_LANES = 2
_LINE = 8
"""The count of 8-byte numbers on a cache line of 64 bytes."""

_STEP, _LENGTH, BEGUN, _WAITS, _WORD, NOTICE, _ASLEEP = 0, 1, 3, 4, 5, 7, _LINE
_CALLS, _CALLS_PER_RANK = 40, 2
"""The count of numbers in which a rank describes its calls: those of its own, and those about each rank."""

_WAIT, _WAIT_PER_RANK = 4, 1
"""The same for its wait."""

_PAGE = 4096
_SLOTS_PER_RANK = 6
"""The room for a rank's data, in slots: two slots, and four for the pipes."""

_MESSAGES = 1 << 16
"""Half of the bytes for a rank's mailboxes."""

NEVER = 1 << 62
"""A step that no rank ever publishes."""

EPOCH = 44
"""The lowest bit of the epoch in the word of a call and the kind of a message, see ``calls``; 2¹⁹ epochs fit."""

TAG, TAGS = 24, 1 << 20
"""The lowest bit of the tag in the kind of a message between two ranks, and the number of tags."""

Differ = Callable[[int, int, int, int], Exception]
"""A function of a rank, the kind of its message, its bytes, and the bytes expected; it returns the error to raise."""

Need = tuple[int, tuple[int, ...]]
"""The reason for which a generator waits: a step that these ranks have to publish, or ``NEVER`` and a pipe's peer."""


def rounded(value: int, unit: int) -> int:
    """Return the least multiple of a unit that is not less than a value."""
    return -(-value // unit) * unit


class Slots:
    """One rank's view of the segment.

    Args:
        segment: The group's segment, of ``Slots.nbytes(size, slot)`` bytes, zeros at first.
        rank: The rank of this process in the group.
        size: The number of processes in the group.

    Attributes:
        slot: The bytes of a slot.
        slots: The addresses of the two slots of each rank.
        memory: The memory of the segment.
        chunk: The bytes of a pipe's chunk.
        message_chunk: The bytes of a mailbox's chunk.
        others: All ranks except this one.
        futex: The futex on which the ranks sleep.
        words: The numbers of the control block.
    """

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.others = tuple(r for r in range(size) if r != rank)
        self._block = _block(size)
        self._data = _control(size)
        self.message_chunk = _message_chunk(size)
        self.slot = (segment.nbytes - self._data - _messages(size)) // (_SLOTS_PER_RANK * size)
        self.chunk = self.slot // size
        self.memory = segment.memory
        self._address = torch.frombuffer(segment.memory, dtype=torch.uint8).data_ptr()
        self.slots = [[self._address + self.slot_offset(r, half) for half in (0, 1)] for r in range(size)]
        self.words = self._words = memoryview(segment.memory)[: self._data].cast("q")
        self.futex = Futex(self._words, self._address, rank)
        self._fence, self._release = self.futex.fence, self.futex.release
        self._step_at = [self._cell(r, _STEP) for r in range(size)]
        self._own_step = self._step_at[rank]
        self._own_waits = self._cell(rank, _WAITS)
        # Ranks r and r + 32 share a bit: one of them is woken for nothing, looks, and sleeps again.
        self._asleep_at = [(1 << r % 32, self._cell(r, _ASLEEP)) for r in self.others]
        self._pipes: dict[tuple[int, int, int], Pipe] = {}
        self._sleepers: list[None] = []  # one for each thread; lists change in one step, numbers do not

    @staticmethod
    def nbytes(size: int, slot: int) -> int:
        """Return the bytes that a segment needs for slots of at least ``slot`` bytes."""
        slots = _SLOTS_PER_RANK * size * rounded(max(slot, 1), 8 * _LINE * size)
        return _control(size) + slots + _messages(size)

    def _cell(self, rank: int, number: int) -> int:
        return _LINE + rank * self._block + number

    def slot_offset(self, rank: int, half: int) -> int:
        """Return the offset of a slot in ``memory``."""
        return self._data + (_SLOTS_PER_RANK * rank + half) * self.slot

    def published_with(self, rank: int, half: int) -> tuple[int, int]:
        """Return the length and the word that were published with a slot."""
        words, at = self._words, self._step_at[rank] + half
        return words[at + _LENGTH], words[at + _WORD]

    def holds(self, rank: int, half: int, length: int, word: int) -> bool:
        """True if a slot holds data of this length, of the call with this word."""
        at = self._step_at[rank] + half
        return self._words[at + _LENGTH] == length and self._words[at + _WORD] == word

    def read(self, cell: int) -> int:
        """Return a number of the control block."""
        number: int = self._words[cell]
        return number

    def has_published(self, rank: int, step: int) -> bool:
        """True if a rank has published ``step``, or a later one."""
        return self._words[self._step_at[rank]] >= step

    def publish(self, step: int, data: tuple[int, int, int] | None = None) -> None:
        """Announce that this rank's slot is filled for ``step``, and that it has read all it needs of earlier steps.

        Args:
            step: The step.
            data: The slot in which the others read data, its length, and the word of its call.
        """
        words, own = self._words, self._own_step
        if data is not None:
            # Before the step: a rank that sees the step reads both.
            half, length, word = data
            words[own + _LENGTH + half] = length
            words[own + _WORD + half] = word
        if self._release is not None:
            self._release()
        words[own] = step
        # First the step, then the sleepers. A sleeper shows itself, then looks for the step: one sees the other.
        self._fence()
        asleep = 0
        for bit, cell in self._asleep_at:
            if words[cell]:
                asleep |= bit
        if asleep:
            self.futex.wake(asleep)

    def calls_cell(self, rank: int) -> int:
        """Return the first of the cells in which ``rank`` describes its calls."""
        return self._cell(rank, self._block - _calls(self.size))

    def wait_cell(self, rank: int) -> int:
        """Return the first of the cells in which ``rank`` describes its wait, which are after its calls."""
        return self.calls_cell(rank) + _CALLS + _CALLS_PER_RANK * self.size

    def cell(self, rank: int, number: int) -> int:
        """Return one of the first cells of a rank: ``BEGUN`` or ``NOTICE``."""
        return self._cell(rank, number)

    def wake_all(self) -> None:
        """Wake all ranks that sleep."""
        self._fence()
        self.futex.wake(-1 & 0xFFFFFFFF)

    def show_waiting(self, is_waiting: bool) -> None:
        """Show the others that a thread of this rank waits, or that one no longer does; it is for error texts only."""
        self._words[self._own_waits] = is_waiting

    def parts(self, number: int) -> dict[int, bool | None]:
        """Return what the other ranks do about the collective of this number, as ``Shm.parts`` does."""
        words = self._words
        return {r: self.waits(r) if words[self._cell(r, BEGUN)] >= number else None for r in self.others}

    def waits(self, rank: int) -> bool:
        """True if a thread of a rank waits, see ``show_waiting``."""
        return bool(self._words[self._cell(rank, _WAITS)])

    def sleep(self, woken: Callable[[], bool], seconds: float) -> bool:
        """Sleep until another rank has published, or changed a pipe of this rank's.

        Args:
            woken: Returns True if anything has moved. It is called when the others can see that this rank sleeps, and
                again afterwards; the first call catches announcements made before that.
            seconds: The longest sleep in seconds.

        Returns:
            The last result of ``woken``.
        """
        mine, sleepers, words = self._cell(self.rank, _ASLEEP), self._sleepers, self._words
        # Before the last look: a wake-up after that changes the value, and the kernel refuses to sleep.
        expected = self.futex.value()
        sleepers.append(None)
        words[mine] = 1
        self._fence()
        try:
            if woken():
                return True
            self.futex.sleep(expected, seconds)
        finally:
            sleepers.pop()
            if not sleepers:
                words[mine] = 0
                if sleepers:  # another thread has gone to sleep in between
                    words[mine] = 1
        return woken()

    def rouse(self) -> None:
        """Wake the sleeping threads of this rank."""
        self.futex.wake(1 << self.rank % 32)

    def pipe_to(self, lane: int, peer: int) -> Pipe:
        """Return the pipe to a peer, which this rank fills."""
        return self._pipes.get((lane, self.rank, peer)) or self._make_pipe(lane, self.rank, peer)

    def pipe_from(self, lane: int, peer: int) -> Pipe:
        """Return the pipe from a peer, which this rank empties."""
        return self._pipes.get((lane, peer, self.rank)) or self._make_pipe(lane, peer, self.rank)

    def _make_pipe(self, lane: int, src: int, dst: int) -> Pipe:
        cells, chunks = self._pipe(lane, src, dst)
        peer = dst if src == self.rank else src
        pipe = Pipe(self._words, self.futex, cells, chunks, self.chunk, (peer, self._cell(peer, _ASLEEP)))
        pipe.lane, pipe.is_out = lane, src == self.rank
        return self._pipes.setdefault((lane, src, dst), pipe)

    def _pipe(self, lane: int, src: int, dst: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Return the cells of ``posted``, ``taken`` and the lengths, and the addresses of the two chunks."""
        # With four ranks: posted at 16, taken at 24, the mailboxes at 32, lengths and kinds at 64.
        taken = 2 * _LINE + rounded(_LANES * self.size, _LINE)
        lengths = 2 * taken - 2 * _LINE + self.size * _LINE
        first = self._address + self.slot_offset(src, 2) + 2 * (lane * self.size + dst) * self.chunk
        return (
            (
                self._cell(src, 2 * _LINE + lane * self.size + dst),
                self._cell(dst, taken + lane * self.size + src),
                self._cell(src, lengths + 4 * (lane * self.size + dst)),
            ),
            (first, first + self.chunk),
        )

    def message_cell(self, rank: int, peer: int) -> int:
        """Return the first cell of the eight numbers that ``rank`` writes about its messages to and from ``peer``."""
        return self._cell(rank, 2 * _LINE + 2 * rounded(_LANES * self.size, _LINE) + peer * _LINE)

    def message_address(self, src: int, dst: int) -> int:
        """Return the address of the two chunks of the mailbox for messages from ``src`` to ``dst``."""
        first = self._address + self._data + _SLOTS_PER_RANK * self.size * self.slot
        return first + 2 * (src * self.size + dst) * self.message_chunk

    def write(self, cell: int, number: int) -> None:
        """Write one of this rank's numbers that no rank sleeps for."""
        if self._release is not None:
            self._release()
        self._words[cell] = number

    def tell(self, cell: int, number: int, peer: int) -> None:
        """Write one of this rank's numbers, and wake ``peer``, which may sleep for it."""
        self.write(cell, number)
        self._fence()
        if self._words[self._cell(peer, _ASLEEP)]:
            self.futex.wake(1 << peer % 32)


class Pipe:
    """The pipe from one rank to another; ``put`` and ``take`` are generators that yield to wait for the peer.

    Attributes:
        peer: The other rank.
        lane: Its lane.
        is_out: True if this rank fills it.
        is_lent: True while a ``take`` of the messages of any rank uses it.
    """

    lane, is_out = COLLECTIVES, False

    def __init__(
        self,
        words: memoryview,
        futex: Futex,
        cells: tuple[int, int, int],
        chunks: tuple[int, int],
        chunk: int,
        peer: tuple[int, int],
    ) -> None:
        self._words, self._futex = words, futex
        self._posted, self._taken, self._lengths = cells
        self._chunks, self._chunk = chunks, chunk
        self.peer, self._asleep = peer
        self._aside: list[tuple[int, torch.Tensor]] = []
        self.is_lent, self._first = False, NEVER  # the number of the first chunk of the message under way
        self._bit, self._need = 1 << self.peer % 32, (NEVER, (self.peer,))

    def put(self, address: int, nbytes: int, kind: int) -> Iterator[Need]:
        """Write the ``nbytes`` at ``address`` into the pipe; end when the last chunk is in it. No bytes are a chunk."""
        self._first = self._words[self._posted]
        for offset in range(0, nbytes or 1, self._chunk):
            while not self._put_chunk(address + offset, nbytes - offset, kind):
                yield self._need

    def has_room(self, sizes: Iterable[int]) -> bool:
        """True if the pipe would take messages of these bytes at once."""
        chunks = sum([-(-nbytes // self._chunk) or 1 for nbytes in sizes])
        return self._words[self._posted] + chunks - self._words[self._taken] <= 2

    def has_begun(self) -> bool:
        """True if the receiver has taken a part of the message of the ``put`` or ``take`` under way."""
        return self._words[self._taken] > self._first

    def put_whole(self, address: int, nbytes: int, kind: int) -> bool:
        """Write a message at once; return False if it needs several chunks, or if there is no room yet."""
        return nbytes <= self._chunk and self._put_chunk(address, nbytes, kind)

    def _put_chunk(self, address: int, left: int, kind: int) -> bool:
        """Write the next chunk of a message of which ``left`` bytes are left; return False if there is no room yet."""
        words = self._words
        # The sender alone writes ``posted``, the receiver alone ``taken``: neither needs a lock.
        posted = words[self._posted]
        if posted - words[self._taken] >= 2:
            return False
        at = self._lengths + posted % 2 * 2
        words[at], words[at + 1] = left, kind
        copy(self._chunks[posted % 2], address, left if left < self._chunk else self._chunk)
        self._tell(self._posted, posted + 1)
        return True

    def take(self, address: int, nbytes: int, kind: int, differ: Differ, lent: bool = False) -> Iterator[Need]:
        """Copy the next ``nbytes`` of the pipe to ``address``.

        Args:
            address: The address.
            nbytes: The bytes of the message.
            kind: The kind of the message. Messages of earlier epochs are dropped, those with other tags put aside.
            differ: Gives the error if the next message has another length or kind.
            lent: True if it has set ``is_lent``.

        Raises:
            Exception: The error of ``differ``.
        """
        while self.is_lent and not lent:
            yield self._need
        words, chunk, self._first = self._words, self._chunk, NEVER
        if self._aside and (message := self._from_aside(kind)) is not None:
            found, data = message
            if found != kind or len(data) != nbytes:
                raise differ(self.peer, found, len(data), nbytes)
            copy(address, data.data_ptr(), nbytes)
            return
        taken = words[self._taken]
        for offset in range(0, nbytes or 1, chunk):
            while True:
                while words[self._posted] <= taken:
                    yield self._need
                at = self._lengths + taken % 2 * 2
                if words[at] == nbytes - offset and words[at + 1] == kind:
                    break
                if (epoch := words[at + 1] >> EPOCH) == kind >> EPOCH:
                    if self.lane == COLLECTIVES or words[at + 1] >> TAG == kind >> TAG:
                        raise differ(self.peer, words[at + 1], words[at] + offset, nbytes)
                    taken = yield from self._put_aside(taken)
                    continue
                # Of a call that ended with an earlier epoch: nobody receives it any more.
                if epoch < kind >> EPOCH:
                    taken += 1
                    self._tell(self._taken, taken)
                else:  # its sender has left this epoch, and this rank is about to hear of that
                    yield self._need
            copy(address + offset, self._chunks[taken % 2], min(chunk, nbytes - offset))
            self._first = min(self._first, taken)
            taken += 1
            self._tell(self._taken, taken)

    def has_come(self, kind: int) -> Generator[Need, None, bool]:
        """Return True if a message with this tag has come; put aside those with other tags that came before it."""
        words, lengths = self._words, self._lengths
        if any(found >> TAG == kind >> TAG for found, _ in self._aside):
            return True
        while words[self._posted] > (taken := words[self._taken]):
            found = words[lengths + taken % 2 * 2 + 1]
            if found >> EPOCH >= kind >> EPOCH and found >> TAG != kind >> TAG:
                if found >> EPOCH > kind >> EPOCH:  # its sender has left this epoch, see ``take``
                    return False
                yield from self._put_aside(taken)
            elif found >> EPOCH < kind >> EPOCH:
                self._tell(self._taken, taken + 1)
            else:
                return True
        return False

    def _put_aside(self, taken: int) -> Generator[Need, None, int]:
        """Take the next message out of the pipe for a later ``take`` with its tag; return the chunks taken so far."""
        words, at = self._words, self._lengths + taken % 2 * 2
        nbytes, kind = words[at], words[at + 1]
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for offset in range(0, nbytes or 1, self._chunk):
            while words[self._posted] <= taken:
                yield self._need
            copy(data.data_ptr() + offset, self._chunks[taken % 2], min(self._chunk, nbytes - offset))
            taken += 1
            self._tell(self._taken, taken)
        self._aside.append((kind, data))
        return taken

    def _from_aside(self, kind: int) -> tuple[int, torch.Tensor] | None:
        """Return the first message with this tag that was put aside; forget those of earlier epochs."""
        self._aside = [message for message in self._aside if message[0] >> EPOCH >= kind >> EPOCH]
        for number, (found, _) in enumerate(self._aside):
            if found >> TAG == kind >> TAG:
                return self._aside.pop(number)
        return None

    def _tell(self, cell: int, number: int) -> None:
        """Write one of this rank's numbers, and wake the peer, which may sleep for it."""
        futex = self._futex
        if futex.release is not None:
            futex.release()
        self._words[cell] = number
        futex.fence()
        if self._words[self._asleep]:
            futex.wake(self._bit)


class SizeMismatch(RuntimeError):
    """A rank has passed data of another length than this rank expects."""


def unequal(rank: int, found: int, expected: int) -> SizeMismatch:
    """Return the error for data of another length than this rank expects."""
    return SizeMismatch(
        f"rank {rank} passed {found} bytes, and this rank expects {expected}. Pass tensors of matching sizes and dtypes"
    )


def _block(size: int) -> int:
    """Return the count of numbers per rank in the control block."""
    pipes = 2 * rounded(_LANES * size, _LINE) + rounded(4 * _LANES * size, _LINE)
    return 2 * _LINE + pipes + size * _LINE + _calls(size)


def _calls(size: int) -> int:
    """Return the count of numbers in which a rank describes its calls and its wait."""
    return rounded(_CALLS + _WAIT + (_CALLS_PER_RANK + _WAIT_PER_RANK) * size, _LINE)


def _message_chunk(size: int) -> int:
    return max(8 * _LINE, _MESSAGES // size // (8 * _LINE) * 8 * _LINE)


def _messages(size: int) -> int:
    """Return the bytes of all mailboxes."""
    return 2 * size * size * _message_chunk(size)


def _control(size: int) -> int:
    """Return the bytes before the data, rounded up to whole pages."""
    return rounded(8 * (_LINE + size * _block(size)), _PAGE)
