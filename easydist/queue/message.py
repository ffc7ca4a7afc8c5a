"""A value as parts of a message that need not be joined: what lies in shared memory anyway is copied once."""

from __future__ import annotations

import copyreg
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from easydist.parts import MAKERS, REDUCERS
from easydist.unpickler import Unpickler

_ALIGNMENT, _IN_BAND = 64, 4096
_HEAD = struct.Struct("<2Q")
_GLOBAL = pickle.STACK_GLOBAL
"""The only opcode by which a pickle of protocol 5 names anything; where its byte does not occur, nothing is named."""


class _Table(dict[type, Callable[[Any], Any]]):
    """Ours, then whatever is registered with ``copyreg`` when it is asked for."""

    def __missing__(self, key: type) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[key]


_TABLE = _Table(REDUCERS)


class Message:
    """A value, pickled; its large data still lies where it was.

    Law: ``b"".join(Message(x).parts) == bytes(codec.encode(x))``.

    Args:
        value: Anything that can be pickled.

    Attributes:
        parts: The bytes; those of tensors and arrays are views.
        nbytes: Of all parts.

    Raises:
        TypeError: ``value`` holds something that pickle cannot write.
    """

    def __init__(self, value: object) -> None:
        chunks: list[Any] = []
        buffers: list[memoryview] = []

        def keep(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= _IN_BAND:
                buffers.append(_direct(raw))
            return raw.nbytes < _IN_BAND

        pickler = pickle.Pickler(SimpleNamespace(write=chunks.append), 5, buffer_callback=keep)
        pickler.dispatch_table = _TABLE
        try:
            pickler.dump(value)
        except (pickle.PicklingError, AttributeError, BufferError, TypeError) as error:
            raise TypeError(f"{type(value).__name__} cannot be pickled: {error}") from error
        finally:
            del pickler  # it holds views of views, see _direct
        self._pickle, self._buffers = b"".join(chunks), buffers
        self.parts = list(self._laid_out())
        self.nbytes = sum(map(len, self.parts))

    def _laid_out(self) -> Iterator[memoryview]:
        if not self._buffers:
            yield memoryview(_HEAD.pack(0, len(self._pickle)) + self._pickle)
            return
        sizes = [raw.nbytes for raw in self._buffers]
        head = struct.pack(f"<{2 + len(sizes)}Q", len(sizes), len(self._pickle), *sizes)
        yield memoryview(head + self._pickle)
        at = len(head) + len(self._pickle)
        for raw in self._buffers:
            if padding := -at % _ALIGNMENT:
                yield memoryview(bytes(padding))
            yield raw
            at += padding + raw.nbytes

    def check(self) -> None:
        """Make sure that the restricted decoder takes it.

        Raises:
            UnsafeObjectError: It holds what is not allow-listed.
        """
        if _GLOBAL in self._pickle:
            writable = [raw if not raw.readonly else memoryview(bytearray(raw)) for raw in self._buffers]
            Unpickler(memoryview(self._pickle), writable, MAKERS).load()


def _direct(raw: memoryview) -> memoryview:
    """The view behind a view of a view.

    CPython (3.11) crashes when such a chain becomes garbage in a cycle, which the traceback of a timeout may be.
    """
    inner: Any = raw.obj
    return inner.cast("B") if isinstance(inner, memoryview) and inner.c_contiguous else raw


def cut(parts: Sequence[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """Pieces of ``nbytes`` each, the last one of what is left.

    Example:
        >>> parts = [memoryview(b"abc"), memoryview(b"defgh")]
        >>> [b"".join(piece) for piece in cut(parts, 4)]
        [b'abcd', b'efgh']
    """
    piece: list[memoryview] = []
    room = nbytes
    for part in parts:
        while len(part) >= room:
            yield [*piece, part[:room]]
            piece, part, room = [], part[room:], nbytes
        if len(part):
            piece.append(part)
            room -= len(part)
    if piece:
        yield piece
