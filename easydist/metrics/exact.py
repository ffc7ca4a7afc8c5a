"""Sums without rounding: every finite float64 is a whole multiple of 2**-1074, and Python's integers have any size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ExactSum", "State", "numbers"]

_SCALE = 1074
"""The sums are kept as multiples of 2**-1074, the smallest float64."""

_MANTISSA = 53
_LOW = 26
"""Bits of the lower part of a mantissa; sums of 2**36 such parts fit 64 bits."""

State: TypeAlias = tuple[int, float, bool]
"""The sum of what is finite as a multiple of 2**-1074, the sum of what is not, and whether all were integers."""


class ExactSum:
    """A sum of integers and floats, rounded only when it is asked for.

    Example:
        >>> total = ExactSum()
        >>> total.add(np.array([1e300, 1.0, -1e300]))
        >>> total.value()
        1.0
    """

    def __init__(self) -> None:
        self._finite, self._special, self._is_whole = 0, 0.0, True

    @classmethod
    def of(cls, states: Iterable[State]) -> ExactSum:
        """Sum the sums of several ranks."""
        total = cls()
        for finite, special, is_whole in states:
            total._finite += finite
            total._special += special
            total._is_whole &= is_whole
        return total

    def state(self) -> State:
        """Give the sum as plain numbers."""
        return self._finite, self._special, self._is_whole

    def add(self, values: NDArray[Any]) -> None:
        """Add the elements of an array of one dimension: integers, bools, Python integers or float64."""
        if values.dtype.kind != "f":
            self._finite += sum(values.tolist()) << _SCALE
            return
        self._is_whole = False
        finite = np.isfinite(values)
        self._special += sum(values[~finite].tolist())
        self._finite += _exact(values[finite])

    def value(self) -> int | float:
        """Give the sum: an int if all were integers, else the nearest float64."""
        return self._finite >> _SCALE if self._is_whole else self.over(None)

    def over(self, divisor: ExactSum | None) -> float:
        """Give the quotient of two sums, rounded once; NaN where the divisor is 0. None divides by 1."""
        below = 1 << _SCALE if divisor is None else divisor._finite
        if self._special or math.isnan(self._special) or not below:
            return self._special if below else math.nan
        try:
            return self._finite / below
        except OverflowError:
            return math.inf if self._finite > 0 else -math.inf


def _exact(values: NDArray[np.float64]) -> int:
    """The sum of finite numbers, as a multiple of 2**-1074."""
    if len(values) == 1:
        above, below = float(values[0]).as_integer_ratio()
        return (above << _SCALE) // below
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, _MANTISSA).astype(np.int64)
    return sum(_scaled(mantissas[exponents == exponent], int(exponent)) for exponent in np.unique(exponents))


def _scaled(mantissas: NDArray[np.int64], exponent: int) -> int:
    """The sum of mantissas times ``2 ** (exponent - 53)``, as a multiple of 2**-1074."""
    total = (int((mantissas >> _LOW).sum()) << _LOW) + int((mantissas & ((1 << _LOW) - 1)).sum())
    shift = exponent - _MANTISSA + _SCALE
    return total << shift if shift >= 0 else total >> -shift  # a subnormal's lowest bits are 0


def numbers(value: Any, name: str) -> NDArray[Any]:
    """A number, tensor or array as an array of one dimension: of float64, of integers, or of Python integers.

    Raises:
        TypeError: It is none of these, or complex.
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        value = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, int) and not isinstance(value, bool):
        return np.array([value], dtype=object)
    array = np.atleast_1d(value).ravel() if isinstance(value, bool | float | np.ndarray | np.generic) else None
    if array is None or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(f"{name} is {type(value).__name__}; pass a real number, or a tensor or array of such")
    return array.astype(np.float64) if array.dtype.kind == "f" else array
