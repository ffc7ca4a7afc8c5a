"""Sums without rounding: every finite float64 is a whole multiple of 2**-1074, and Python's integers have any size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from easydist.data.backing import backed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ExactSum", "floats", "numbers"]

_SCALE = 1074
"""The sums are integers in units of 2**-1074, the smallest float64; this is the exponent."""

_MANTISSA, _LOW = 53, 26
"""The bits of a float64's mantissa, and of its lower part, which is summed separately."""

_MOST = 1 << _LOW
"""The most elements to sum at once: sums of this many parts of 27 bits are exact in float64."""

_FEW = 64
"""The most elements to add one by one, which is faster for so few."""


class ExactSum:
    """A sum of integers and floats, rounded only when it is read.

    Example:
        >>> total = ExactSum()
        >>> total.add(np.array([1e300, 1.0, -1e300]))
        >>> total.value()
        1.0
    """

    def __init__(self) -> None:
        self._finite, self._special, self._is_whole = 0, 0.0, True

    @classmethod
    def of(cls, states: Iterable[str]) -> ExactSum:
        """Add up the sums of several ranks."""
        total = cls()
        for state in states:
            finite, special, is_whole = state.split()
            total._finite += int(finite, 16)
            total._special += float(special)
            total._is_whole &= is_whole == "whole"
        return total

    def state(self) -> str:
        """Return the sum as text, which travels faster than three numbers."""
        return f"{self._finite:x} {self._special} {'whole' if self._is_whole else 'float'}"

    def add(self, values: NDArray[Any]) -> None:
        """Add the elements of a one-dimensional array: integers, bools, Python integers or float64."""
        if values.dtype.kind != "f":
            self._finite += sum(values.tolist()) << _SCALE
            return
        self._is_whole = False
        if len(values) > _FEW:
            is_finite = np.isfinite(values)
            for first in range(0, len(values), _MOST):
                part = slice(first, first + _MOST)
                self._finite += _exact(values[part][is_finite[part]])
            values = values[~is_finite]
        for value in values.tolist():
            if math.isfinite(value):
                above, below = value.as_integer_ratio()  # below is a power of 2
                self._finite += above << (_SCALE + 1 - below.bit_length())
            else:
                self._special += value

    def value(self) -> int | float:
        """Return the sum: an int if all were integers, else the nearest float64."""
        return self._finite >> _SCALE if self._is_whole else self.over(None)

    def over(self, divisor: ExactSum | None) -> float:
        """Return the quotient of two sums, rounded once; NaN if the divisor is 0. None divides by 1."""
        below = 1 << _SCALE if divisor is None else divisor._finite
        if self._special or math.isnan(self._special) or not below:
            return self._special if below else math.nan
        try:
            return self._finite / below
        except OverflowError:
            return math.inf if self._finite > 0 else -math.inf


def _exact(values: NDArray[np.float64]) -> int:
    """Return the sum of finite numbers in units of 2**-1074. The mantissas of each exponent are summed as integers."""
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, _MANTISSA).astype(np.int64)
    lowest = exponents.min(initial=0)
    high = np.bincount(exponents - lowest, weights=mantissas >> _LOW)
    low = np.bincount(exponents - lowest, weights=mantissas & ((1 << _LOW) - 1))
    total = 0
    for place in np.flatnonzero((high != 0) | (low != 0)).tolist():
        total += ((int(high[place]) << _LOW) + int(low[place])) << place
    return _shifted(total, int(lowest) - _MANTISSA + _SCALE)


def _shifted(value: int, bits: int) -> int:
    return value << bits if bits >= 0 else value >> -bits  # bits of subnormal numbers that are cut off are 0


def numbers(value: Any, name: str) -> NDArray[Any]:
    """Return a number, tensor or array as a one-dimensional array of float64, integers, or Python integers.

    Raises:
        TypeError: It is none of these, or complex, or a masked array.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; pass .compressed(), which has no masked values")
    if isinstance(value, torch.Tensor):
        tensor = backed(value, name).cpu()
        value = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, float | int):
        return np.array([value], dtype=np.float64 if isinstance(value, float) else object)
    array = np.atleast_1d(value).ravel() if isinstance(value, np.ndarray | np.generic) else None
    if array is None or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(f"{name} is {type(value).__name__}; pass a real number, or a tensor or array of them")
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def floats(values: NDArray[Any], name: str) -> NDArray[np.float64]:
    """Return the result of ``numbers`` as float64.

    Raises:
        ValueError: It is an integer beyond the largest float64.
    """
    try:
        return values.astype(np.float64)
    except OverflowError:
        raise ValueError(f"{name} is an integer that is too large for a float64; scale it down") from None
