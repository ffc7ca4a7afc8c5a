"""The groups of ranks that a layout makes, computed without communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Lists = list[list[int]]


def rank_lists(
    size: int, axes: Mapping[str, int], joined: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Lists]:
    """Return the groups along each axis of a layout.

    Law: the ranks form a box in row-major order, the last axis fastest. The ranks of a group along an axis differ only
    in their position on it.

    Example:
        >>> rank_lists(4, {"pp": 2, "tp": 2})
        {'pp': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}

    Args:
        size: The number of ranks.
        axes: The length of each axis.
        joined: Groups along several axes at once, by name.

    Raises:
        ValueError: The product of the lengths is not ``size``, or a length is less than 1.
    """
    if math.prod(axes.values()) != size or min(axes.values()) < 1:
        told = " × ".join(f"{name}={length}" for name, length in axes.items())
        raise ValueError(f"a layout of {told} needs {math.prod(axes.values())} ranks, but the world has {size}")
    box, names = torch.arange(size, device="cpu").view(*axes.values()), list(axes)
    along = {**{name: [name] for name in names}, **(joined or {})}
    return {name: _along(box, [names.index(axis) for axis in own]) for name, own in along.items()}


def _along(box: torch.Tensor, dims: Sequence[int]) -> Lists:
    others = [dim for dim in range(box.ndim) if dim not in dims]
    length = math.prod(box.shape[dim] for dim in dims)
    lists: Lists = box.permute(*others, *dims).reshape(-1, length).tolist()
    return lists
