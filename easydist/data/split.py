"""The share of one rank in nested data, cut without an exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from easydist import tree
from easydist.base.wording import a_or_an
from easydist.data.arithmetic import split_bounds
from easydist.typing import Tree


def split(inputs: Tree, parts: int, part: int, apply_padding: bool = False) -> Tree:
    """Return one of ``parts`` shares of ``inputs``; the first ``length % parts`` shares have one element more.

    Lists, tuples, ranges, tensors, arrays, datasets with ``select``, and map-style datasets of torch (whose share is a
    ``Subset``) are cut along dim 0; mappings and namedtuples value by value; all other values are returned unchanged.

    Args:
        inputs: The data to split.
        parts: The number of shares.
        part: The index of the share to return.
        apply_padding: Repeat the last element until all shares have the same length.

    Raises:
        TypeError: ``inputs`` is an iterator, a stream or a ``DataLoader``, which every process would read whole.
        ValueError: The values of a mapping differ in length.

    Example:
        >>> [split({"id": [1, 2, 3], "text": "abc"}, 2, part) for part in range(2)]
        [{'id': [1, 2], 'text': 'abc'}, {'id': [3], 'text': 'abc'}]
        >>> split((1, 2, 3), 2, 1, apply_padding=True)
        (3, 3)
    """
    _check_indexed(inputs)
    lengths = dict(_lengths(inputs, ""))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path}: {length}" for path, length in lengths.items())
        raise ValueError(f"all values must have the same length to be split between processes, got {listed}")
    length = next(iter(lengths.values()), 0)
    start, stop = split_bounds(length, parts, part)
    padding = -(-length // parts) - (stop - start) if apply_padding else None
    return _map(lambda value: _cut(value, start, stop, padding), inputs)


def _check_indexed(inputs: Tree) -> None:
    kind = type(inputs).__name__
    if isinstance(inputs, DataLoader):
        raise TypeError(f"{a_or_an(kind)} cannot be split between processes; pass its dataset")
    if isinstance(inputs, Iterator | IterableDataset):
        what = "an iterator" if isinstance(inputs, Iterator) else "a stream"
        raise TypeError(f"{what} ({kind}) cannot be split between processes; pass a list of its values")


def _lengths(value: Tree, path: str) -> Iterator[tuple[str, int]]:
    if (items := _items(value)) is not None:
        for key, item in items:
            yield from _lengths(item, f"{path}.{key}" if tree.is_namedtuple(value) else f"{path}[{key!r}]")
    elif _is_cuttable(value):
        yield path, len(value)


def _map(fn: Callable[[Any], Any], value: Tree) -> Tree:
    """Apply ``fn`` to every value that can be cut, inside mappings and namedtuples."""
    return tree.map(lambda v: fn(v) if _is_cuttable(v) else v, value, is_leaf=lambda v: _items(v) is None)


def _items(value: Any) -> Any:
    """Return the (key, value) pairs of a mapping or namedtuple, which is cut value by value; else None."""
    if isinstance(value, Mapping):
        return value.items()
    return value._asdict().items() if tree.is_namedtuple(value) else None


def _is_cuttable(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, list | tuple | range) or _is_dataset(value) or _is_map_style(value)


def _is_dataset(value: Any) -> bool:
    """True for a ``datasets.Dataset``, which is cut by ``select`` with row numbers."""
    return hasattr(value, "select") and hasattr(value, "column_names")


def _is_map_style(value: Any) -> bool:
    """True for a dataset of torch with a length and items by index."""
    return isinstance(value, Dataset) and hasattr(value, "__len__") and not isinstance(value, IterableDataset)


def _cut(value: Any, start: int, stop: int, padding: int | None) -> Any:
    """Return the elements from ``start`` to ``stop``, then the last one ``padding`` times; None is a plain slice."""
    if _is_dataset(value) or _is_map_style(value):
        indices = [*range(start, stop), *[len(value) - 1] * (padding or 0)]
        return value.select(indices) if _is_dataset(value) else Subset(value, indices)
    share, last = value[start:stop], value[-1:]
    if padding is None:
        return share
    if isinstance(value, torch.Tensor):
        return torch.cat([share, *[last] * padding])
    if isinstance(value, np.ndarray):
        # NumPy's own function drops masks.
        join = np.ma.concatenate if isinstance(value, np.ma.MaskedArray) else np.concatenate
        return join([share, *[last] * padding])
    padded = [*share, *list(last) * padding]
    return tuple(padded) if isinstance(value, tuple) else padded
