"""The verb ``reduce``: sums, means and extremes over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from easydist import memory, wire
from easydist.agree import Agreement, Call, agree, trust
from easydist.calling import calling
from easydist.comms import Communicators, ReduceOp, TorchComm, TorchWork, combine
from easydist.eager import eager
from easydist.exchange import by_comm, large_alone, small_payload
from easydist.leaves import Leaves, as_value
from easydist.state import communicators
from easydist.typing import Group, Timeout, Tree

__all__ = ["reduce"]

_OPS = {
    "mean": ReduceOp.SUM,
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "none": None,
}


@eager
def reduce(
    tensor: Tree,
    reduction: str = "mean",
    scale: float = 1.0,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Combine the ranks' trees, leaf by leaf, in rank order; every rank gets the same bits in every run.

    Law: ``reduce(x, "sum") == (x of rank 0 + x of rank 1) + …`` (ranks that share memory first, then host by host; NCCL
    has an order of its own), likewise ``"prod"``, ``"max"``, ``"min"`` (which pass
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
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        A new tree of the same structure, detached from autograd.

    Raises:
        ValueError: There is no such reduction.
        TypeError: ``"max"`` or ``"min"`` of complex numbers.
        DisagreementError: Paths, dtypes, shapes, ``reduction`` or ``scale`` differ between ranks.
        RemoteError: Another rank's tree could not be reduced.

    Cost: one header exchange, which carries a small tree (32 KiB in small groups); for a larger one an all-reduce per
    dtype in which sums are kept, and in shared memory one for each leaf of 256 KiB or more.

    Source: accelerate's ``reduce``.
    """
    with calling(communicators(group), "reduce", timeout) as comms:

        def prepare() -> Call:
            if reduction not in _OPS:
                known = ", ".join(map(repr, _OPS))
                raise ValueError(f"reduce: there is no reduction {reduction!r}; choose from {known}")
            leaves = Leaves(tensor)
            _check_ordered(leaves, reduction)
            call = Call({"reduction": reduction, "scale": float(scale)}, leaves, nbytes=leaves.layout.packing.nbytes)
            if small_payload(comms, leaves):
                call.payload = [_flat(leaves, *run) for run in _by_dtype(leaves, leaves.travelling(True), reduction)]
                call.nbytes = sum(map(wire.nbytes, call.payload))
            return call

        call, agreement = trust(comms, prepare, check) or agree(comms, "reduce", prepare, check)
        leaves = call.leaves
        assert leaves is not None
        results: dict[int, torch.Tensor] = {}
        for members, flat in _totals(comms, leaves, call, agreement, reduction):
            results |= _results(leaves, members, _finish(flat, reduction, scale, comms.size), reduction, scale)
        comms.watch.is_awaited = False
        return leaves.rebuild(results, agreement.uniform, as_value)


def _check_ordered(leaves: Leaves, reduction: str) -> None:
    if reduction in ("max", "min"):
        for path, dtype in zip(leaves.layout.paths, leaves.layout.dtypes, strict=True):
            if dtype.is_complex:
                raise TypeError(f"reduce: {path or 'the tensor'} is complex, and complex numbers have no {reduction}")


_Run = tuple[torch.dtype, Sequence[int]]
"""Leaves that are reduced together, and the dtype in which their values are accumulated."""


def _totals(
    comms: Communicators, leaves: Leaves, call: Call, agreement: Agreement, reduction: str
) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Leaves, and what they come to over all ranks."""
    op, travelling = _OPS[reduction], leaves.travelling(agreement.uniform)
    if agreement.has_payload and op is not None and call.payload:
        dtypes, shapes = [flat.dtype for flat in call.payload], [flat.shape for flat in call.payload]
        columns = zip(*[wire.unpack(agreement.payload(r), dtypes, shapes) for r in range(comms.size)], strict=True)
        for (_, members), parts in zip(_by_dtype(leaves, travelling, reduction), columns, strict=True):
            yield members, combine(op, parts)
        return
    nbytes = [wire.nbytes(tensor) for tensor in leaves.tensors]
    begun = []
    for comm, indices in by_comm(comms, leaves.tensors, travelling, leaves.layout.packing.nbytes):
        for dtype, members in _by_dtype(leaves, indices, reduction):
            for bucket in large_alone(members, nbytes) if comm.backend.shares_memory else [members]:
                begun.append((bucket, *_begin(comm, leaves, dtype, bucket, op)))
    for bucket, flat, work in begun:
        work.wait()
        yield bucket, flat


def _begin(
    comm: TorchComm, leaves: Leaves, dtype: torch.dtype, members: Sequence[int], op: ReduceOp | None
) -> tuple[torch.Tensor, TorchWork]:
    """Begin to reduce; gives the total, to be used once the work has ended."""
    data = leaves.tensors[members[0]]
    if op is not None and len(members) == 1 and data.dtype is dtype and data.is_cpu and data.is_contiguous():
        total = memory.empty([data.numel()], dtype)
        return total, comm.all_reduce_from(total, data, op, async_op=True)
    total = _flat(leaves, dtype, members).to(comm.get_device())
    return total, TorchWork() if op is None else comm.all_reduce(total, op, async_op=True)


def _flat(leaves: Leaves, dtype: torch.dtype, members: Sequence[int]) -> torch.Tensor:
    """Leaves one after another, in a new tensor."""
    tensors = [leaves.tensors[i] for i in members]
    if any(tensor.dtype is not dtype for tensor in tensors):
        tensors = [tensor.to(dtype) for tensor in tensors]
    flat = memory.empty([sum(map(torch.Tensor.numel, tensors))], dtype, tensors[0].device)
    wire.pack(tensors, out=wire.as_bytes(flat))
    return flat


def _results(
    leaves: Leaves, members: Sequence[int], total: torch.Tensor, reduction: str, scale: float
) -> dict[int, torch.Tensor]:
    """Each leaf's part of the total, in its own dtype and on its own device."""
    kinds = [
        (leaf.device, _result_dtype(leaf.dtype, reduction, scale, isinstance(leaves.values[i], torch.Tensor)))
        for i, leaf in ((i, leaves.tensors[i]) for i in members)
    ]
    shapes = [leaves.layout.shapes[i] for i in members]
    found: dict[int, torch.Tensor] = {}
    for kind in set(kinds):
        pieces = wire.separate(total.to(*kind), shapes)
        found |= {i: piece for i, piece, own in zip(members, pieces, kinds, strict=True) if own == kind}
    return found


def _by_dtype(leaves: Leaves, indices: Sequence[int], reduction: str) -> list[_Run]:
    """The leaves that are reduced together; large items first, as in a packed buffer."""
    dtypes = leaves.layout.dtypes
    accumulated = {dtype: _accumulated_in(dtype, reduction) for dtype in set(dtypes)}
    groups: dict[torch.dtype, list[int]] = {}
    for i in indices:
        groups.setdefault(accumulated[dtypes[i]], []).append(i)
    return sorted(groups.items(), key=lambda run: wire.sort_key(run[0]))


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
