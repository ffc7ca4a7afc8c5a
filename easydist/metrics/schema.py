"""The columns of a ``MetricCollector``: their names and types, and the splitting and rebuilding of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist import tree
from easydist.data.leaves import Leaves, is_numeric
from easydist.data.packing import dtype_name
from easydist.format import codec
from easydist.metrics.columns import is_text
from easydist.typing import Tree

__all__ = ["ColumnType", "Schema", "nbytes_of", "opened"]


class ColumnType(NamedTuple):
    """The description of one column.

    Attributes:
        path: Its path in the tree.
        kind: ``"tensor"``, ``"array"`` or ``"list"``.
        dtype: The dtype of a tensor or array, else empty.
        shape: The shape of one row of a tensor or array, else empty.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def empty(self, count: int = 0) -> Any:
        """Allocate memory for rows; for items, an empty list."""
        if self.kind == "list":
            return []
        return torch.empty((count, *self.shape), dtype=getattr(torch, self.dtype), device="cpu")

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
        values = [leaf.numpy() if one.kind == "array" else leaf for one, leaf in zip(self.types, leaves, strict=True)]
        return tree.map(lambda i: values[i], self.template)


def opened(columns: Mapping[str, Tree], count: int) -> tuple[Schema, list[Any], int]:
    """Split the data of one update into columns.

    Args:
        columns: Trees of tensors, arrays and lists with one row per sample.
        count: The number of rows that each must have.

    Returns:
        The schema, a copy of each column's rows on the CPU, and their bytes.

    Raises:
        ValueError: A column has another number of rows, or is not one row per sample.
        TypeError: A tensor is not dense, or an item of a list cannot be pickled.
    """
    values, spec = tree.flatten(columns, lambda value: isinstance(value, list) or is_text(value) or tree.is_leaf(value))
    if spec.plain:
        raise ValueError(f"MetricCollector: {spec.plain[0][0]} is {spec.plain[0][1]!r:.60}, not one row per sample")
    for path, value in zip(spec.paths, values, strict=True):
        rows = len(value) if isinstance(value, list | tuple) or np.ndim(value) else None
        if rows != count:
            said = "one value" if rows is None else f"{rows} rows"
            raise ValueError(f"MetricCollector: {path} has {said}, indices has {count}; pass one row per sample")
    taken = [_taken(value) for value in values]
    types = [_type_of(*each) for each in zip(spec.paths, values, taken, strict=True)]
    return Schema(types, spec.rebuild([*range(len(values))])), taken, nbytes_of(taken)


def nbytes_of(leaves: Sequence[Any]) -> int:
    """Return the bytes of columns when they travel.

    Raises:
        TypeError: An item of a list cannot be pickled.
    """
    return sum([codec.EncodedObject(one).nbytes if isinstance(one, list) else one.nbytes for one in leaves])


def _taken(value: Any) -> Any:
    """Copy the rows. Objects are not copied."""
    if isinstance(value, list | tuple):
        return [*value]
    if isinstance(value, np.ndarray) and not is_numeric(value):
        return value.tolist()
    (tensor,) = Leaves(value).tensors
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _type_of(path: str, value: Any, taken: Any) -> ColumnType:
    if isinstance(taken, list):
        return ColumnType(path, "list")
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    return ColumnType(path, kind, dtype_name(taken.dtype), tuple(taken.shape[1:]))
