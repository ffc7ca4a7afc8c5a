"""Trees of columns with one row per sample, split into their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist import tree
from easydist.data import packing
from easydist.data.leaves import as_tensor, check_unmasked, is_numeric
from easydist.metrics.dtypes import aligned, held, promoted
from easydist.typing import T, Tree

__all__ = [
    "Items",
    "Padded",
    "are_plain",
    "as_column",
    "concatenated",
    "has_rows",
    "is_text",
    "opened",
    "padded",
    "rows_of",
    "taken",
]

_TEXT = frozenset({str, bytes})
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


class Items(NamedTuple):
    """A column that is not a tensor: a list, a tuple of text, an array of strings, rows of varying shapes, or a value.

    Attributes:
        value: The column.
        has_rows: True if it has one item per sample; False if it is one value.
    """

    value: Any
    has_rows: bool


def opened(data: Tree, ragged: bool = False, whole: bool = False) -> tuple[list[Any], tree.Spec]:
    """Split a tree into its columns.

    A list that holds no tensor has one item per sample, and so does an array of strings and a tuple of text, which
    torch's ``default_collate`` makes of text.

    Args:
        data: The tree.
        ragged: Lists with tensors have one item per sample, too, and so do tensors with several dimensions, which may
            then differ between ranks.
        whole: The whole tree is one column of objects: a list of samples, or one value.

    Returns:
        The columns, as ``Items`` if they are not tensors, and the structure.

    Raises:
        TypeError: A column is a masked array.

    Example:
        >>> columns, _ = opened({"x": torch.ones(2), "id": ["a", "b"]})
        >>> columns[1]
        Items(value=['a', 'b'], has_rows=True)
    """
    if whole or not (tree.is_leaf(data) or tree.is_container(data)):
        _, spec = tree.flatten(data, lambda _: True)
        return [_items(data, "")], spec

    def is_end(value: Any) -> bool:
        if type(value) is torch.Tensor:
            return True  # most are
        if isinstance(value, list):
            return ragged or not _has_tensors(value)
        return tree.is_leaf(value) or is_text(value)

    values, spec = tree.flatten(data, is_end)
    pairs = zip(values, spec.paths, strict=True)
    return [_items(value, path, ragged) if _is_object(value, ragged) else value for value, path in pairs], spec


def as_column(rows: Any) -> Any:
    """Return rows as a column: ``Items`` if they are not a tensor."""
    return rows if isinstance(rows, torch.Tensor) else Items(rows, True)


def has_rows(column: Any) -> bool:
    """True if a column has one row or item per sample; False if it is one value."""
    return column.has_rows if isinstance(column, Items) else getattr(column, "ndim", 0) > 0


def _items(value: Any, path: str, ragged: bool = False) -> Items:
    if isinstance(value, np.ndarray):
        check_unmasked(value, path)
        value = [*value] if ragged and value.ndim > 1 and not is_numeric(value) else value
    is_array = isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0
    return Items(value, is_array or isinstance(value, list) or is_text(value))


def _is_object(value: Any, ragged: bool) -> bool:
    """True if a leaf cannot travel as a tensor."""
    if isinstance(value, np.ndarray):
        return not is_numeric(value) or (ragged and value.ndim > 1)
    return isinstance(value, list | tuple) or (ragged and isinstance(value, torch.Tensor) and value.ndim > 1)


def is_text(value: object) -> bool:
    """True if a value is a tuple of text only, which has one item per sample."""
    return type(value) is tuple and _TEXT.issuperset(map(type, value))


def are_plain(values: Iterable[Any]) -> bool:
    """True if all values are text, Python numbers or None, which nobody can change."""
    return _PLAIN.issuperset(map(type, values))


def _has_tensors(data: Tree) -> bool:
    """True if a tree holds a tensor or an array. Fast for many small lists and dicts."""
    if isinstance(data, dict | list | tuple):
        children = data.values() if isinstance(data, dict) else data
        return not are_plain(children) and any(map(_has_tensors, children))
    if tree.is_container(data):
        return any(map(_has_tensors, tree.leaves(data)))
    return isinstance(data, torch.Tensor | np.ndarray)


def rows_of(value: Any) -> Any:
    """Return the rows of a column of ``Items``, those of varying shapes as a list."""
    is_list = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and is_numeric(value))
    return [*value] if is_list else value


def concatenated(parts: Sequence[Any]) -> Any:
    """Join the rows of parts of a column: tensors, arrays, or lists; tuples become a tuple if all parts are tuples."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(aligned(parts))
    if isinstance(parts[0], torch.Tensor):
        dtype = parts[0].dtype
        if packing.is_copyable(dtype):
            return torch.cat([*parts])
        return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
    items = [item for part in parts for item in part]
    return tuple(items) if all(isinstance(part, tuple) for part in parts) else items


def taken(rows: Any, order: torch.Tensor | slice | None) -> Any:
    """Return selected rows of a column.

    Args:
        rows: A tensor, an array or a list.
        order: Their positions; None: all rows, unchanged.

    Example:
        >>> taken(["a", "b"], torch.tensor([1, 0]))
        ['b', 'a']
    """
    if order is None or isinstance(order, slice):
        return rows if order is None else rows[order]
    if isinstance(rows, list | tuple):
        return type(rows)([rows[i] for i in order.tolist()])
    if isinstance(rows, np.ndarray):
        return rows[order.numpy()]
    if rows.dtype.is_signed and packing.is_copyable(rows.dtype):  # torch 2.9 cannot index the wide unsigned ones
        return rows[order.to(rows.device)]
    return rows.view(packing.BITS[rows.dtype.itemsize])[order.to(rows.device)].view(rows.dtype)


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
