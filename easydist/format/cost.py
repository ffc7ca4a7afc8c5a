"""The cost of restricted decoding: estimates for work that a few bytes of a message can request repeatedly.

One unit stands for an allocated byte, or for about ten nanoseconds. A message may request 16 units per byte.
Reading a value once is free, because it takes bytes; reusing it, from pickle's memo, has to be counted.
"""

from __future__ import annotations

import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from easydist.errors import UnsafeObjectError

LONGEST_INT = 1 << 13
"""The most bits of an integer that goes into a call or a key: reducing a fraction takes time with their square."""

_SIZED = tuple, list, dict
_RAW = memoryview, np.ndarray, torch.Tensor
_PER_STEP = 64
"""The cost of each separator in a path, because the part after it becomes a separate string."""


def of_argument(value: Any) -> int:
    """Return the cost of one argument of a call."""
    if isinstance(value, str):
        return len(value) + _PER_STEP * (value.count("/") + value.count("\\"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, _SIZED):
        return 8 * len(value)
    if isinstance(value, int):
        return _nbytes_of_int(value)
    return value.nbytes if isinstance(value, _RAW) else 0


def _nbytes_of_int(value: int) -> int:
    if (bits := value.bit_length()) > LONGEST_INT:
        raise UnsafeObjectError(
            f"the message has an integer of {bits} bits in a call or a key; restricted decoding accepts at most "
            f"{LONGEST_INT} there. If you trust its sender, decode with weights_only=False"
        )
    return bits >> 3


def _of_ints(*values: Any) -> int:
    return sum(_nbytes_of_int(value) for value in values if isinstance(value, int)) >> 3


def _of_record(value: np.void) -> int:
    raise UnsafeObjectError(
        "the message has a NumPy record as a key, and comparing records may take arbitrarily long. If you trust its "
        "sender, decode with weights_only=False"
    )


class _ByType(dict[type, Callable[[Any], int]]):
    """A dict that finds a subclass under the first of its bases that is listed."""

    def __missing__(self, kind: type) -> Callable[[Any], int]:
        self[kind] = next(self[base] for base in kind.__mro__ if base in self)
        return self[kind]


_KEYS = _ByType(
    {
        object: lambda value: 1,
        int: lambda value: _of_ints(value),
        str: lambda value: len(value) >> 6,
        bytes: lambda value: len(value) >> 6,
        memoryview: lambda value: value.nbytes,
        range: lambda value: 1 + _of_ints(value.start, value.stop, value.step),
        slice: lambda value: 1 + _of_ints(value.start, value.stop, value.step),
        fractions.Fraction: lambda value: 64 + _of_ints(value.numerator, value.denominator),
        decimal.Decimal: lambda value: value.__sizeof__() >> 3,
        uuid.UUID: lambda value: 8,
        pathlib.PurePath: lambda value: 8 + (len(str(value)) >> 3),
        np.generic: lambda value: 8,
        np.void: _of_record,
    }
)


QUICKLY_COMPARED = frozenset([int, str, bytes, float, bool, type(None), complex, tuple, frozenset])
"""The types of keys that take no longer to compare than to hash. Comparing a Decimal with a float takes 5 µs."""


def of_key(value: Any) -> int:
    """Return the cost of hashing a value and comparing it with one of the same hash, without that of its contents."""
    return _KEYS[type(value)](value)
