"""The one rule where values of several dtypes meet: a dtype that holds all of them unchanged, or an error.

They meet where rows are joined, and where samples of several lengths are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist.data import packing
from easydist.data.leaves import as_tensor, is_numeric
from easydist.typing import T

__all__ = ["Padded", "aligned", "concatenated", "held", "kind_of", "padded", "promoted"]

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


def concatenated(parts: Sequence[Any]) -> Any:
    """Join the rows of parts of a column: tensors, arrays, or lists; tuples become a tuple if all parts are tuples.

    One part is copied, too, and becomes an array or a list of the usual class, as several do.
    """
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(aligned(parts))
    if isinstance(parts[0], torch.Tensor):
        dtype = parts[0].dtype
        if packing.is_copyable(dtype):
            return torch.cat([*parts])
        return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
    items = [item for part in parts for item in part]
    return tuple(items) if all(isinstance(part, tuple) for part in parts) else items


class Padded(NamedTuple):
    """Samples of several lengths in one tensor.

    Attributes:
        values: Of shape ``(samples, longest, …)``.
        lengths: The length of each sample without padding, int64.
    """

    values: torch.Tensor
    lengths: torch.Tensor


def padded(items: list[Any], pad_index: float) -> Any:
    """Return samples of several lengths as one padded tensor.

    Args:
        items: Tensors, arrays, or lists of numbers. Any other column is returned unchanged.
        pad_index: The value to pad with.

    Returns:
        ``Padded``, in the dtype that torch promotes those of the samples to. Python floats are float64.

    Raises:
        ValueError: The samples differ in more than their first dimension, that dtype would change a value, or it cannot
            hold ``pad_index``.

    Example:
        >>> padded([[1, 2], [3]], -1)
        Padded(values=tensor([[ 1,  2],
                [ 3, -1]]), lengths=tensor([2, 1]))
    """
    if not all(map(_is_sequence, items)):
        return items
    tensors = [_as_sample(item, i) for i, item in enumerate(items)]
    like = max(tensors, key=torch.Tensor.numel, default=torch.empty(0, device="cpu"))
    for i, tensor in enumerate(tensors):
        if tensor.shape[1:] != like.shape[1:] and tensor.numel():
            raise ValueError(f"sample {i} is of shape {tuple(tensor.shape)}, another of {tuple(like.shape)}")
    dtype = promoted([tensor.dtype for tensor in tensors if tensor.numel()] or [like.dtype])
    lengths = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
    values = _filled(like, [len(tensors), len(like), *like.shape[1:]], dtype, pad_index)
    for i, (row, tensor) in enumerate(zip(values, tensors, strict=True)):
        row[: len(tensor)] = tensor if tensor.dtype == dtype or not tensor.numel() else _named(i, held, tensor, dtype)
    return Padded(values, lengths)


def _named(number: int, convert: Callable[..., T], *arguments: Any) -> T:
    """Convert one sample, and name it in an error."""
    try:
        return convert(*arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sample {number}: {error}") from None


_DTYPES = {int: torch.int64, float: torch.float64}


def _as_sample(item: Any, number: int) -> torch.Tensor:
    if not isinstance(item, list):
        return item if isinstance(item, torch.Tensor) else _named(number, as_tensor, item)
    if not item:
        return torch.empty(0, device="cpu")
    kinds = set(map(type, item))
    if len(kinds) == 1 and (dtype := _DTYPES.get(kinds.pop())) is not None:
        try:
            return torch.tensor(item, dtype=dtype, device="cpu")
        except (OverflowError, RuntimeError, ValueError):
            pass  # as_tensor below raises the error
    return torch.stack(_named(number, lambda: aligned([as_tensor(each) for each in item])))


def _filled(like: torch.Tensor, shape: list[int], dtype: torch.dtype, pad_index: float) -> torch.Tensor:
    """Return a tensor full of ``pad_index``, of which a float dtype may hold the nearest value."""
    try:
        found = like.new_full((1,), pad_index, dtype=dtype).item()
        is_near = dtype.is_floating_point or dtype.is_complex
        is_near &= not isinstance(pad_index, int | np.integer) and np.isfinite(found) == np.isfinite(pad_index)
        if found == pad_index or is_near:
            return like.new_full(shape, pad_index, dtype=dtype)
    except (OverflowError, RuntimeError, TypeError):
        pass
    raise ValueError(f"{dtype} cannot hold pad_index={pad_index!r:.60}")


def _is_sequence(item: object) -> bool:
    """True if a sample is a tensor or an array with a length, or a list of numbers."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.ndim > 0 and (isinstance(item, torch.Tensor) or is_numeric(item))
    return isinstance(item, list) and (_DTYPES.keys() >= set(map(type, item)) or all(map(_is_number, item)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex | np.number | np.bool_) and not isinstance(value, np.timedelta64)
