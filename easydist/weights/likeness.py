"""Which lists of tensors are alike, so that what follows from one holds for the next one: weights after each step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

V = TypeVar("V")

LONGEST = 1 << 22
"""Bytes of a header up to which it is kept, and what follows from it."""

_KINDS = frozenset([torch.Tensor, torch.nn.Parameter])
_layout_of = attrgetter("dtype", "shape", "device", "layout", "requires_grad")
_FLAGS = torch.Tensor.is_conj, torch.Tensor.is_neg, torch.Tensor.is_inference


def are_plain(values: Iterable[Any]) -> bool:
    """True if these are tensors and parameters of no other class."""
    return _KINDS.issuperset(map(type, values))


def likeness(values: Sequence[Any]) -> Hashable | None:
    """What is equal for lists of tensors that differ in nothing but their values and addresses.

    Tensors that begin at one address are told from those that do not, so tied weights are like other tied weights.

    Args:
        values: Tensors, and whatever else.

    Returns:
        None if any of them is no plain tensor.

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
        places: list[int] = list(map(torch.Tensor.data_ptr, values))
    except RuntimeError:  # of a sparse tensor
        return None
    if any(any(map(flag, values)) for flag in _FLAGS):
        return None
    if 0 in places:  # without elements, so without memory
        places = [place or -id(value) for place, value in zip(places, values, strict=True)]
    first: dict[int, int] = {}
    ties = () if len(set(places)) == len(places) else tuple([first.setdefault(at, i) for i, at in enumerate(places)])
    return tuple(map(_layout_of, values)), strides, ties


class Recent(Generic[V]):
    """The results that were found last, by what they follow from.

    Args:
        most: How many are kept.

    Example:
        >>> recent = Recent(2)
        >>> for key in "abc":
        ...     recent.keep(key, key.upper())
        >>> recent.get("a"), recent.get("c"), recent.get(None)
        (None, 'C', None)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """What is known; None if nothing is."""
        return self._found.get(key)

    def keep(self, key: Hashable, value: V) -> None:
        """Know it from now on; the oldest goes."""
        self._found[key] = value
        if len(self._found) > self._most:
            self._found.popitem(last=False)
