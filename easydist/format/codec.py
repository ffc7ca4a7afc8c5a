"""The encoding of any Python object as one byte buffer, and its decoding.

A message consists of two u64, the number of buffers and the bytes of pickle; one u64 per buffer, its length; the pickle
(protocol 5); and the buffers, each at a multiple of 64. The data of tensors and arrays is in the buffers. It is copied
once, from its place into the message, and decoded tensors and arrays share the message's memory.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch

from easydist import memory, settings
from easydist.base.torch_private import unpickled
from easydist.base.wording import a_or_an
from easydist.data.backing import backed
from easydist.errors import UnsafeObjectError, WireError
from easydist.format.parts import MAKERS, REDUCERS, Strings, weigh
from easydist.format.unpickler import load

__all__ = ["EncodedObject", "allow_pickle", "decode", "demand_pickle", "encode", "is_pickle_allowed"]

_ALIGNMENT = 64
_IN_BAND = 4096
"""The bytes from which a buffer leaves the pickle. Smaller ones stay, so that a kept scalar keeps no large message."""

_COUNTS = struct.Struct("<2Q")
"""The number of buffers and the bytes of pickle."""

_NAMING = [code[0] for code in (pickle.STACK_GLOBAL, pickle.EXT1, pickle.EXT2, pickle.EXT4)]
"""The opcodes by which a pickle of protocol 5 names a global; if their bytes do not occur, it names none."""

_REMEDIES = {
    "'generator'": "; pass a list of its values",
    "<lambda>": "; define it by def at the top level of a module",
    "local object": "; define it at the top level of a module",
}
"""Remedies for errors of pickle, by a part of the error's text."""

_switch = SimpleNamespace(allowed=settings.read("EASYDIST_PICKLE"))


def allow_pickle(allowed: bool) -> None:
    """Allow or deny unrestricted unpickling in this process; do the same on all ranks.

    If it is denied, the object verbs work with ``weights_only=True`` only, and the structure that is sent when ranks
    pass None is decoded by the same rules. It is allowed at first, unless ``EASYDIST_PICKLE=0`` is set.

    Args:
        allowed: True if ``weights_only=False`` may be used.

    Raises:
        TypeError: ``allowed`` is not a ``bool``.

    Example:
        >>> import easydist
        >>> easydist.allow_pickle(False)
        >>> easydist.gather_object({"a": 1}, weights_only=True)
        [{'a': 1}]
        >>> easydist.allow_pickle(True)
    """
    if not isinstance(allowed, bool):  # bool("no") is true
        raise TypeError(f"allow_pickle: allowed={allowed!r} is neither True nor False")
    _switch.allowed = allowed


def is_pickle_allowed() -> bool:
    """True if ``weights_only=False`` may be used in this process."""
    return bool(_switch.allowed)


def demand_pickle() -> None:
    """Check that unrestricted unpickling is allowed.

    Raises:
        UnsafeObjectError: It is denied.
    """
    if not _switch.allowed:
        raise UnsafeObjectError(
            "pickle is denied in this process (easydist.allow_pickle(False) or EASYDIST_PICKLE=0); pass "
            "weights_only=True"
        )


class _Chunks(list[Any]):
    """The pieces that a pickler writes, in order."""

    write = list.append


class _Table(dict[type, Callable[[Any], Any]]):
    """The table of reducers: ours, then those registered with ``copyreg`` at the time of the look-up; no DTensor."""

    def __missing__(self, key: type) -> Callable[[Any], Any]:
        dtensor = sys.modules.get("torch.distributed.tensor")
        if dtensor is not None and issubclass(key, dtensor.DTensor):
            return _refuse_dtensor
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None and issubclass(key, functional.AsyncCollectiveTensor):
            return _reduce_waited
        return copyreg.dispatch_table[key]


def _refuse_dtensor(tensor: torch.Tensor) -> NoReturn:
    """Refuse a DTensor: on another rank this rank's part would count as that rank's, so the full tensor is wrong."""
    raise TypeError(f"{a_or_an(type(tensor).__name__)} is spread over ranks; pass .full_tensor() or .to_local()")


def _reduce_waited(tensor: torch.Tensor) -> Any:
    """Wait for a functional collective, and reduce its result."""
    return REDUCERS[torch.Tensor](backed(tensor))


_TABLE = _Table(REDUCERS)


_FAULTS = (pickle.PicklingError, AttributeError, BufferError, NotImplementedError, TypeError)
"""The exceptions for a value that pickle cannot write."""


def _culprit(value: object) -> str:
    """Return the type of a value that cannot be pickled, and the path to the innermost part for which that is so."""
    path, around = "", {id(value)}
    while step := next((s for s in _parts(value) if id(s[1]) not in around and not _can_be_pickled(s[1])), None):
        path, value = path + step[0], step[1]
        around.add(id(value))
    kind = type(value).__name__
    return f"{path} of type {kind}" if path else kind


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", part) for key, part in items)
    elif not isinstance(value, type | ModuleType | FunctionType):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _can_be_pickled(value: object) -> bool:
    try:
        _new_pickler().pickler.dump(value)
    except _FAULTS:
        return False
    return True


class _ReusedPickler(NamedTuple):
    """A pickler, the pieces that it has written, and the buffers that it has left out."""

    pickler: pickle.Pickler
    chunks: _Chunks
    buffers: list[memoryview]


_idle: list[_ReusedPickler] = []
"""Those that no thread uses now: to make one takes longer than to pickle a small value."""

_KEPT = 2048
"""The bytes of the longest pickle after which one is kept: its memo does not shrink."""


def _new_pickler() -> _ReusedPickler:
    chunks, buffers = _Chunks(), list[memoryview]()
    pickler = pickle.Pickler(chunks, 5, buffer_callback=functools.partial(_keep, buffers))
    pickler.dispatch_table = _TABLE
    return _ReusedPickler(pickler, chunks, buffers)


def _keep(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    raw = buffer.raw()
    if raw.nbytes >= _IN_BAND:
        buffers.append(_direct(raw))
    return raw.nbytes < _IN_BAND


def _pickled(value: object) -> tuple[Sequence[Any], list[memoryview]]:
    """Return the pickle of a value, piece by piece, and the buffers outside of it.

    Raises:
        TypeError: Pickle cannot write it.
    """
    try:
        reused = _idle.pop()
    except IndexError:
        reused = _new_pickler()
    pickler, chunks, buffers = reused
    try:
        pickler.dump(value)
        if buffers or len(chunks) > 1 or len(chunks[0]) > _KEPT:
            return chunks, buffers
        [text] = chunks
        chunks.clear()
        pickler.clear_memo()
        _idle.append(reused)
        return [text], []
    except _FAULTS as error:
        remedy = next((advice for part, advice in _REMEDIES.items() if part in str(error)), "")
        raise TypeError(f"{_culprit(value)} cannot be pickled: {error}{remedy}") from error
    finally:
        del pickler, reused  # because they hold views of views, see _direct


class EncodedObject:
    """A value as the parts of a message, which need not be joined: its large data is still in its own memory.

    Law: ``b"".join(EncodedObject(x).parts()) == bytes(encode(x))``.

    Args:
        value: Any value that can be pickled.

    Attributes:
        is_strings: True if the value is a list of strings only, which is sent as one text.
        nbytes: The bytes of all parts.

    Raises:
        TypeError: ``value`` holds a DTensor, or a value that pickle cannot write; the text contains pickle's own.
    """

    def __init__(self, value: object) -> None:
        strings = Strings.of(value)
        self.is_strings = strings is not None
        chunks, self._buffers = _pickled(value if strings is None else strings)
        length, sizes = sum(map(len, chunks)), [raw.nbytes for raw in self._buffers]
        head = _COUNTS.pack(len(sizes), length) + (struct.pack(f"<{len(sizes)}Q", *sizes) if sizes else b"")
        self._texts = [head, *chunks]
        self._starts, self.nbytes = _layout(len(head) + length, sizes) if sizes else ([], len(head) + length)

    def check(self) -> None:
        """Check that the restricted decoder accepts the value.

        Raises:
            UnsafeObjectError: It holds an object that is not allow-listed.
        """
        if self._names_globals():
            skeleton = b"".join(self._texts[1:])
            writable = [raw if not raw.readonly else memoryview(bytearray(raw)) for raw in self._buffers]
            load(memoryview(skeleton), writable, MAKERS, weigh)

    def _names_globals(self) -> bool:
        for text in self._texts[1:]:
            for code in _NAMING:  # a generator would take as long as the pickling of a small value
                if code in text:
                    return True
        return False

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes, piece by piece."""
        text = b"".join(self._texts)
        return [text, *self._data(len(text))] if self._buffers else [text]

    def _data(self, at: int) -> Iterator[memoryview]:
        """Yield the buffers, and the padding between them."""
        for start, raw in zip(self._starts, self._buffers, strict=True):
            if start > at:
                yield memoryview(bytes(start - at))
            yield raw
            at = start + raw.nbytes

    def text(self) -> bytes | None:
        """Return the bytes in one piece if all data is in the pickle, as it is for small values; else None."""
        return None if self._buffers else b"".join(self._texts)

    def joined(self, nbytes: int | None = None) -> torch.Tensor:
        """Return the bytes in one piece, padded with zeros to ``nbytes``; None for no padding."""
        zeros = bytes(0 if nbytes is None else nbytes - self.nbytes)
        if not self._buffers:
            return torch.frombuffer(bytearray().join([*self._texts, zeros]), dtype=torch.uint8)
        message = memory.empty([self.nbytes + len(zeros)], torch.uint8)
        view, at = message.numpy().data, 0
        for part in itertools.chain(self._texts, self._data(sum(map(len, self._texts))), [zeros]):
            view[at : at + len(part)] = part
            at += len(part)
        return message


def _direct(raw: memoryview) -> memoryview:
    """Return the view under a view of a view.

    CPython (3.11) crashes if such a chain becomes garbage in a cycle; the traceback of a timeout may form one.
    """
    inner: Any = raw.obj
    return inner.cast("B") if isinstance(inner, memoryview) and inner.c_contiguous else raw


def encode(value: object, *, weights_only: bool | None = None) -> torch.Tensor:
    """Encode ``value`` as a message: a uint8 tensor on the CPU.

    Law: ``decode(encode(x)) == x``. An object that is in several places is one object again; views of one tensor become
    separate tensors. Tensors arrive in row-major order, with their type (``Parameter``), ``requires_grad`` and Python
    attributes, without graph and ``.grad``; on the CPU, or on the receiver's current device of the same type.

    Args:
        value: Any value that can be pickled.
        weights_only: True to refuse what the restricted decoder would refuse; False if the receiver will unpickle.

    Raises:
        TypeError: ``value`` holds a DTensor, or a value that pickle cannot write; the text contains pickle's own.
        UnsafeObjectError: ``value`` is not allow-listed; or ``weights_only`` is False and pickle is denied.

    Cost: one copy of the data of tensors and arrays.
    """
    if weights_only is False:
        demand_pickle()
    message = EncodedObject(value)
    if weights_only:
        message.check()
    return message.joined()


def _layout(start: int, nbytes: list[int]) -> tuple[list[int], int]:
    """Return the start of each buffer, and the end of the last one.

    Example:
        >>> _layout(100, [1, 3])
        ([128, 192], 195)
    """
    starts: list[int] = []
    for each in nbytes:
        starts.append(-(-start // _ALIGNMENT) * _ALIGNMENT)
        start = starts[-1] + each
    return starts, start


def decode(message: torch.Tensor | memoryview, *, weights_only: bool | None = None, is_padded: bool = False) -> Any:
    """Decode a message of ``encode``. The larger tensors and arrays are writable, and share the message's memory.

    Args:
        message: uint8, contiguous, on the CPU; or writable memory. It must not be used for anything else afterwards.
        weights_only: True to refuse globals that are not allow-listed; see ``docs/safety.md``. None to do so only if
            pickle is denied.
        is_padded: True if there may be more bytes after the message.

    Raises:
        UnsafeObjectError: The message needs a global that is not allow-listed; or ``weights_only`` is False and pickle
            is denied.
        WireError: These are not the bytes of a message. Without ``weights_only`` this covers only the outer layout; the
            pickle inside may raise any error of pickle.

    Example:
        >>> decode(encode({"a": [1, None]}))
        {'a': [1, None]}
    """
    if weights_only is False:
        demand_pickle()
    view = message.numpy().data if isinstance(message, torch.Tensor) else message
    return _decoded(*_split(view, is_padded), weights_only)


def decode_copy(view: memoryview, *, weights_only: bool | None = None) -> Any:
    """Do as ``decode`` with a message whose memory will be used for others: what is decoded shares none of it."""
    if weights_only is False:
        demand_pickle()
    skeleton, buffers = _split(view, False)
    return _decoded(skeleton, [memoryview(bytearray(raw)) for raw in buffers], weights_only)


def _decoded(skeleton: memoryview, buffers: list[memoryview], weights_only: bool | None) -> Any:
    if weights_only or not _switch.allowed:
        return unpickled(load, skeleton, buffers, MAKERS, weigh)
    return unpickled(pickle.loads, skeleton, buffers=buffers)


def _split(view: memoryview, is_padded: bool) -> tuple[memoryview, list[memoryview]]:
    """Split a message into the pickle and the buffers."""
    if len(view) < 16:
        raise WireError(f"an object message of {len(view)} bytes is truncated")
    count, length = _COUNTS.unpack_from(view)
    if not count and len(view) == 16 + length:
        return view[16:], []
    if 16 + 8 * count + length > len(view):
        raise WireError(f"an object message of {len(view)} bytes declares {count} buffers and {length} bytes of pickle")
    nbytes = list(struct.unpack_from(f"<{count}Q", view, 16))
    first = 16 + 8 * count
    starts, total = _layout(first + length, nbytes)
    if total > len(view) or (total < len(view) and not is_padded):
        raise WireError(f"an object message of {len(view)} bytes declares {total} bytes")
    return view[first : first + length], [view[a : a + n] for a, n in zip(starts, nbytes, strict=True)]
