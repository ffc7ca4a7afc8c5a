"""Columns prepared for travelling: tensors and arrays as they are, everything else as encoded objects."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist import tree
from easydist.data.leaves import is_numeric
from easydist.format import codec
from easydist.metrics.columns import Items, has_rows
from easydist.metrics.dtypes import aligned, kind_of

__all__ = ["Column", "Objects", "as_objects", "concatenated", "joined", "nbytes_of", "travelling"]


class Objects(NamedTuple):
    """A column of objects, prepared to travel with tensors.

    Attributes:
        message: The encoded list of this rank's items, and zeros, as bytes.
        rows: An empty tensor with one row per item, so that its size is known with all others; None if it is one value.
    """

    message: torch.Tensor
    rows: torch.Tensor | None


def as_objects(items: Items) -> Objects:
    """Encode one column, or one value.

    Raises:
        TypeError: An object cannot be pickled.
        UnsafeObjectError: pickle is denied, and an object is not allow-listed.
    """
    message = codec.EncodedObject(items.value)
    if not codec.is_pickle_allowed():
        message.check()
    return Objects(message.joined(_rounded(message.nbytes)), _counting(items))


def _counting(items: Items) -> torch.Tensor | None:
    return torch.empty((len(items.value), 0), dtype=torch.uint8, device="cpu") if items.has_rows else None


_PART = 1000
"""The number of items to encode at once when measuring the length of a message."""


def nbytes_of(column: Any) -> int:
    """Return the bytes of a column when it travels. No more than a part of it is encoded at a time.

    Raises:
        TypeError: An item cannot be pickled.
    """
    if not isinstance(column, Items):
        return getattr(column, "nbytes", 8)
    value = column.value
    if not column.has_rows:
        return codec.EncodedObject(value).nbytes
    return sum([codec.EncodedObject(value[i : i + _PART]).nbytes for i in range(0, len(value), _PART)])


class Column(NamedTuple):
    """The position of a column among the leaves that travel.

    Attributes:
        path: The column's path in the tree.
        leaf: The leaf with its data, or with the message of its objects.
        rows: The leaf that has as many rows; None if the column is one value per rank.
        is_objects: True if the column is encoded.
    """

    path: str
    leaf: int
    rows: int | None
    is_objects: bool


def travelling(
    columns: Sequence[Any], spec: tree.Spec, with_objects: bool = True
) -> tuple[list[Column], list[Any], list[str]]:
    """List the leaves that travel: the place of each column among them, the leaves, and their paths.

    Args:
        columns: Data, or ``Items``.
        spec: The structure of their tree.
        with_objects: Encode objects; otherwise only their rows are counted.

    Raises:
        TypeError: An object cannot be pickled.
        UnsafeObjectError: pickle is denied, and an object is not allow-listed.

    Example:
        >>> from easydist.metrics.columns import opened
        >>> columns, spec = opened({"id": ["a", "b"], "x": torch.ones(2)})
        >>> places, _, paths = travelling(columns, spec)
        >>> places[1], paths
        (Column(path="['x']", leaf=2, rows=2, is_objects=False), ["['id'].message", "['id'].rows", "['x']"])
    """
    leaves: list[Any] = []
    kinds: list[str | None] = []
    for value in columns:
        if isinstance(value, Items):
            message, rows = as_objects(value) if with_objects else Objects(_NOTHING.clone(), _counting(value))
            leaves += [message] if rows is None else [message, rows]
            kinds.append(_kind(value.value))
        else:
            leaves.append(value)
            kinds.append(None)
    places, paths = _placed(tuple(spec.paths), tuple(kinds), tuple(map(has_rows, columns)))
    return places, leaves, [*paths]


@functools.lru_cache(maxsize=256)
def _placed(
    paths: Sequence[str], kinds: Sequence[str | None], have_rows: Sequence[bool]
) -> tuple[list[Column], list[str]]:
    """Return the places of columns, and the paths of the leaves that travel, which most batches have in common.

    Args:
        paths: The paths of the columns.
        kinds: The kind of each column of objects; None for data.
        have_rows: For each column True if it has one row or item per sample.
    """
    places: list[Column] = []
    found: list[str] = []
    for path, kind, counts in zip(paths, kinds, have_rows, strict=True):
        at = len(found)
        places.append(Column(path, at, at + (kind is not None) if counts else None, kind is not None))
        if kind is None:
            found.append(path)
        else:
            found += [f"{path}{kind}.message", *([f"{path}{kind}.rows"] if counts else [])]
    return places, found


def _kind(column: Any) -> str:
    """Return the kind of an array that only NumPy has, as part of a path, so that all ranks compare it."""
    is_array = isinstance(column, np.ndarray) and not is_numeric(column)
    return "".join([f".{kind_of(column.dtype)}", *[f"[{size}]" for size in column.shape[1:]]]) if is_array else ""


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _rounded(nbytes: int) -> int:
    """Round up to one of few lengths, so that a batch often has the layout of the previous one, and of all ranks.

    All are multiples of 64, so that the messages of all ranks are aligned one after the other.

    Example:
        >>> [_rounded(n) for n in (20, 100, 900, 5000, 40_000, 1_000_000)]
        [64, 128, 1024, 8192, 40960, 1048576]
    """
    unit = max(64, 1 << nbytes.bit_length() - 4, min(4096, 1 << (nbytes - 1).bit_length()))
    return -(-nbytes // unit) * unit


def joined(message: torch.Tensor, nbytes: Sequence[int], are_rows: bool) -> Any:
    """Decode the joined messages of all ranks, in rank order.

    Args:
        message: The messages, one after the other. Do not use it afterwards: tensors and arrays share its memory.
        nbytes: The bytes of each rank's message.
        are_rows: True if each is a column of items; False if it is one value.

    Returns:
        A list; for arrays that no tensor can hold an array, for tuples a tuple.
    """
    values = [codec.decode(part, is_padded=True) for part in message.split_with_sizes([*nbytes])]
    return concatenated(values) if are_rows else values


def concatenated(parts: Sequence[Any]) -> Any:
    """Join lists of items. Arrays that no tensor can hold become an array, tuples a tuple, anything else a list."""
    if all(isinstance(part, np.ndarray) and not is_numeric(part) for part in parts):
        return np.concatenate(aligned(parts))
    items = [item for part in parts for item in part]
    return tuple(items) if all(isinstance(part, tuple) for part in parts) else items
