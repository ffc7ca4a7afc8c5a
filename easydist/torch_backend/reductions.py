"""The reductions of ``torch.distributed`` as easydist's, and the sum of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from easydist.errors import DisagreementError
from easydist.torch_backend.rendezvous import NAME
from easydist.torch_backend.work import GroupWork, TensorList
from easydist.transport.reduce_op import ReduceOp, check_reducible

_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


def reduction(operation: str, opts: Any, tensors: Any) -> ReduceOp:
    """Return the reduction that torch's options ask for, after checking it before any byte moves.

    Args:
        operation: The name of the operation.
        opts: torch's options; None means a sum.
        tensors: The tensors to reduce.

    Raises:
        ValueError: It is not supported, or not for the dtype.
    """
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
    op = premultiplied(opts) or _OPS.get(asked)
    if op is None:
        known = ", ".join([*(known.name for known in _OPS), "PREMUL_SUM"])
        raise ValueError(f"{operation}: {NAME} reduces with {known}, got {getattr(asked, 'name', asked)}; use gloo")
    for dtype in {tensor.dtype for tensor in tensors}:
        check_reducible(dtype, op.unscaled)
    return op


def premultiplied(opts: Any) -> ReduceOp | None:
    """Return ``PREMUL_SUM`` with its factor if torch's options ask for it; FSDP2 does so for its divide factor."""
    if opts is None or opts.reduceOp.op != dist.ReduceOp.PREMUL_SUM:
        return None
    _, factor = opts.reduceOp.__getstate__()  # torch has no other way to read it
    return ReduceOp.PREMUL_SUM(factor)


def add_up(
    tensor: torch.Tensor,
    op: ReduceOp,
    size: int,
    all_gather_single: Callable[[torch.Tensor, torch.Tensor], GroupWork],
    allgather: Callable[[Sequence[TensorList], TensorList], GroupWork],
) -> tuple[list[GroupWork], Callable[[], None]]:
    """Begin the sum of sparse tensors: all ranks gather all indices and values, and add up those of one place.

    Args:
        tensor: A COO tensor, of one shape on all ranks, to which the sum is written.
        op: The reduction.
        size: The number of ranks.
        all_gather_single: The group's method.
        allgather: The group's method.

    Returns:
        The works to wait for, and the function that writes the sum afterwards.

    Raises:
        ValueError: The reduction is no sum, or the tensor no COO tensor.
        DisagreementError: The shapes differ. All ranks raise, and the group goes on.
    """
    if op is not ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce: {NAME} adds up sparse tensors alone, got {op} and {tensor.layout}")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    own = torch.tensor([*mine.shape, mine.sparse_dim(), len(values)], device="cpu")
    all_gather_single(sizes := own.new_empty(size, len(own)), own).wait()
    if (sizes[:, :-1] != sizes[0, :-1]).any():
        raise DisagreementError(f"all_reduce: the ranks' sparse tensors have shapes {sizes[:, :-2].tolist()}")
    every = [
        [part.new_empty(*part.shape[:dim], count, *part.shape[dim + 1 :]) for count in sizes[:, -1].tolist()]
        for part, dim in ((indices, 1), (values, 0))
    ]

    def write() -> None:
        parts = torch.cat(every[0], 1), torch.cat(every[1])
        total = torch.sparse_coo_tensor(*parts, tensor.shape, check_invariants=False).coalesce()
        with torch.no_grad():  # detach() would be another tensor with the same indices and values for now
            tensor.copy_(total)

    return [allgather([to], [part]) for to, part in zip(every, (indices, values), strict=True)], write
