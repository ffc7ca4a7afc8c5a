"""Ranks' tensors made equally long, and short again."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from operator import index
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.agree import Call, agree
from easydist.calling import calling
from easydist.eager import eager
from easydist.exchange import dims_of, resized, sizes_along
from easydist.leaves import Leaves, as_array
from easydist.state import communicators
from easydist.structure import TensorInformation
from easydist.typing import Group, Timeout, Tree

__all__ = ["CannotPadNestedTensorWarning", "pad_across_processes", "unpad"]


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left as it is, because it has no one size to pad to."""


@eager
def pad_across_processes(
    tensor: Tree,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Lengthen every leaf along ``dim`` to the longest rank's size.

    Law: along ``dim`` leaf p has the size ``max(size of leaf p on rank r for all r)``; the old values stand first (last
    with ``pad_first``), the rest is ``pad_index``. The dtype stays. ``gather`` needs this only where dimensions other
    than its own differ.

    Example:
        >>> import torch, easydist
        >>> easydist.pad_across_processes(torch.arange(3))
        tensor([0, 1, 2])

    Args:
        tensor: Any tree.
        dim: Along which dimension; counted from the end where negative.
        pad_index: What to fill with.
        pad_first: Fill before the old values.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        A tree of the same structure; leaves that are the longest already come back as they are.

    Raises:
        ValueError: A leaf has no dimension ``dim``, or its dtype cannot hold ``pad_index``.
        DisagreementError: Paths, dtypes or shapes apart from ``dim`` differ between ranks.
        RemoteError: Another rank's tree could not be padded.

    Cost: one header exchange, which carries the sizes of up to some thousand leaves; for more of them an exchange of 8
    bytes per leaf, where sizes differ.

    Source: accelerate's ``pad_across_processes``.
    """
    with calling(communicators(group), "pad_across_processes", timeout) as comms:
        reveal: Callable[[Tree], Tree] = _identity
        filling = 0.0

        def prepare() -> Call:
            nonlocal reveal, filling
            leaves, reveal = _leaves_of(tensor)
            dims_of(leaves, dim, "pad_across_processes")
            number = int(pad_index) if float(pad_index).is_integer() else float(pad_index)
            filling = number or float(pad_index)  # which may be -0.0
            _check_filling(leaves, filling, pad_index)
            arguments = {"dim": index(dim), "pad_index": number, "pad_first": bool(pad_first)}
            return Call(arguments, leaves, dim, advice=f"Only dim {dim} may differ between ranks.")

        call, agreement = agree(comms, "pad_across_processes", prepare, check)
        leaves = call.leaves
        assert leaves is not None
        if agreement.uniform:
            return tensor
        dims = leaves.layout.free(dim)[0]
        sizes = agreement.sizes() or sizes_along(comms, leaves.tensors, dims)
        longest = [max(column) for column in zip(*sizes, strict=True)]
        targets = zip(leaves.values, leaves.tensors, dims, longest, strict=True)
        padded = [_padded(*target, filling, pad_first) for target in targets]
        return reveal(leaves.rebuild(padded, False, lambda new, value: new if new is value else as_array(new, value)))


def _identity(data: Tree) -> Tree:
    return data


def _leaves_of(data: Tree) -> tuple[Leaves, Callable[[Tree], Tree]]:
    """The leaves but for nested tensors, and what puts those back."""
    try:
        return Leaves(data), _identity
    except TypeError:
        if not any(_is_nested(value) for value in tree.leaves(data)):
            raise
    warnings.warn(
        "nested tensors have no one size to pad to; they stay as they are", CannotPadNestedTensorWarning, stacklevel=4
    )
    hidden = tree.map(_Hidden, data, _is_nested)
    return Leaves(hidden), lambda result: tree.map(lambda box: box.tensor, result, lambda x: isinstance(x, _Hidden))


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


class _Hidden:
    """Keeps a nested tensor out of sight."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _check_filling(leaves: Leaves, filling: float, asked: float) -> None:
    """Make sure that every leaf can hold the number: a float may round it, nothing else may change it."""
    for path, dtype in zip(leaves.layout.paths, leaves.layout.dtypes, strict=True):
        if not _holds(dtype, filling, math.copysign(1.0, filling)):
            raise ValueError(
                f"pad_across_processes: {path or 'the tensor'} is {dtype}, which cannot hold pad_index={asked!r}"
            )


@functools.lru_cache(maxsize=256, typed=True)
def _holds(dtype: torch.dtype, number: float, sign: float) -> bool:
    """Whether the dtype can hold the number; ``sign`` tells the zeros apart, which are one to the cache."""
    try:
        filling = torch.full((2,), number, dtype=dtype, device="cpu")[0]  # one number alone is filled by other rules
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return math.isinf(number) or not bool(filling.to(torch.complex128).abs().isinf())
    return bool(filling.item() == number)


def _padded(value: Any, tensor: torch.Tensor, dim: int, size: int, filling: float, pad_first: bool) -> Any:
    """The longer tensor; the value itself where it is long enough."""
    old = tensor.shape[dim]
    if old == size:
        return value
    result = tensor.new_full(resized(tensor.shape, dim, size), filling)
    result.narrow(dim, size - old if pad_first else 0, old).copy_(tensor)
    return result


def unpad(tensor: Tree, like: Tree, dim: int = 0, pad_first: bool = False) -> Tree:
    """Take the padding off again.

    Law: ``unpad(pad_across_processes(x, dim, pad_first=f), x, dim, pad_first=f) == x``.

    Example:
        >>> import torch, easydist
        >>> easydist.unpad(torch.tensor([1, 2, 0, 0]), like=2)
        tensor([1, 2])

    Args:
        tensor: A padded tree, or what a model made of one.
        like: How long it was: the tree before it was padded, or one of ``TensorInformation`` (``get_data_structure``),
            or one size for all leaves.
        dim: The dimension that was padded.
        pad_first: Whether the padding stands first.

    Returns:
        A tree of views.

    Raises:
        ValueError: ``like`` has other leaves, or a leaf is shorter than it should become, or has no dimension ``dim``.

    Cost: no exchange.
    """
    values, spec = tree.flatten(tensor, lambda value: isinstance(value, torch.Tensor | np.ndarray))
    sizes = [like] * len(values) if isinstance(like, int) else _sizes(like, dim, spec.paths)
    return spec.rebuild(
        [_cut(value, path, dim, size, pad_first) for value, path, size in zip(values, spec.paths, sizes, strict=True)]
    )


def _sizes(like: Tree, dim: int, paths: list[str]) -> list[int]:
    values, spec = tree.flatten(like, lambda value: isinstance(value, TensorInformation | torch.Tensor | np.ndarray))
    by_path = dict(zip(spec.paths, values, strict=True))
    if differing := by_path.keys() ^ set(paths):
        raise ValueError(f"unpad: the trees differ in {', '.join(sorted(path or 'the root' for path in differing))}")
    short = [path for path in paths if not -len(by_path[path].shape) <= dim < len(by_path[path].shape)]
    if short:
        raise ValueError(f"unpad: {short[0] or 'the tensor'} of like has no dim {dim}")
    return [by_path[path].shape[dim] for path in paths]


def _cut(value: Any, path: str, dim: int, size: int, pad_first: bool) -> Any:
    if not -value.ndim <= dim < value.ndim or not 0 <= size <= value.shape[dim]:
        raise ValueError(
            f"unpad: {path or 'the tensor'} of shape {tuple(value.shape)} has no {size} elements along dim {dim}"
        )
    start = value.shape[dim] - size if pad_first else 0
    index = [slice(None)] * value.ndim
    index[dim] = slice(start, start + size)
    return value[tuple(index)]
