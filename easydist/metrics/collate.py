"""Batches of any number of rows, including none."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from easydist import tree
from easydist.base.wording import a_or_an

__all__ = ["Collate"]


class Collate:
    """A ``collate_fn`` that also makes batches without rows, which have the structure of a batch and no data.

    Law: ``Collate(f, dataset)(samples) == f(samples)`` if there are samples. Without samples it returns ``f([sample])``
    minus one sample, which it learns by comparing ``f([sample])`` with ``f([sample, sample])``: tensors and arrays keep
    dtype and all dimensions but that of the samples, keys stay, lists of one item per sample are empty, numbers that
    count rows or tokens are 0, and values that do not depend on the samples stay.

    Args:
        collate_fn: A function that makes a batch of a list of samples; None means torch's ``default_collate``.
        dataset: The dataset. Its first sample is read if a batch has no rows.

    Raises:
        TypeError: A batch without rows is needed, and the batch holds an object whose rows cannot be determined.

    Example:
        >>> dataset = [{"x": torch.zeros(3), "id": "a"}]
        >>> Collate(None, dataset)([])
        {'x': tensor([], size=(0, 3)), 'id': []}
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, dataset: Dataset[Any] | Sequence[Any]) -> None:
        self.collate_fn, self.dataset = collate_fn or default_collate, dataset

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch."""
        return self.collate_fn(samples) if samples else self.without_rows(self.dataset[0])

    def without_rows(self, sample: Any) -> Any:
        """Make a batch of no rows, given one sample.

        Args:
            sample: Any sample of the dataset.
        """
        return _less(self.collate_fn([sample]), self.collate_fn([sample, sample]), "")


def _less(one: Any, two: Any, path: str) -> Any:
    """Remove one row from a batch of one row."""
    leaves, spec = tree.flatten(one, _is_end)
    others, _ = tree.flatten(two, _is_end)
    ends = zip(leaves, others, spec.paths, strict=True)
    return spec.rebuild([_end(leaf, other, path + step) for leaf, other, step in ends])


def _is_end(value: object) -> bool:
    """True if ``_end`` handles the value. Lists may hold one item per row."""
    is_list = isinstance(value, list | tuple) and not tree.is_namedtuple(value)
    return is_list or not tree.is_container(value)


def _end(one: Any, two: Any, path: str) -> Any:
    if isinstance(one, list | tuple):
        return _items(one, two, path)
    if isinstance(one, torch.Tensor | np.ndarray) and one.ndim:
        lengths = zip(one.shape, two.shape, strict=True)  # pad_sequence has the rows in dim 1, unless told otherwise
        return one[tuple([slice(max(2 * a - b, 0)) for a, b in lengths])]
    if tree.is_leaf(one):
        return 2 * one - two if not _is_bool(one) else one
    if one is two or isinstance(one, str | bytes | enum.Enum):
        return one
    raise TypeError(
        f"cannot make a batch without rows: {path or 'the batch'} is {a_or_an(type(one).__name__)}, and its rows are "
        "not known; make collate_fn return tensors, arrays, numbers, lists, dicts or dataclasses"
    )


def _items(one: Sequence[Any], two: Sequence[Any], path: str) -> Any:
    """Shorten a list with one item per row, or descend into one with an item per field."""
    if len(one) != len(two):
        return one[: max(2 * len(one) - len(two), 0)]
    pairs = enumerate(zip(one, two, strict=True))
    return type(one)(_less(*pair, f"{path}[{i}]") for i, pair in pairs)  # type: ignore[call-arg]


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) in (torch.bool, np.dtype(bool))
