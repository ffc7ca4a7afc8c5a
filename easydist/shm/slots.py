"""What lies where in the segment of one group, and who has announced what.

    the futex                                 8 bytes on a cache line of its own
    per rank, numbers of 8 bytes              four or more cache lines, written by that rank only:
        step, length, length                  how far this rank has come; lengths of what its slots hold
        asleep                                whether this rank has to be woken
        posted, per channel and peer          chunks laid into the pipe to that peer
        taken, per channel and peer           chunks copied out of the pipe from that peer
        eight numbers, per peer               of the mailboxes, see ``mailbox``
    per rank, data                            two slots, and two chunks of a pipe per channel and peer
    per rank, messages                        two chunks of a mailbox per peer

A *slot* is read by all other ranks. Its owner fills it for a step and publishes the step's number; the others wait for
that number. A rank that has published step k has done all its reading up to step k - 1: so what is read in step k
may be overwritten once all have published k + 1, and nobody sends acknowledgements.
Whoever publishes wakes all that sleep: to leave that to the last of the ranks awaited spares context switches, but cost
40 % more time on four ranks and two cores, because then all run at once.

A *pipe* leads from one rank to one other: its chunks are counted by both, and two may be on their way. There is one per
*channel*, collectives and messages, and together a rank's pipes take as much room as four slots: a pipe's chunk
is a slot divided by W. The mailboxes of a rank take 128 KiB, whatever the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from easydist.memory import copy
from easydist.shm.futex import Futex
from easydist.shm.segment import Segment

COLLECTIVES, POINT_TO_POINT = 0, 1
_CHANNELS = 2
_LINE = 8
"""Numbers on a cache line of 64 bytes."""

_STEP, _LENGTH, _ASLEEP = 0, 1, _LINE
_PAGE = 4096
_SLOTS_PER_RANK = 6
"""Two slots, and the pipes."""

_MESSAGES = 1 << 16
"""Half of the bytes for a rank's mailboxes."""

NEVER = 1 << 62
"""A step that nobody publishes."""

Need = tuple[int, tuple[int, ...]]
"""What a generator waits for: the step that these ranks have to publish, or ``NEVER`` and the peer of a pipe."""


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Slots:
    """One rank's view of the segment.

    Args:
        segment: Of ``Slots.nbytes(size, slot)`` bytes, zeros at first; the same on all ranks.
        rank: This process in the group.
        size: How many processes the group has.

    Attributes:
        slot: Bytes of a slot.
        chunk: Bytes of a pipe's chunk.
        message_chunk: Bytes of a mailbox's chunk.
        others: All ranks but this one.
        futex: On which the ranks sleep.
    """

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.others = tuple(r for r in range(size) if r != rank)
        self._block = _block(size)
        self._data = _control(size)
        self.message_chunk = _message_chunk(size)
        self.slot = (segment.nbytes - self._data - _messages(size)) // (_SLOTS_PER_RANK * size)
        self.chunk = self.slot // size
        self.memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._address = self.memory.data_ptr()
        self._words = memoryview(segment.memory)[: self._data].cast("q")
        self.futex = Futex(self._words, self._address, rank)
        self._fence, self._release = self.futex.fence, self.futex.release
        self._step_at = [self._cell(r, _STEP) for r in range(size)]
        self._asleep_at = [(1 << r % 32, self._cell(r, _ASLEEP)) for r in self.others]
        self._pipes: dict[tuple[int, int, int], Pipe] = {}

    @staticmethod
    def nbytes(size: int, slot: int) -> int:
        """How large a segment has to be for slots of at least ``slot`` bytes."""
        slots = _SLOTS_PER_RANK * size * _rounded(max(slot, 1), 8 * _LINE * size)
        return _control(size) + slots + _messages(size)

    def _cell(self, rank: int, number: int) -> int:
        return _LINE + rank * self._block + number

    def slot_at(self, rank: int, half: int) -> int:
        """The address of a slot."""
        return self._address + self.slot_offset(rank, half)

    def slot_offset(self, rank: int, half: int) -> int:
        """Where in ``memory`` a slot begins."""
        return self._data + (_SLOTS_PER_RANK * rank + half) * self.slot

    def length(self, rank: int, half: int) -> int:
        """What ``set_length`` has set there."""
        length: int = self._words[self._step_at[rank] + _LENGTH + half]
        return length

    def read(self, cell: int) -> int:
        """A number of the control block."""
        number: int = self._words[cell]
        return number

    def has_published(self, rank: int, step: int) -> bool:
        """True if a rank has come as far as ``step``."""
        return bool(self._words[self._step_at[rank]] >= step)

    def set_length(self, half: int, length: int) -> None:
        """To be published with the slot."""
        self._words[self._step_at[self.rank] + _LENGTH + half] = length

    def publish(self, step: int) -> None:
        """Announce that this rank's slot is filled for ``step``, and that it has read all it needs of earlier steps."""
        if self._release is not None:
            self._release()
        self._words[self._step_at[self.rank]] = step
        self._fence()
        asleep = 0
        for bit, cell in self._asleep_at:
            if self._words[cell]:
                asleep |= bit
        if asleep:
            self.futex.wake(asleep)

    def sleep(self, woken: Callable[[], bool], seconds: float) -> bool:
        """Sleep until another rank has published, or changed a pipe of this rank's.

        Args:
            woken: Looks whether anything has moved; called once the others can see that this rank sleeps, and after.
            seconds: At most.

        Returns:
            What ``woken`` said last.
        """
        mine = self._cell(self.rank, _ASLEEP)
        expected = self.futex.value()
        self._words[mine] = 1
        self._fence()
        try:
            if woken():
                return True
            self.futex.sleep(expected, seconds)
        finally:
            self._words[mine] = 0
        return woken()

    def pipe_to(self, channel: int, peer: int) -> Pipe:
        """The pipe that this rank fills."""
        return self._pipes.get((channel, self.rank, peer)) or self._make_pipe(channel, self.rank, peer)

    def pipe_from(self, channel: int, peer: int) -> Pipe:
        """The pipe that this rank empties."""
        return self._pipes.get((channel, peer, self.rank)) or self._make_pipe(channel, peer, self.rank)

    def _make_pipe(self, channel: int, src: int, dst: int) -> Pipe:
        posted, taken, chunks = self._pipe(channel, src, dst)
        peer = dst if src == self.rank else src
        pipe = Pipe(self._words, self.futex, posted, taken, chunks, self.chunk, (peer, self._cell(peer, _ASLEEP)))
        return self._pipes.setdefault((channel, src, dst), pipe)

    def _pipe(self, channel: int, src: int, dst: int) -> tuple[int, int, tuple[int, int]]:
        """The cells of posted and taken, and the addresses of the two chunks."""
        taken = 2 * _LINE + _rounded(_CHANNELS * self.size, _LINE)
        first = self.slot_at(src, 2) + 2 * (channel * self.size + dst) * self.chunk
        return (
            self._cell(src, 2 * _LINE + channel * self.size + dst),
            self._cell(dst, taken + channel * self.size + src),
            (first, first + self.chunk),
        )

    def message_cell(self, rank: int, peer: int) -> int:
        """Where the eight numbers begin that ``rank`` writes about its messages to and from ``peer``."""
        return self._cell(rank, 2 * _LINE + 2 * _rounded(_CHANNELS * self.size, _LINE) + peer * _LINE)

    def message_address(self, src: int, dst: int) -> int:
        """The address of the two chunks of the mailbox for messages from ``src`` to ``dst``."""
        first = self._address + self._data + _SLOTS_PER_RANK * self.size * self.slot
        return first + 2 * (src * self.size + dst) * self.message_chunk

    def write(self, cell: int, number: int) -> None:
        """Write a number of this rank's for which nobody sleeps."""
        if self._release is not None:
            self._release()
        self._words[cell] = number

    def tell(self, cell: int, number: int, peer: int) -> None:
        """Write a number of this rank's that ``peer`` may sleep for."""
        self.write(cell, number)
        self._fence()
        if self._words[self._cell(peer, _ASLEEP)]:
            self.futex.wake(1 << peer % 32)


class Pipe:
    """The way from one rank to one other; ``put`` and ``take`` are generators that yield while the peer is awaited."""

    def __init__(
        self,
        words: memoryview,
        futex: Futex,
        posted: int,
        taken: int,
        chunks: tuple[int, int],
        chunk: int,
        peer: tuple[int, int],
    ) -> None:
        self._words, self._futex = words, futex
        self._posted, self._taken, self._chunks, self._chunk = posted, taken, chunks, chunk
        rank, self._asleep = peer
        self._bit, self._need = 1 << rank % 32, (NEVER, (rank,))

    def put(self, address: int, nbytes: int) -> Iterator[Need]:
        """Lay ``nbytes`` at ``address`` into the pipe; ends when the last chunk is in it."""
        words, chunk = self._words, self._chunk
        posted = words[self._posted]
        for offset in range(0, nbytes, chunk):
            while posted - words[self._taken] >= 2:
                yield self._need
            copy(self._chunks[posted % 2], address + offset, min(chunk, nbytes - offset))
            posted += 1
            self._tell(self._posted, posted)

    def take(self, address: int, nbytes: int) -> Iterator[Need]:
        """Copy the next ``nbytes`` of the pipe to ``address``."""
        words, chunk = self._words, self._chunk
        taken = words[self._taken]
        for offset in range(0, nbytes, chunk):
            while words[self._posted] <= taken:
                yield self._need
            copy(address + offset, self._chunks[taken % 2], min(chunk, nbytes - offset))
            taken += 1
            self._tell(self._taken, taken)

    def _tell(self, cell: int, number: int) -> None:
        """Write a number of this rank's that the peer may sleep for."""
        futex = self._futex
        if futex.release is not None:
            futex.release()
        self._words[cell] = number
        futex.fence()
        if self._words[self._asleep]:
            futex.wake(self._bit)


def _block(size: int) -> int:
    """Numbers per rank in the control block."""
    return 2 * _LINE + 2 * _rounded(_CHANNELS * size, _LINE) + size * _LINE


def _message_chunk(size: int) -> int:
    return max(8 * _LINE, _MESSAGES // size // (8 * _LINE) * 8 * _LINE)


def _messages(size: int) -> int:
    """Bytes of all mailboxes."""
    return 2 * size * size * _message_chunk(size)


def _control(size: int) -> int:
    """Bytes before the data, whole pages."""
    return _rounded(8 * (_LINE + size * _block(size)), _PAGE)
