"""The verbs that pad the ranks' tensors to the same size, and take the padding off again."""

from __future__ import annotations

import enum
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.base.arguments import dimension, number
from easydist.base.eager import eager
from easydist.data.backing import backed
from easydist.data.leaves import Leaves, as_array
from easydist.data.structure import TensorInformation
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group, T, Timeout, Tree
from easydist.verbs.buckets import resized, sizes_along
from easydist.verbs.trees import TreeVerb, leaves_of

__all__ = ["CannotPadNestedTensorWarning", "pad_across_processes", "unpad"]


class CannotPadNestedTensorWarning(UserWarning):
    """A warning that a nested tensor was not padded, because it has no single size to pad to."""


@eager
def pad_across_processes(
    tensor: T,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> T:
    """Lengthen every leaf along ``dim`` to the longest rank's size.

    Law: along ``dim`` leaf p has the size ``max(size of leaf p on rank r for all r)``; the old values come first (last
    with ``pad_first``), and the rest is ``pad_index``. The dtype does not change, nor do sizes along other dimensions,
    which may differ between ranks. ``gather`` needs this only if dimensions other than its own ``dim`` differ.

    Example:
        >>> import torch, easydist
        >>> easydist.pad_across_processes(torch.arange(3))
        tensor([0, 1, 2])

    On two ranks::

        easydist.pad_across_processes(torch.ones(1 + rank))  # rank 0: tensor([1., 0.])   rank 1: tensor([1., 1.])

    Args:
        tensor: Any tree.
        dim: The dimension to pad, counted from the end if negative.
        pad_index: The padding: a number, or a tensor of one element.
        pad_first: True to pad before the old values.
        group: The ranks that take part.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        A tree of the same structure, through which gradients flow. Leaves that already have the longest size are
        returned unchanged, and so are leaves without a dimension ``dim``, such as numbers.

    Raises:
        ValueError: A leaf's dtype cannot hold ``pad_index``, or ``pad_index`` is more than one number.
        DisagreementError: Paths, dtypes or numbers of dimensions differ between ranks.
        RemoteError: Another rank's tree could not be padded.

    Cost: one header exchange, which carries the sizes of up to some thousand leaves; if there are more and sizes
    differ, one more exchange, of 8 bytes per leaf.

    Source: accelerate's ``pad_across_processes``.
    """
    verb = _PadAcrossProcesses(tensor, dim, pad_index, pad_first)
    padded: T = run(verb, communicators(group), timeout, check)
    return padded


@eager
def pad_where_needed(tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
    """Pad as ``pad_across_processes`` does, but let a dtype that cannot hold ``pad_index`` pass if no rank has to pad.

    Scripts written for accelerate rely on this: transformers' ``Trainer`` pads masks of bools with -100, too.
    """
    padded: T = run(_PadAcrossProcesses(tensor, dim, pad_index, pad_first, checks_all=False), communicators(None))
    return padded


class _PadAcrossProcesses(TreeVerb):
    operation = "pad_across_processes"

    def __init__(self, tensor: Tree, dim: int, pad_index: float, pad_first: bool, checks_all: bool = True) -> None:
        self._tensor, self._dim, self._pad_index, self._pad_first = tensor, dim, pad_index, pad_first
        self._checks_all = checks_all
        self._reveal: Callable[[Tree], Tree] = _identity

    def prepare(self, comms: Communicators) -> Call:
        self._dim = dimension(self._dim)
        leaves, self._reveal = _leaves_of(self._tensor, self._dim)
        asked = _number(self._pad_index)
        shown = int(asked) if float(asked).is_integer() else asked
        self._filling = shown or float(asked)  # for a zero, the float, which may be -0.0
        if self._checks_all:
            _check_filling(leaves, range(len(leaves.values)), self._filling, self._pad_index)
        arguments = {"dim": self._dim, "pad_index": shown, "pad_first": bool(self._pad_first)}
        return Call(arguments, leaves, self._dim, any_size=True)

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        if not (agreed.call.tree.values or tree.flatten(self._tensor)[0]):  # unpadded leaves count as data, too
            super().validate(comms, agreed)

    def exchange(self, comms: Communicators, agreed: Agreement) -> list[list[int]] | None:
        if agreed.uniform:
            return None
        leaves = agreed.call.tree
        return sizes_along(comms, leaves.tensors, leaves.layout.free(self._dim)[0], agreed)

    def result(self, comms: Communicators, agreed: Agreement, arrived: list[list[int]] | None) -> Tree:
        if arrived is None:
            return self._tensor
        leaves = agreed.call.tree
        columns = [*zip(*arrived, strict=True)]
        longest = [max(column) for column in columns]
        if not self._checks_all:  # all ranks know all sizes, so all of them raise
            uneven = (i for i, column in enumerate(columns) if min(column) < max(column))
            _check_filling(leaves, uneven, self._filling, self._pad_index)
        targets = zip(leaves.values, leaves.tensors, leaves.layout.free(self._dim)[0], longest, strict=True)
        padded = [_padded(*target, self._filling, self._pad_first) for target in targets]
        return self._reveal(leaves.rebuild(padded, False, _converted))


def _converted(new: Any, value: Any) -> Any:
    return new if new is value else as_array(new, value)


def _identity(data: Tree) -> Tree:
    return data


def _number(pad_index: Any) -> int | float:
    """Return a number, taken out of a tensor or an array of one element if necessary."""
    if math.prod(shape := getattr(pad_index, "shape", ())) != 1:
        raise ValueError(f"pad_across_processes: pad_index has to be one number, got {tuple(shape)}")
    value = backed(pad_index, "pad_index") if isinstance(pad_index, torch.Tensor) else pad_index
    return number("pad_across_processes: pad_index", value)


def _leaves_of(data: Tree, dim: int) -> tuple[Leaves, Callable[[Tree], Tree]]:
    """Return the leaves that have the dimension, and a function that puts the others back."""
    try:
        leaves = leaves_of(data, "pad_across_processes")
    except TypeError:  # that may be about a leaf that is not padded
        return _padded_leaves_of(data, dim)
    return (leaves, _identity) if leaves.layout.has(dim) else _padded_leaves_of(data, dim)


def _padded_leaves_of(data: Tree, dim: int) -> tuple[Leaves, Callable[[Tree], Tree]]:
    values, spec = tree.flatten(data)
    if any(map(_is_nested, values)):
        text = "nested tensors have no common size to pad to, so they are not changed"
        warnings.warn(text, CannotPadNestedTensorWarning, stacklevel=8)
    padded = [i for i, value in enumerate(values) if not _stays(value, dim)]
    others = [(path, _Unpadded.LEAF) for path, value in zip(spec.paths, values, strict=True) if _stays(value, dim)]
    flat = tree.listed([spec.paths[i] for i in padded], [*spec.plain, *others])

    def reveal(results: Tree) -> Tree:
        new = dict(zip(padded, results, strict=True))
        return spec.rebuild([new.get(i, value) for i, value in enumerate(values)])

    return leaves_of([values[i] for i in padded], "pad_across_processes", spec=flat), reveal


def _stays(value: Any, dim: int) -> bool:
    """True if a leaf is not padded: it has no single size along the dimension, or no such dimension."""
    ndim = value.ndim if isinstance(value, torch.Tensor | np.ndarray) else 0
    return _is_nested(value) or not -ndim <= dim < ndim


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


class _Unpadded(enum.Enum):
    """The description of a leaf that is not padded; equal on all ranks."""

    LEAF = enum.auto()


def _check_filling(leaves: Leaves, which: Iterable[int], filling: float, asked: Any) -> None:
    """Check that these leaves can hold the number: floats may round it, other dtypes have to hold it exactly."""
    for i in which:
        path, dtype = leaves.layout.paths[i], leaves.layout.dtypes[i]
        if not _holds(dtype, filling, math.copysign(1.0, filling)):
            raise ValueError(
                f"pad_across_processes: {path or 'the tensor'} is {dtype}, which cannot hold pad_index={asked!r}"
            )


@functools.lru_cache(maxsize=256, typed=True)
def _holds(dtype: torch.dtype, number: float, sign: float) -> bool:
    """True if the dtype can hold the number; ``sign`` separates 0.0 from -0.0, which the cache treats as equal."""
    try:
        filling = torch.full((2,), number, dtype=dtype, device="cpu")[0]  # torch fills single elements by other rules
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return math.isinf(number) or not bool(filling.to(torch.complex128).abs().isinf())
    return bool(filling.item() == number)


def _padded(value: Any, tensor: torch.Tensor, dim: int, size: int, filling: float, pad_first: bool) -> Any:
    """Return the padded tensor; the value itself if it is long enough."""
    old = tensor.shape[dim]
    if old == size:
        return value
    # The tensor of the tree itself, which has its class and is not detached, so that gradients flow back to it.
    source = value if isinstance(value, torch.Tensor) else tensor
    result = source.new_full(resized(tensor.shape, dim, size), filling)
    result.narrow(dim, size - old if pad_first else 0, old).copy_(source)
    return result


def unpad(tensor: T, like: Tree, dim: int = 0, pad_first: bool = False) -> T:
    """Remove the padding that ``pad_across_processes`` has added.

    Law: ``unpad(pad_across_processes(x, dim, pad_first=f), x, dim, pad_first=f) == x``.

    Example:
        >>> import torch, easydist
        >>> easydist.unpad(torch.tensor([1, 2, 0, 0]), like=2)
        tensor([1, 2])

    Args:
        tensor: A padded tree, or the output of a model for one.
        like: The sizes before padding: the tree before it was padded, or a tree of ``TensorInformation``
            (``get_data_structure``), or one size for all leaves.
        dim: The dimension that was padded.
        pad_first: True if the padding comes first.

    Returns:
        A tree of views. Leaves that have no dimension ``dim``, in ``like`` either, are returned unchanged.

    Raises:
        ValueError: ``like`` has other leaves; or a leaf is shorter than its size in ``like``, or only one of them has a
            dimension ``dim``.
        TypeError: ``dim`` is not an integer.

    Cost: no exchange.
    """
    dim = dimension(dim)
    values, spec = tree.flatten(tensor, lambda value: isinstance(value, torch.Tensor | np.ndarray))
    sizes = [int(like)] * len(values) if isinstance(like, int | np.integer) else _sizes(like, dim, spec.paths)
    cut: T = spec.rebuild(
        [_cut(value, path, dim, size, pad_first) for value, path, size in zip(values, spec.paths, sizes, strict=True)]
    )
    return cut


def _sizes(like: Tree, dim: int, paths: list[str]) -> list[int | None]:
    values, spec = tree.flatten(like, lambda value: isinstance(value, TensorInformation | torch.Tensor | np.ndarray))
    by_path = dict(zip(spec.paths, values, strict=True))
    if differing := by_path.keys() ^ set(paths):
        raise ValueError(f"unpad: the trees differ in {', '.join(sorted(path or 'the root' for path in differing))}")
    shapes = [by_path[path].shape for path in paths]
    return [shape[dim] if -len(shape) <= dim < len(shape) else None for shape in shapes]


def _cut(value: Any, path: str, dim: int, size: int | None, pad_first: bool) -> Any:
    if size is None and _stays(value, dim):
        return value
    if size is None:
        raise ValueError(f"unpad: {path or 'the tensor'} of like has no dim {dim}")
    if not -value.ndim <= dim < value.ndim or not 0 <= size <= value.shape[dim]:
        raise ValueError(
            f"unpad: {path or 'the tensor'} of shape {tuple(value.shape)} has no {size} elements along dim {dim}"
        )
    start = value.shape[dim] - size if pad_first else 0
    index = [slice(None)] * value.ndim
    index[dim] = slice(start, start + size)
    return value[tuple(index)]
