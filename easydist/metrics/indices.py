"""Samples by their index: their order, which are missing, and whether those that came twice are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.data import packing
from easydist.data.backing import backed
from easydist.data.leaves import check_unmasked, is_numeric
from easydist.metrics.columns import ColumnType, taken

__all__ = ["as_indices", "by_index", "check_complete", "difference", "fault"]


def as_indices(indices: Any, operation: str, total: int | None = None) -> torch.Tensor:
    """Return sample indices as int64 on the CPU. They may share the caller's memory.

    Args:
        indices: A tensor, an array or a sequence of integers.
        operation: The name for error messages.
        total: The number of samples; None: any number.

    Raises:
        ValueError: They are anything else, or out of range.
        TypeError: They are a masked array.
    """
    if isinstance(indices, np.ndarray):
        check_unmasked(indices, "indices")
    if isinstance(indices, torch.Tensor):
        indices = backed(indices, f"{operation}: indices")
    try:
        found = torch.as_tensor(indices, device="cpu")
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:  # text, integers beyond 64 bits
        raise ValueError(f"{operation}: indices has to be one integer per row: {error}") from error
    if not found.numel():
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(f"{operation}: indices has to be one integer per row, got {found.dtype} {tuple(found.shape)}")
    found = found.to(torch.int64)
    lowest, highest = (int(each) for each in found.aminmax())
    if lowest < 0 or (total is not None and highest >= total):
        wrong = found[(found < 0) | (found >= total)] if total is not None else found[found < 0]
        subject = f"index {int(wrong[0])} is" if len(wrong) == 1 else f"indices {_listed(wrong)} are"
        samples = "" if total is None else f" of {total} samples"
        raise ValueError(f"{operation}: {subject} out of range for a dataset{samples}")
    return found


_SHOWN = 20


def _listed(indices: torch.Tensor) -> str:
    """Return the first indices as text."""
    text = ", ".join(map(str, indices[:_SHOWN].tolist()))
    return f"{text}, …" if len(indices) > _SHOWN else text


def by_index(indices: torch.Tensor) -> torch.Tensor:
    """Select one row of each index, in index order.

    Args:
        indices: The indices of all ranks' rows, joined in rank order. If one occurs twice, the first row is selected.

    Example:
        >>> by_index(torch.tensor([3, 0, 3, 1]))
        tensor([1, 3, 0])
    """
    order = torch.argsort(indices, stable=True)
    found = indices[order]
    is_first = torch.ones(len(found), dtype=torch.bool, device="cpu")
    is_first[1:] = found[1:] != found[:-1]
    return order[is_first]


def fault(found: torch.Tensor, counts: torch.Tensor, total: int | None) -> str:
    """Return a text that names the missing and the repeated indices; empty if none is missing."""
    if total is None or len(found) == total:
        return ""
    is_missing = torch.ones(total, dtype=torch.bool, device="cpu")
    is_missing[found] = False
    missing, repeated = is_missing.nonzero().flatten(), found[counts > 1]
    said = f"{len(missing)} of {total} samples are missing: {_listed(missing)}"
    return said + (f"; {len(repeated)} came more than once: {_listed(repeated)}" if len(repeated) else "")


def check_complete(indices: torch.Tensor, total: int | None, operation: str) -> None:
    """Make sure that each index of ``range(total)`` came.

    Raises:
        ValueError: Some are missing.
    """
    found, counts = indices.unique(return_counts=True)
    if said := fault(found, counts, total):
        raise ValueError(f"{operation}: {said}")


def difference(indices: torch.Tensor, leaves: list[Any], types: Sequence[ColumnType], rtol: float) -> str:
    """Name an index that came with different values, if there is one."""
    order = torch.argsort(indices, stable=True)
    again = (indices[order][1:] == indices[order][:-1]).nonzero().flatten()
    first, second = order[again], order[again + 1]
    for leaf, one in zip(leaves, types, strict=True):
        is_same = _same(taken(leaf, first), taken(leaf, second), rtol)
        if not is_same.all():
            which = int(is_same.logical_not().nonzero()[0])
            values = [taken(leaf, part[which : which + 1])[0] for part in (first, second)]
            texts = [f"{value.tolist() if isinstance(value, torch.Tensor) else value!r}"[:80] for value in values]
            return (
                f"MetricCollector: index {int(indices[first[which]])} came with different values of {one.path}: "
                f"{texts[0]} and {texts[1]}"
            )
    return ""


def _same(first: Any, second: Any, rtol: float) -> torch.Tensor:
    """Return for each pair of rows whether they are equal. NaN equals NaN."""
    if isinstance(first, list) or (isinstance(first, np.ndarray) and first.dtype.hasobject):
        return torch.tensor([_same_objects(a, b) for a, b in zip(first, second, strict=True)], device="cpu")
    if isinstance(first, np.ndarray):
        equal = torch.from_numpy(_same_arrays(first, second))
    elif (first.is_floating_point() or first.is_complex()) and packing.is_copyable(first.dtype):
        equal = torch.isclose(first, second, rtol=rtol, atol=0.0, equal_nan=True)
    else:
        bits = packing.BITS[first.dtype.itemsize]
        equal = first.view(bits) == second.view(bits)
    return equal.flatten(1).all(1) if equal.ndim > 1 else equal


def _same_arrays(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return where two arrays are equal. NaN equals NaN, and NaT equals NaT."""
    equal: np.ndarray[Any, Any] = (first == second) | ((first != first) & (second != second))
    return equal


def _same_objects(first: Any, second: Any) -> bool:
    values, spec = tree.flatten(first)
    others, other = tree.flatten(second)
    is_alike = spec.paths == other.paths and spec.plain == other.plain
    return is_alike and all(_same_leaves(*pair) for pair in zip(values, others, strict=True))


def _same_leaves(first: Any, second: Any) -> bool:
    """True if two leaves of objects are equal. NaN equals NaN."""
    arrays = [leaf for leaf in (first, second) if isinstance(leaf, torch.Tensor | np.ndarray)]
    if not arrays:  # numbers, which may be too large for a tensor
        return bool(first == second or (first != first and second != second))
    if not all(isinstance(leaf, torch.Tensor) or is_numeric(leaf) for leaf in arrays):
        return np.shape(first) == np.shape(second) and bool(np.all(_same_arrays(first, second)))
    one, other = (torch.as_tensor(leaf, device="cpu") for leaf in (first, second))
    if one.dtype != other.dtype or one.shape != other.shape:
        return torch.equal(one, other)
    return bool(_same(one, other, 0.0).all())
