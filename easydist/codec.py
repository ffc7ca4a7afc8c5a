"""Any Python object as one byte buffer, and back.

A message is: two u64, how many buffers there are and how many bytes of pickle; a u64 per buffer, its bytes; the pickle
(protocol 5); the buffers, each at a multiple of 64. The data of tensors and arrays lies in the buffers: it is copied
once, from where it was into the message, and what is decoded shares the message's memory.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import struct
from types import SimpleNamespace
from typing import Any

import torch

from easydist.errors import UnsafeObjectError, WireError
from easydist.parts import MAKERS, REDUCERS
from easydist.unpickler import Unpickler

__all__ = ["allow_pickle", "decode", "demand_pickle", "encode", "is_pickle_allowed"]

_ALIGNMENT = 64
_IN_BAND = 4096
"""Smaller buffers stay in the pickle, so that a kept scalar does not keep a large message."""

_switch = SimpleNamespace(allowed=os.environ.get("EASYDIST_PICKLE", "1") != "0")


def allow_pickle(allowed: bool) -> None:
    """Allow or deny unrestricted unpickling in this process; do the same on all ranks.

    Where it is denied, the object verbs work with ``weights_only=True`` only, and the structure that travels where
    ranks pass None is decoded by the same rules. It is allowed at first, unless ``EASYDIST_PICKLE=0`` is set.

    Args:
        allowed: Whether ``weights_only=False`` may be used.

    Example:
        >>> import easydist
        >>> easydist.allow_pickle(False)
        >>> easydist.gather_object({"a": 1}, weights_only=True)
        [{'a': 1}]
        >>> easydist.allow_pickle(True)
    """
    _switch.allowed = allowed


def is_pickle_allowed() -> bool:
    """Whether ``weights_only=False`` may be used in this process."""
    return bool(_switch.allowed)


def demand_pickle() -> None:
    """Make sure that unrestricted unpickling is allowed.

    Raises:
        UnsafeObjectError: It is denied.
    """
    if not _switch.allowed:
        raise UnsafeObjectError(
            "pickle is denied in this process (easydist.allow_pickle(False) or EASYDIST_PICKLE=0); pass "
            "weights_only=True"
        )


def encode(value: object) -> torch.Tensor:
    """``value`` as a message: a uint8 tensor on the CPU.

    Law: ``decode(encode(x)) == x``. One object at several places is one object again; views of one tensor become
    tensors of their own. Tensors arrive in row-major order, with their type (``Parameter``), ``requires_grad`` and
    Python attributes, without graph and ``.grad``; on the CPU, or on the receiver's current device of the same kind.

    Args:
        value: Anything that can be pickled.

    Raises:
        TypeError: ``value`` holds something that pickle cannot write; pickle's own text is inside.

    Cost: one copy of the data of tensors and arrays.
    """
    chunks: list[Any] = []
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _IN_BAND:
            buffers.append(raw)
        return raw.nbytes < _IN_BAND

    pickler = pickle.Pickler(SimpleNamespace(write=chunks.append), 5, buffer_callback=keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, **REDUCERS}
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, BufferError, TypeError) as error:
        raise TypeError(f"{type(value).__name__} cannot be pickled: {error}") from error
    return _joined(chunks, buffers)


def _joined(chunks: list[Any], buffers: list[memoryview]) -> torch.Tensor:
    length = sum(map(len, chunks))
    if not buffers:
        return torch.frombuffer(bytearray().join([struct.pack("<2Q", 0, length), *chunks]), dtype=torch.uint8)
    nbytes = [raw.nbytes for raw in buffers]
    head = struct.pack(f"<{2 + len(nbytes)}Q", len(nbytes), length, *nbytes)
    starts, total = _layout(len(head) + length, nbytes)
    message = torch.empty(total, dtype=torch.uint8, device="cpu")
    view, at = message.numpy().data, 0
    for chunk in [head, *chunks]:
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    for start, raw in zip(starts, buffers, strict=True):
        view[at:start] = bytes(start - at)
        at = start + raw.nbytes
        view[start:at] = raw
    return message


def _layout(start: int, nbytes: list[int]) -> tuple[list[int], int]:
    """Where each buffer begins, and where the last one ends.

    Example:
        >>> _layout(100, [1, 3])
        ([128, 192], 195)
    """
    starts: list[int] = []
    for each in nbytes:
        starts.append(-(-start // _ALIGNMENT) * _ALIGNMENT)
        start = starts[-1] + each
    return starts, start


def decode(message: torch.Tensor, *, weights_only: bool | None = None) -> Any:
    """The object that ``encode`` wrote. Its larger tensors and arrays are writable, and share the message's memory.

    Args:
        message: uint8, contiguous, on the CPU; not to be used for anything else afterwards.
        weights_only: Refuse what is not allow-listed; see ``docs/safety.md``. None: only where pickle is denied.

    Raises:
        UnsafeObjectError: The message needs a global that is not allow-listed; ``weights_only`` is False and pickle is
            denied.
        WireError: These are not the bytes of a message. Without ``weights_only``: of its outer layout; for the pickle
            inside, whatever pickle raises.

    Example:
        >>> decode(encode({"a": [1, None]}))
        {'a': [1, None]}
    """
    if weights_only is False:
        demand_pickle()
    skeleton, buffers = _split(message.numpy().data)
    if weights_only or not _switch.allowed:
        return Unpickler(skeleton, buffers, MAKERS).load()
    return pickle.loads(skeleton, buffers=buffers)


def _split(view: memoryview) -> tuple[memoryview, list[memoryview]]:
    """The pickle and the buffers."""
    if len(view) < 16:
        raise WireError(f"an object message of {len(view)} bytes is truncated")
    count, length = struct.unpack_from("<2Q", view)
    if 16 + 8 * count + length > len(view):
        raise WireError(
            f"an object message of {len(view)} bytes says that it has {count} buffers and {length} of pickle"
        )
    nbytes = list(struct.unpack_from(f"<{count}Q", view, 16))
    first = 16 + 8 * count
    starts, total = _layout(first + length, nbytes)
    if total != len(view):
        raise WireError(f"an object message of {len(view)} bytes says that it has {total}")
    return view[first : first + length], [view[a : a + n] for a, n in zip(starts, nbytes, strict=True)]
