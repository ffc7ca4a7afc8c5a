"""Detection of equal layouts, so that preparations for one list of tensors serve the next: weights after each step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from easydist.data.backing import addresses

LONGEST = 1 << 22
"""The longest header, in bytes, whose decoded form and further results are kept."""

_KINDS = frozenset([torch.Tensor, torch.nn.Parameter])
_layout_of = attrgetter("dtype", "shape", "device", "requires_grad")
_FLAGS = torch.Tensor.is_neg, torch.Tensor.is_inference


def are_plain(values: Iterable[Any]) -> bool:
    """True if these are tensors and parameters of no other class."""
    return _KINDS.issuperset(map(type, values))


def likeness(values: Sequence[Any]) -> Hashable | None:
    """Return a key that is equal for lists of tensors that differ only in values and addresses.

    Tensors with the same address are distinguished from others, so tied weights match only weights tied in the same
    way.

    Args:
        values: Tensors and any other values.

    Returns:
        The key; None if any value is not a plain tensor with memory.

    Cost: about 1 µs for each tensor.

    Example:
        >>> x, y = torch.ones(2), torch.zeros(2)
        >>> likeness([x, y]) == likeness([y, x]), likeness([x, y]) == likeness([x, x]), likeness([x, 5])
        (True, False, None)
    """
    if not are_plain(values):
        return None
    try:
        strides = tuple(map(torch.Tensor.stride, values))
        places = addresses(values)
    except RuntimeError:  # a sparse tensor has no strides
        return None
    if places is None or any(any(map(flag, values)) for flag in _FLAGS):
        return None
    layouts = tuple(map(_layout_of, values))
    if any(layout[0].is_complex for layout in layouts) and any(map(torch.Tensor.is_conj, values)):
        return None
    if 0 in places:  # without elements there is no memory
        places = [place or -id(value) for place, value in zip(places, values, strict=True)]
    first: dict[int, int] = {}
    ties = () if len(set(places)) == len(places) else tuple([first.setdefault(at, i) for i, at in enumerate(places)])
    return layouts, strides, ties
