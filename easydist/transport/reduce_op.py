"""The operations of a reduction, by torchcomms' names."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence

import torch


class RedOpType(enum.IntEnum):
    """What a reduction does with two values."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3


class ReduceOp:
    """A reduction: ``ReduceOp.SUM``, ``PRODUCT``, ``MIN`` or ``MAX``.

    Example:
        >>> from easydist.comms import ReduceOp
        >>> ReduceOp.SUM.type.name
        'SUM'
    """

    SUM: ReduceOp
    PRODUCT: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp

    def __init__(self, op_type: RedOpType) -> None:
        self._type = op_type

    @property
    def type(self) -> RedOpType:
        """Which operation this is."""
        return self._type

    def __repr__(self) -> str:
        return f"ReduceOp.{self._type.name}"


for _type in RedOpType:
    setattr(ReduceOp, _type.name, ReduceOp(_type))

_COMBINE: dict[RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    RedOpType.SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
}
_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64}


def combine(op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Fold tensors of one dtype from the left: ``op(op(parts[0], parts[1]), …)``, in that dtype.

    Floats of 16 and 8 bits are accumulated in float32 and rounded once; MIN and MAX pass NaN on.

    Example:
        >>> combine(ReduceOp.MAX, [torch.tensor([1, 5]), torch.tensor([3, 2])])
        tensor([3, 5])
    """
    dtype = parts[0].dtype
    if dtype is torch.uint64:
        return _combine_uint64(op, parts)
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else _WIDE.get(dtype, dtype)
    return functools.reduce(_COMBINE[op.type], (part.to(wide) for part in parts)).to(dtype)


@functools.cache
def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Make sure that ``combine`` knows this dtype: on all ranks alike, before anything is sent.

    Raises:
        RuntimeError: torch cannot combine it so (an order of complex numbers, …); what torch says.
    """
    try:
        combine(op, [torch.zeros(1, dtype=dtype, device="cpu")] * 2)
    except TypeError as error:  # what newer versions of torch raise
        raise RuntimeError(str(error)) from None


def _combine_uint64(op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """As int64: sums and products have the same bits; for an order, the sign bit is turned over."""
    signs = torch.iinfo(torch.int64).min if op.type in (RedOpType.MIN, RedOpType.MAX) else 0
    combined = functools.reduce(_COMBINE[op.type], (part.view(torch.int64) ^ signs for part in parts))
    return (combined ^ signs).view(torch.uint64)
