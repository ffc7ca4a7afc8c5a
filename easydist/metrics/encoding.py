"""Columns made ready to travel: tensors and arrays as they are, everything else as encoded objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist import tree
from easydist.data.leaves import is_numeric
from easydist.format import codec
from easydist.metrics.columns import Items, has_rows

__all__ = ["Column", "Objects", "as_objects", "concatenated", "joined", "nbytes_of", "travelling"]


class Objects(NamedTuple):
    """A column of objects, made ready to travel with tensors.

    Attributes:
        message: The encoded list of this rank's items, and zeros; bytes.
        rows: An empty tensor with one row per item, whose size is known wherever sizes are; None: it is one value.
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
"""Items that are encoded at once to learn how long a message would be."""


def nbytes_of(column: Any) -> int:
    """How many bytes a column is when it travels; no more than a part of it is encoded at a time.

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
    """Where one column is among the leaves that travel.

    Attributes:
        path: In the tree.
        leaf: Its data, or the message of its objects.
        rows: The leaf that has as many rows; None: it is one value per rank.
        is_objects: Whether it is encoded.
    """

    path: str
    leaf: int
    rows: int | None
    is_objects: bool


def travelling(
    columns: Sequence[Any], spec: tree.Spec, with_objects: bool = True
) -> tuple[list[Column], list[Any], list[str]]:
    """List the leaves that travel for columns: where each column is among them, the leaves, and their paths.

    Args:
        columns: Data, or ``Items``.
        spec: The structure of their tree.
        with_objects: Encode what is no data; else it is left out, and its rows are counted.

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
    places: list[Column] = []
    leaves: list[Any] = []
    paths: list[str] = []
    for value, path in zip(columns, spec.paths, strict=True):
        at = len(leaves)
        if isinstance(value, Items):
            message, rows = as_objects(value) if with_objects else Objects(_NOTHING.clone(), _counting(value))
            places.append(Column(path, at, None if rows is None else at + 1, True))
            leaves += [message] if rows is None else [message, rows]
            paths += [f"{path}.message"] if rows is None else [f"{path}.message", f"{path}.rows"]
        else:
            places.append(Column(path, at, at if has_rows(value) else None, False))
            leaves.append(value)
            paths.append(path)
    return places, leaves, paths


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _rounded(nbytes: int) -> int:
    """One of few lengths, so that the layout of a batch is that of one before, and often that of all ranks.

    Multiples of 64, so that the messages of all ranks are aligned where they lie one behind the other.

    Example:
        >>> [_rounded(n) for n in (20, 100, 900, 5000, 40_000, 1_000_000)]
        [64, 128, 1024, 8192, 40960, 1048576]
    """
    unit = max(64, 1 << nbytes.bit_length() - 4, min(4096, 1 << (nbytes - 1).bit_length()))
    return -(-nbytes // unit) * unit


def joined(message: torch.Tensor, nbytes: Sequence[int], are_rows: bool) -> Any:
    """Decode what all ranks have sent, joined in rank order.

    Args:
        message: The messages, one behind the other; not to be used afterwards, as tensors and arrays share its memory.
        nbytes: Of each rank's message.
        are_rows: Whether each is a column of items, and not one value.

    Returns:
        A list; of arrays of strings an array, of tuples a tuple.
    """
    values = [codec.decode(part, is_padded=True) for part in message.split_with_sizes([*nbytes])]
    return concatenated(values) if are_rows else values


def concatenated(parts: Sequence[Any]) -> Any:
    """Join lists of items: arrays of strings to an array, tuples to a tuple, anything else to a list."""
    if all(isinstance(part, np.ndarray) and not is_numeric(part) for part in parts):
        return np.concatenate(parts)
    items = [item for part in parts for item in part]
    return tuple(items) if all(isinstance(part, tuple) for part in parts) else items
