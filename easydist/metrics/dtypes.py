"""The one rule where values of several dtypes meet: a dtype that holds all of them unchanged, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from easydist.data import packing

__all__ = ["aligned", "held", "kind_of", "promoted"]

_SIZED = "USMm"
"""NumPy's kinds whose dtypes differ in width or unit only: text, bytes, dates and durations."""


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return the name of an array's dtype without width or unit: arrays with the same name may be joined.

    Example:
        >>> kind_of(np.dtype("U9")), kind_of(np.dtype("datetime64[ns]")), kind_of(np.dtype(object))
        ('str_', 'datetime64', 'object')
    """
    return dtype.type.__name__ if dtype.kind in _SIZED else str(dtype)


def promoted(dtypes: Iterable[Any]) -> Any:
    """Return the dtype of values of all these dtypes: torch's promotion, or NumPy's for arrays of one kind.

    Args:
        dtypes: torch's dtypes, or NumPy's that torch does not have; at least one.

    Raises:
        ValueError: There is none.

    Example:
        >>> promoted([torch.uint8, torch.int64, torch.float32]), promoted([np.dtype("U3"), np.dtype("U5")])
        (torch.float32, dtype('<U5'))
    """
    return reduce(_promoted, sorted(dtypes, key=_is_whole))  # torch promotes uint16 to a float, but to no int64


def _is_whole(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)


def _promoted(first: Any, second: Any) -> Any:
    if first == second:
        return first
    try:
        if isinstance(first, torch.dtype):
            return torch.promote_types(first, second)
        if kind_of(first) == kind_of(second):
            return np.promote_types(first, second)
    except (RuntimeError, TypeError):  # some of torch's dtypes, and years with days, have no promotion
        pass
    raise ValueError(f"{first} and {second} have no common dtype; convert the values to one")


def held(values: Any, dtype: Any) -> Any:
    """Return a tensor or an array in a promoted dtype.

    Raises:
        ValueError: A value would change: an integer that a float rounds, or a date beyond the range of a finer unit.

    Example:
        >>> held(torch.tensor([1, 2]), torch.float32)
        tensor([1., 2.])
    """
    if values.dtype == dtype:
        return values
    is_tensor = isinstance(values, torch.Tensor)
    found = values.to(dtype) if is_tensor else values.astype(dtype)
    if not (_is_exact(values, found) if is_tensor else _is_same_date(values, found)):
        raise ValueError(f"{dtype} does not hold all values of {values.dtype}; convert them to one dtype")
    return found


def _is_exact(values: torch.Tensor, found: torch.Tensor) -> bool:
    """True if no value has changed. Promotion can only change an integer that becomes a float."""
    old, new = values.dtype, found.real if found.is_complex() else found
    if old == torch.bool or old.is_floating_point or old.is_complex or not new.is_floating_point():
        return True
    limit = float(torch.iinfo(old).max + 1)  # from here on, conversion back to the integer is undefined
    if not bool((new.isfinite() & (new.double() < limit)).all()):
        return False
    bits = packing.BITS[old.itemsize]  # torch 2.9 cannot compare the wide unsigned integers
    return torch.equal(new.to(old).view(bits), values.view(bits))


def _is_same_date(values: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> bool:
    """True if no date has changed: NumPy does not report an overflow. Text only becomes wider."""
    return values.dtype.kind not in "Mm" or bool(((found.astype(values.dtype) == values) | np.isnat(values)).all())


def aligned(parts: Sequence[Any]) -> list[Any]:
    """Return tensors or arrays in their common dtype.

    Raises:
        ValueError: There is none that holds all values.

    Example:
        >>> aligned([torch.tensor([0.5]), torch.tensor([1, 0])])
        [tensor([0.5000]), tensor([1., 0.])]
    """
    dtype = promoted([part.dtype for part in parts])
    return [held(part, dtype) for part in parts]
