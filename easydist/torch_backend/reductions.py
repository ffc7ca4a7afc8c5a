"""The reductions of ``torch.distributed`` as easydist's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from easydist.torch_backend.rendezvous import NAME
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
