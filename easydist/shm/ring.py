"""A ring buffer in shared memory: one process writes messages, and several processes read each of them.

    the futex                            8 bytes on a cache line of its own
    the writer: posted, ready, closed    the number of pieces announced, and the state of the queue
    the writer: asleep                   1 if it has to be woken, else 0
    per reader: taken, state             the number of pieces copied out; absent, attached or left
    per reader: asleep                   1 if it has to be woken, else 0
    per reader: a note                   768 bytes, for the writer
    entries, used in turn                per piece: its place, its bytes, its place in the message, the message's bytes
    data                                 the pieces

A message is cut into pieces, so that it may be larger than the ring, and readers can copy one piece while the next is
being written. Pieces follow one another and never wrap. Once all pieces are read, the ring starts at 0 again. It grows
beyond its first 4 MB only if readers lag behind that far: memory that is reused stays in the cache, and unused memory
is not taken from the system. If the writer gives up a message before its end, readers drop the part that they have when
the next message begins.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from easydist import memory
from easydist.memory import copy
from easydist.shm.futex import Futex
from easydist.shm.segment import Segment, name_of, nameless_file, spare
from easydist.shm.slots import NEVER, rounded

NOTE_NBYTES = 768
"""The bytes of a reader's note about itself."""

_LINE, _PAGE, _ALIGNMENT = 8, 4096, 64
_POSTED, _READY, _CLOSED, _ASLEEP = _LINE, _LINE + 1, _LINE + 2, 2 * _LINE
_FIRST_READER, _PER_READER = 3 * _LINE, 2 * _LINE
_TAKEN, _STATE, _READER_ASLEEP = 0, 1, _LINE
_ABSENT, _ATTACHED, _LEFT = 0, 1, 2
_ENTRY = 4
_HOT, _STEP = 4 << 20, 8 << 20
"""The bytes that the ring begins with, and the bytes by which it grows."""

_LARGEST_PIECE = 1 << 20
_SMALL = 1 << 16


class Shape(NamedTuple):
    """The layout of a ring, on which writer and readers have to agree.

    Args:
        readers: The number of readers.
        entries: The most pieces that the ring can hold.
        capacity: The most bytes of data that it can hold.
    """

    readers: int
    entries: int
    capacity: int

    @classmethod
    def of(cls, readers: int, capacity: int, messages: int) -> Shape:
        """Return a shape for ``messages`` messages, and for ``capacity`` bytes in pieces of the usual size."""
        capacity = rounded(max(capacity, _PAGE), _PAGE)
        return cls(readers, messages + capacity // min(_LARGEST_PIECE, capacity // 4) + 1, capacity)

    def plain(self) -> tuple[int, int, int]:
        """Return the shape as plain data: ``Shape(*plain)`` is the shape again."""
        return self.readers, self.entries, self.capacity

    @property
    def piece(self) -> int:
        """The bytes of the largest piece."""
        return min(_LARGEST_PIECE, self.capacity // 4)

    @property
    def notes_at(self) -> int:
        """The offset of the notes."""
        return 8 * (_FIRST_READER + _PER_READER * self.readers)

    @property
    def entries_at(self) -> int:
        """The index of the first entry, in numbers of 8 bytes."""
        return (self.notes_at + NOTE_NBYTES * self.readers) // 8

    @property
    def data_at(self) -> int:
        """The offset of the data."""
        return rounded(8 * (self.entries_at + _ENTRY * self.entries), _PAGE)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole segment."""
        return self.data_at + self.capacity


class _RingEnd:
    """The common part of writer and readers; ``rank`` is 0 for the writer, and 1, 2, … for the readers."""

    def __init__(self, segment: Segment, shape: Shape, rank: int) -> None:
        self.shape, self._entries_at = shape, shape.entries_at
        self._words = memoryview(segment.memory)[: shape.data_at].cast("q")
        self._bytes = memoryview(segment.memory)[shape.data_at :]
        self._tensor = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._address = self._tensor.data_ptr() + shape.data_at
        self._futex = Futex(self._words, self._tensor.data_ptr(), rank)
        self._mine = 1 << rank % 32
        self._asleep = _cell(rank, _READER_ASLEEP) if rank else _ASLEEP

    def _announce(self, cell: int, number: int) -> None:
        """Write a number that others may sleep for; it becomes visible after all earlier writes."""
        if self._futex.release is not None:
            self._futex.release()
        self._words[cell] = number
        self._futex.fence()

    def _entry(self, number: int) -> tuple[int, int, int, int]:
        words, i = self._words, self._entries_at + _ENTRY * (number % self.shape.entries)
        return words[i], words[i + 1], words[i + 2], words[i + 3]

    def sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        """Sleep until another end has announced something.

        Args:
            look: Returns True if there is something to do. It is called when the others can see that this end sleeps,
                and again afterwards; the first call catches announcements made before that.
            seconds: The longest sleep in seconds.

        Returns:
            The last result of ``look``.
        """
        expected = self._futex.value()
        self._words[self._asleep] = 1
        self._futex.fence()
        try:
            if look():
                return True
            self._futex.sleep(expected, seconds)
        finally:
            self._words[self._asleep] = 0
        return look()

    def wake(self) -> None:
        """Wake this end, from another thread."""
        self._futex.wake(self._mine)


def _cell(reader: int, number: int) -> int:
    """Return the index of a reader's number; readers count from 1 here."""
    return _FIRST_READER + _PER_READER * (reader - 1) + number


class _RingPiece(NamedTuple):
    number: int
    start: int
    stop: int
    is_last: bool


class RingWriter(_RingEnd):
    """The writer's end.

    Example:
        >>> writer = RingWriter(Shape.of(readers=1, capacity=1 << 16, messages=4))
        >>> reader = RingReader(writer.name, writer.shape, 0, b"")
        >>> writer.post(writer.place(5), [memoryview(b"hello")], at=0, total=5)
        >>> bytes(reader.pull())
        b'hello'

    Attributes:
        name: The text that a reader needs to attach.

    Raises:
        OSError: The system does not support such memory, or has no room for it.
    """

    def __init__(self, shape: Shape) -> None:
        self._file = nameless_file(shape.nbytes, shape.data_at + min(shape.capacity, _HOT))
        try:
            self.name = name_of(self._file)
            super().__init__(Segment(self.name, shape.nbytes, self._file), shape, 0)
        except BaseException:
            os.close(self._file)
            raise
        self._backed = min(shape.capacity, _HOT)
        self._pieces: deque[_RingPiece] = deque()
        of_all = self._words[_FIRST_READER : shape.notes_at // 8]
        self._taken, self._states = of_all[_TAKEN::_PER_READER], of_all[_STATE::_PER_READER]
        self._sleepers = of_all[_READER_ASLEEP::_PER_READER]

    def place(self, nbytes: int, grow: bool = True) -> int:
        """Return the offset at which a piece can be written now; -1 if there is no room.

        Args:
            nbytes: The bytes of the piece, at most ``shape.piece``.
            grow: True if more of the capacity may be allocated from the system.
        """
        pieces, posted = self._settled(), self._words[_POSTED]
        if pieces and posted - pieces[0].number >= self.shape.entries:
            return -1
        if not pieces:
            return 0
        first, head = pieces[0].start, pieces[-1].stop
        # The ring has started over: there is room from the newest piece to the oldest.
        if pieces[-1].start < first:
            return head if head + nbytes <= first else -1
        if head + nbytes <= min(self._backed, _HOT):
            return head
        # Start over before growing: memory that is reused stays in the cache.
        if nbytes <= first:
            return 0
        return head if head + nbytes <= self._backed or (grow and self._grow(head + nbytes)) else -1

    def has_fewer(self, messages: int) -> bool:
        """True if fewer complete messages than this wait: those that some reader has not taken yet."""
        return len(self._pieces) < messages or sum(piece.is_last for piece in self._settled()) < messages

    def _settled(self) -> deque[_RingPiece]:
        """Return the pieces in use: announced, and not yet taken by all readers."""
        if pieces := self._pieces:
            lowest, posted = self._lowest(), self._words[_POSTED]
            while pieces and pieces[0].number < lowest:
                pieces.popleft()
            while pieces and pieces[-1].number >= posted:  # an interrupt came before the piece was announced
                pieces.pop()
        return pieces

    def _lowest(self) -> int:
        return min(self._taken.tolist())  # a tenth of the time of a loop over its elements

    def _grow(self, nbytes: int) -> bool:
        """Allocate more of the capacity, but leave a quarter of the file system free; return False if that fails."""
        goal = min(self.shape.capacity, rounded(nbytes, _STEP))
        if nbytes > goal or spare() < goal - self._backed:
            return False
        try:
            os.posix_fallocate(self._file, self.shape.data_at, goal)
        except OSError:
            return False
        self._backed = goal
        return True

    def post(self, start: int, parts: Sequence[bytes | memoryview], at: int, total: int) -> None:
        """Write a piece, and announce it to the readers.

        Args:
            start: The result of ``place``.
            parts: The bytes of the piece.
            at: The offset of the piece in its message.
            total: The number of bytes of its message.
        """
        stop = start
        for part in parts:
            end = stop + len(part)
            if len(part) <= _SMALL:
                self._bytes[stop:end] = part
            else:
                copy(self._address + stop, np.frombuffer(part, np.uint8).ctypes.data, len(part))
            stop = end
        self._enter(start, stop - start, at, total)

    def _enter(self, start: int, nbytes: int, at: int, total: int) -> None:
        words = self._words
        number = words[_POSTED]
        # Before it is announced: ``_settled`` takes it back if an interrupt comes in between.
        self._pieces.append(_RingPiece(number, start, start + rounded(nbytes, _ALIGNMENT), at + nbytes == total))
        i = self._entries_at + _ENTRY * (number % self.shape.entries)
        words[i], words[i + 1], words[i + 2], words[i + 3] = start, nbytes, at, total
        self._tell_all(_POSTED, number + 1)

    def _tell_all(self, cell: int, number: int) -> None:
        self._announce(cell, number)
        if any(asleep := self._sleepers.tolist()):
            bits = {1 << reader % 32 for reader, sleeps in enumerate(asleep, 1) if sleeps}
            self._futex.wake(sum(bits))

    def set_ready(self) -> None:
        """Tell the readers that all of them have attached."""
        self._tell_all(_READY, 1)

    def behind(self) -> list[int]:
        """Return the readers that have taken the fewest pieces."""
        lowest = self._lowest()
        return [i for i, taken in enumerate(self._taken) if taken == lowest]

    def note(self, reader: int) -> bytes | None:
        """Return the note of a reader (counted from 0); None if it has not attached."""
        if self._states[reader] == _ABSENT:
            return None
        at = self.shape.notes_at + NOTE_NBYTES * reader
        return bytes(self._words.cast("B")[at : at + NOTE_NBYTES])

    def left(self) -> list[int]:
        """Return the readers that have closed their ends."""
        states = self._states.tolist()
        return [i for i, state in enumerate(states) if state == _LEFT] if _LEFT in states else []

    def drop(self, reader: int) -> list[bytes]:
        """Stop waiting for a reader that cannot attach.

        Returns:
            The complete messages that it has not read: all of them, because it has read none.
        """
        waiting: list[bytes] = []
        message = b""
        for number in range(self._words[_POSTED]):
            start, nbytes, at, total = self._entry(number)
            message = (message if at else b"") + bytes(self._bytes[start : start + nbytes])
            if at + nbytes == total:
                waiting.append(message)
        self._taken[reader] = NEVER
        self._states[reader] = _ATTACHED  # so that no other process can attach in its place
        return waiting

    def close(self) -> None:
        """Tell the readers that no more messages come, and release the memory; they keep it until they have read it."""
        self._tell_all(_CLOSED, 1)
        self.release()

    def release(self) -> None:
        """Release the memory without telling the other side."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        _let_go(self)


class RingReader(_RingEnd):
    """A reader's end.

    Args:
        name: The writer's name.
        shape: The writer's shape.
        reader: The number of this reader, counted from 0.
        note: The note about this process for the writer.

    Raises:
        OSError: The memory is not accessible from this process.
        RuntimeError: Another process has attached as this reader.
    """

    def __init__(self, name: str, shape: Shape, reader: int, note: bytes) -> None:
        super().__init__(Segment.attach(name, shape.nbytes), shape, reader + 1)
        self._taken_at, self._state_at = _cell(reader + 1, _TAKEN), _cell(reader + 1, _STATE)
        if self._words[self._state_at] != _ABSENT:
            _let_go(self)
            raise RuntimeError("this reader has attached already; a handle makes one reader for each rank")
        # Before the state: the writer reads the note of each reader that has attached.
        at = shape.notes_at + NOTE_NBYTES * reader
        self._words.cast("B")[at : at + NOTE_NBYTES] = note.ljust(NOTE_NBYTES)
        self._message: torch.Tensor | None = None
        self._whole: tuple[int, memoryview] | None = None
        self._tell(self._state_at, _ATTACHED)

    def _tell(self, cell: int, number: int) -> None:
        self._announce(cell, number)
        if self._words[_ASLEEP]:
            self._futex.wake(1)

    def pull(self) -> memoryview | None:
        """Take all available pieces up to the end of a message; return the message if it is complete, else None."""
        while self._whole is None and (taken := self._words[self._taken_at]) < self._words[_POSTED]:
            self._take(taken)
        if self._whole is None:
            return None
        count, message = self._whole  # reset only after announcing: an interrupt may come at any point
        if self._words[self._taken_at] < count:
            self._tell(self._taken_at, count)
        self._whole = None
        return message

    def _take(self, number: int) -> None:
        start, nbytes, at, total = self._entry(number)
        if nbytes == total <= _SMALL:  # allocating a tensor would take longer than the rest
            self._message, self._whole = None, (number + 1, memoryview(bytearray(self._bytes[start : start + nbytes])))
            return
        if at == 0:
            self._message = memory.empty([total], torch.uint8)
        message = self._message
        assert message is not None
        copy(message.data_ptr() + at, self._address + start, nbytes)
        if at + nbytes == total:
            self._message, self._whole = None, (number + 1, message.numpy().data)
            return
        self._tell(self._taken_at, number + 1)

    @property
    def is_ready(self) -> bool:
        """True if all readers have attached."""
        return bool(self._words[_READY])

    @property
    def is_closed(self) -> bool:
        """True if the writer has closed its end; earlier messages can still be taken."""
        return bool(self._words[_CLOSED])

    def close(self) -> None:
        """Tell the writer that this reader has left, and release the memory."""
        self._tell(self._state_at, _LEFT)
        self.release()

    def release(self) -> None:
        """Release the memory without telling the other side."""
        _let_go(self)


def _let_go(end: _RingEnd) -> None:
    """Drop the references of an end to the memory; the mapping ends with the last reference."""
    for name in {"_words", "_bytes", "_tensor", "_futex", "_taken", "_states", "_sleepers"} & vars(end).keys():
        delattr(end, name)
