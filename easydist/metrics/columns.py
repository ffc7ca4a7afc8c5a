"""Trees of columns with one row per sample: their splitting, and the types of columns that ranks must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy

from easydist import tree
from easydist.data import packing
from easydist.data.leaves import check_unmasked, is_numeric
from easydist.metrics.joining import promoted
from easydist.typing import Tree

__all__ = ["ColumnType", "Items", "Schema", "are_plain", "as_column", "has_rows", "opened", "rows_of", "split", "taken"]

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
    values, spec = split(data, ragged)
    pairs = zip(values, spec.paths, strict=True)
    return [_items(value, path, ragged) if _is_object(value, ragged) else value for value, path in pairs], spec


def split(data: Tree, has_lists: bool) -> tuple[list[Any], tree.Spec]:
    """Split a tree into values that are one column each, and its structure.

    Args:
        data: The tree.
        has_lists: True if lists that hold tensors are columns, too.
    """

    def is_end(value: Any) -> bool:
        if type(value) is torch.Tensor:
            return True  # most are
        if isinstance(value, list):
            return has_lists or not _has_tensors(value)
        return tree.is_leaf(value) or _is_text(value)

    return tree.flatten(data, is_end)


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
    return Items(value, is_array or isinstance(value, list) or _is_text(value))


def _is_object(value: Any, ragged: bool) -> bool:
    """True if a leaf cannot travel as a tensor."""
    if isinstance(value, np.ndarray):
        return not is_numeric(value) or (ragged and value.ndim > 1)
    return isinstance(value, list | tuple) or (ragged and isinstance(value, torch.Tensor) and value.ndim > 1)


def _is_text(value: object) -> bool:
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


class ColumnType(NamedTuple):
    """The description of one column.

    Attributes:
        path: Its path in the tree.
        kind: ``"tensor"``, ``"array"`` or ``"list"``.
        dtype: The dtype of a tensor or array by torch's name; NumPy's own if torch does not have it; else empty.
        shape: The shape of one row of a tensor or array, else empty.
    """

    path: str
    kind: str
    dtype: str | np.dtype[Any] = ""
    shape: tuple[int, ...] = ()

    def empty(self) -> Any:
        """Return the column without rows."""
        if self.kind == "list":
            return []
        if isinstance(self.dtype, np.dtype):
            return np.empty((0, *self.shape), self.dtype)
        return torch.empty((0, *self.shape), dtype=getattr(torch, self.dtype), device="cpu")

    def description(self) -> list[Any]:
        """Return the fields for other ranks, and the description of a dtype of NumPy's, as in .npy files."""
        if isinstance(self.dtype, np.dtype):
            return [*self._replace(dtype=""), npy.dtype_to_descr(self.dtype)]
        return [*self, None]

    @classmethod
    def of(cls, description: Sequence[Any]) -> ColumnType:
        """Return the type that another rank has described."""
        *fields, dtype = description
        return cls(*fields) if dtype is None else cls(*fields)._replace(dtype=npy.descr_to_dtype(dtype))

    def joined(self, other: ColumnType) -> ColumnType:
        """Return the type of a column of both types. Text may differ in width, and dates in their unit.

        Raises:
            ValueError: There is none.
        """
        if isinstance(self.dtype, np.dtype) and isinstance(other.dtype, np.dtype):
            dtype = promoted([self.dtype, other.dtype])
            self, other = self._replace(dtype=dtype), other._replace(dtype=dtype)
        if self != other:
            raise ValueError(f"{self} is not {other}")
        return self

    def __str__(self) -> str:
        return f"{self.path} {self.kind} {self.dtype} {self.shape if self.kind != 'list' else ''}".rstrip()


class Schema(NamedTuple):
    """The descriptions of all columns.

    Attributes:
        types: The columns in the order of the tree.
        template: The tree, with the number of each column in its place.
    """

    types: Sequence[ColumnType] = ()
    template: Tree = None

    def rebuilt(self, leaves: Sequence[Any]) -> Any:
        """Rebuild the tree of columns."""
        values = [_closed(one, leaf) for one, leaf in zip(self.types, leaves, strict=True)]
        return tree.map(lambda i: values[i], self.template)

    def description(self) -> list[Any]:
        """Return the fields for other processes."""
        return [[one.description() for one in self.types], self.template]

    @classmethod
    def of(cls, description: Sequence[Any]) -> Schema:
        """Return the schema that another process has described."""
        types, template = description
        return cls([*map(ColumnType.of, types)], template)

    def joined(self, other: Schema) -> Schema:
        """Return the schema of the rows of both.

        Raises:
            ValueError: They have different columns.
        """
        types = [one.joined(another) for one, another in zip(self.types, other.types, strict=True)]
        return Schema(types, other.template)


def _closed(one: ColumnType, leaf: Any) -> Any:
    return leaf.numpy() if one.kind == "array" and isinstance(leaf, torch.Tensor) else leaf
