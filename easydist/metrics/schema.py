"""The columns of a ``MetricCollector``: their names and types, and the splitting and rebuilding of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy

from easydist import tree
from easydist.data.leaves import as_tensor, check_unmasked, is_numeric
from easydist.data.packing import dtype_name
from easydist.format import codec
from easydist.metrics.columns import are_plain, is_text
from easydist.metrics.dtypes import promoted
from easydist.typing import Tree

__all__ = ["ColumnType", "Schema", "opened"]


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

    def told(self) -> list[Any]:
        """Return the fields for other ranks, and the description of a dtype of NumPy's, as in .npy files."""
        if isinstance(self.dtype, np.dtype):
            return [*self._replace(dtype=""), npy.dtype_to_descr(self.dtype)]
        return [*self, None]

    @classmethod
    def of(cls, told: Sequence[Any]) -> ColumnType:
        """Return the type that another rank has told."""
        *fields, dtype = told
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

    def joined(self, other: Schema) -> Schema:
        """Return the schema of the rows of both.

        Raises:
            ValueError: They have different columns.
        """
        types = [one.joined(another) for one, another in zip(self.types, other.types, strict=True)]
        return Schema(types, other.template)


def _closed(one: ColumnType, leaf: Any) -> Any:
    return leaf.numpy() if one.kind == "array" and isinstance(leaf, torch.Tensor) else leaf


def opened(columns: Mapping[str, Tree], count: int) -> tuple[Schema, list[Any], int]:
    """Split the data of one update into columns.

    Args:
        columns: Trees of tensors, arrays and lists with one row per sample.
        count: The number of rows that each must have.

    Returns:
        The schema, a copy of each column's rows on the CPU, and their bytes.

    Raises:
        ValueError: A column has another number of rows, or is not one row per sample.
        TypeError: A tensor is not dense, an array is masked, or an item of a list cannot be pickled.
    """
    values, spec = tree.flatten(columns, lambda value: isinstance(value, list) or is_text(value) or tree.is_leaf(value))
    if spec.plain:
        raise ValueError(f"MetricCollector: {spec.plain[0][0]} is {spec.plain[0][1]!r:.60}, not one row per sample")
    for path, value in zip(spec.paths, values, strict=True):
        rows = len(value) if isinstance(value, list | tuple) or np.ndim(value) else None
        if rows != count:
            said = "one value" if rows is None else f"{rows} rows"
            raise ValueError(f"MetricCollector: {path} has {said}, indices has {count}; pass one row per sample")
    found = [_taken(*each) for each in zip(values, spec.paths, strict=True)]
    taken, nbytes = [rows for rows, _ in found], sum([size for _, size in found])
    types = [_type_of(*each) for each in zip(spec.paths, values, taken, strict=True)]
    return Schema(types, spec.rebuild([*range(len(values))])), taken, nbytes


def _has_objects(rows: Any) -> bool:
    return isinstance(rows, list) or (isinstance(rows, np.ndarray) and rows.dtype.hasobject)


def _taken(value: Any, path: str) -> tuple[Any, int]:
    """Copy the rows, and return their bytes, too."""
    if isinstance(value, torch.Tensor):
        tensor = as_tensor(value, path).to("cpu", copy=True, memory_format=torch.contiguous_format)
        return tensor, tensor.nbytes
    if isinstance(value, np.ndarray):
        check_unmasked(value, path)
        if not value.dtype.hasobject and not is_numeric(value):
            return value.copy(), value.nbytes
    rows = [*value] if isinstance(value, list | tuple) else value
    if _has_objects(rows):
        message = codec.EncodedObject(rows)  # nobody can change plain items; the others are copied as if they travelled
        is_fixed = isinstance(rows, list) and are_plain(rows)
        return rows if is_fixed else codec.decode(message.joined()), message.nbytes
    tensor = as_tensor(rows, path).clone()
    return tensor, tensor.nbytes


def _type_of(path: str, value: Any, taken: Any) -> ColumnType:
    if isinstance(taken, list):
        return ColumnType(path, "list")
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    dtype = taken.dtype if isinstance(taken, np.ndarray) else dtype_name(taken.dtype)
    return ColumnType(path, kind, dtype, tuple(taken.shape[1:]))
