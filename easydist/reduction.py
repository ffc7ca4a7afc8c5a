"""The verb ``reduce``: sums, means and extremes over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from easydist.agree import Call, agree
from easydist.comms import ReduceOp
from easydist.exchange import by_comm
from easydist.leaves import Leaves, as_value
from easydist.state import communicators
from easydist.typing import Group, Tree

__all__ = ["reduce"]

_OPS = {
    "mean": ReduceOp.SUM,
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "none": None,
}


def reduce(tensor: Tree, reduction: str = "mean", scale: float = 1.0, *, group: Group = None) -> Tree:
    """Combine the ranks' trees, leaf by leaf, in rank order; every rank gets the same bits.

    Law: ``reduce(x, "sum") == (x of rank 0 + x of rank 1) + …``, likewise ``"prod"``, ``"max"``, ``"min"`` (which pass
    NaN on); ``"mean"`` is the sum over W; ``"none"`` is this rank's own ``x``. The result is multiplied by ``scale``.

    Dtypes follow ``torch.sum``: ``"sum"`` and ``"prod"`` of integers and bools are int64, so that small ones do not
    wrap (beyond 64 bits they do, as there); their ``"mean"``, and any of them times a ``scale`` other than 1, has the
    default float dtype (float64 for arrays and Python numbers); everything else keeps its dtype. Floats of 16 and 8
    bits are accumulated in float32, means of integers in float64, and rounded once.

    Example:
        >>> import torch, easydist
        >>> easydist.reduce({"loss": torch.tensor(2.0), "right": 3}, "sum")
        {'loss': tensor(2.), 'right': 3}

    Args:
        tensor: Any tree, with the same shapes on every rank. Python numbers stay Python numbers, NumPy arrays arrays.
        reduction: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"prod"`` or ``"none"``.
        scale: A factor for the result.
        group: The ranks that take part.

    Returns:
        A new tree of the same structure, detached from autograd.

    Raises:
        ValueError: There is no such reduction.
        TypeError: ``"max"`` or ``"min"`` of complex numbers.
        DisagreementError: Paths, dtypes, shapes, ``reduction`` or ``scale`` differ between ranks.
        RemoteError: Another rank's tree could not be reduced.

    Cost: one header exchange, one all-reduce per dtype in which sums are kept.

    Source: accelerate's ``reduce``.
    """
    comms = communicators(group)

    def prepare() -> Call:
        if reduction not in _OPS:
            raise ValueError(f"reduce: there is no reduction {reduction!r}; choose from {', '.join(map(repr, _OPS))}")
        leaves = Leaves(tensor)
        for path, dtype in zip(leaves.layout.paths, leaves.layout.dtypes, strict=True):
            if dtype.is_complex and reduction in ("max", "min"):
                raise TypeError(f"reduce: {path or 'the tensor'} is complex, and complex numbers have no {reduction}")
        return Call({"reduction": reduction, "scale": float(scale)}, leaves)

    call, agreement = agree(comms, "reduce", prepare)
    leaves = call.leaves
    assert leaves is not None
    results: dict[int, torch.Tensor] = {}
    for comm, indices in by_comm(comms, leaves.tensors, leaves.travelling(agreement.uniform)):
        for dtype, members in _by_dtype(leaves, indices, reduction).items():
            tensors = [leaves.tensors[i] for i in members]
            flat = torch.cat([tensor.reshape(-1).to(comm.get_device(), dtype) for tensor in tensors])
            if (op := _OPS[reduction]) is not None:
                comm.all_reduce(flat, op, async_op=False)
            results |= zip(members, _pieces(_finish(flat, reduction, scale, comms.size), tensors), strict=True)
    for i, piece in results.items():
        leaf = leaves.tensors[i]
        dtype = _result_dtype(leaf.dtype, reduction, scale, is_tensor=isinstance(leaves.values[i], torch.Tensor))
        results[i] = piece.to(leaf.device, dtype).view(leaf.shape)
    return leaves.rebuild(results, agreement.uniform, as_value)


def _pieces(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each leaf's own part: a copy, unless the leaf was alone."""
    if len(tensors) == 1:
        return [flat]
    return [piece.clone() for piece in flat.split([tensor.numel() for tensor in tensors])]


def _by_dtype(leaves: Leaves, indices: Sequence[int], reduction: str) -> dict[torch.dtype, list[int]]:
    """The leaves that are reduced together, by the dtype in which their values are accumulated."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in indices:
        groups.setdefault(_accumulated_in(leaves.tensors[i].dtype, reduction), []).append(i)
    return groups


def _accumulated_in(dtype: torch.dtype, reduction: str) -> torch.dtype:
    if reduction in ("max", "min", "none"):
        return dtype
    if dtype.is_complex or dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32) if dtype.itemsize >= 2 else torch.float32
    return torch.float64 if reduction == "mean" else torch.uint64 if dtype is torch.uint64 else torch.int64


def _finish(total: torch.Tensor, reduction: str, scale: float, size: int) -> torch.Tensor:
    """The mean and the scale, in place where the dtype allows it."""
    if reduction == "mean":
        total /= size
    if scale == 1.0:
        return total
    if total.is_complex() or (total.is_floating_point() and total.element_size() > 1):
        return total.mul_(scale)
    return total.to(torch.float64) * scale


def _result_dtype(dtype: torch.dtype, reduction: str, scale: float, is_tensor: bool) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if reduction == "mean" or scale != 1.0:
        return torch.get_default_dtype() if is_tensor else torch.float64
    if reduction in ("sum", "prod"):
        return torch.uint64 if dtype is torch.uint64 else torch.int64
    return dtype
