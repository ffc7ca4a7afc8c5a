"""The reduction operations, with torchcomms' names."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex

import torch

from easydist import memory


class RedOpType(enum.IntEnum):
    """The types of reductions; the numbers are torchcomms'."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    PREMUL_SUM = 7
    AVG = 8


OP_BIT = 14
"""The lowest bit of the reduction in the code of a call, see ``described``."""


class ReduceOp:
    """A reduction: ``ReduceOp.SUM``, ``AVG``, ``PREMUL_SUM(factor)``, ….

    ``AVG`` of integers truncates toward zero and is computed in 64 bits; of floats of 16 and 8 bits it is computed in
    float32. So no intermediate sum overflows. ``BAND``, ``BOR`` and ``BXOR`` take integers and bools. Operations with
    the same type and factor are equal, and can be pickled.

    Args:
        opType: Any type except ``PREMUL_SUM``, which needs a factor.

    Attributes:
        code: The type, as in the description of a call.

    Example:
        >>> from easydist.comms import RedOpType, ReduceOp
        >>> ReduceOp.SUM.type.name, ReduceOp(RedOpType.SUM) == ReduceOp.SUM
        ('SUM', True)
        >>> ReduceOp.PREMUL_SUM(0.5)
        ReduceOp.PREMUL_SUM(0.5)

    Raises:
        TypeError: ``opType`` is not a ``RedOpType``.
        RuntimeError: ``opType`` is ``PREMUL_SUM``.

    Source: the torchcomms API.
    """

    AVG: ReduceOp
    BAND: ReduceOp
    BOR: ReduceOp
    BXOR: ReduceOp
    MAX: ReduceOp
    MIN: ReduceOp
    PRODUCT: ReduceOp
    SUM: ReduceOp

    def __init__(self, opType: RedOpType) -> None:  # noqa: N803 - torchcomms' name
        if not isinstance(opType, RedOpType):
            raise TypeError(f"ReduceOp() takes a RedOpType, got {opType!r}")
        if opType is RedOpType.PREMUL_SUM:
            raise RuntimeError("RedOpType.PREMUL_SUM needs a factor: use ReduceOp.PREMUL_SUM(factor)")
        self._type, self._factor, self.code = opType, None, opType + 1 << OP_BIT

    code: int
    _type: RedOpType
    _factor: Any

    @staticmethod
    def PREMUL_SUM(factor: torch.Tensor | SupportsFloat) -> ReduceOp:  # noqa: N802 - torchcomms' name
        """Return the operation that multiplies each rank's values by its factor and adds up; inputs are not changed.

        Args:
            factor: A number, or a tensor that can be broadcast to the data; it may differ between ranks.

        Raises:
            TypeError: ``factor`` is neither a number nor a tensor.
        """
        if not isinstance(factor, torch.Tensor | SupportsIndex | SupportsFloat):
            raise TypeError(f"PREMUL_SUM() takes a number or a tensor, got {factor!r}")
        op = ReduceOp.__new__(ReduceOp)
        op._type, op._factor, op.code = RedOpType.PREMUL_SUM, factor, RedOpType.PREMUL_SUM + 1 << OP_BIT
        if not isinstance(factor, torch.Tensor):
            # As a float, an integer of NumPy would turn the product with integers into floats.
            op._factor = operator.index(factor) if isinstance(factor, SupportsIndex) else float(factor)
        return op

    @property
    def type(self) -> RedOpType:
        """The type of the operation."""
        return self._type

    @property
    def factor(self) -> Any:
        """The factor of ``PREMUL_SUM``; None for all others."""
        return self._factor

    @property
    def is_scaled(self) -> bool:
        """True for ``PREMUL_SUM``."""
        return self._factor is not None

    @property
    def unscaled(self) -> ReduceOp:
        """The reduction of values that are ``scaled`` already; a sum for ``PREMUL_SUM``, else the reduction itself."""
        return ReduceOp.SUM if self.is_scaled else self

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values to reduce: for ``PREMUL_SUM``, ``tensor`` times the factor, in new memory; else ``tensor``.

        Args:
            tensor: The values of this rank.

        Raises:
            RuntimeError: The product has another dtype or another shape than ``tensor``.
        """
        return self._product(tensor) if self.is_scaled else tensor

    @memory.kept
    def _product(self, tensor: torch.Tensor) -> torch.Tensor:
        factor = self._factor
        if isinstance(factor, torch.Tensor):
            factor = factor.to(tensor.device)
            # With a dimension, a float64 factor would turn the product with float32 into float64.
            factor = factor.reshape(()) if factor.numel() == 1 else factor
        product: torch.Tensor = torch.mul(tensor.detach(), factor)
        if product.dtype != tensor.dtype:
            raise RuntimeError(f"PREMUL_SUM: {tensor.dtype} times this factor is {product.dtype}; convert one of them")
        if product.shape != tensor.shape:
            raise RuntimeError(f"PREMUL_SUM: the factor's shape does not fit {tuple(tensor.shape)}")
        return product

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        mine, theirs = self._factor, other._factor
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            return mine is theirs or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))
        is_tensor = isinstance(mine, torch.Tensor) or isinstance(theirs, torch.Tensor)
        return self._type is other._type and not is_tensor and mine == theirs

    def __hash__(self) -> int:
        return self.code

    def __repr__(self) -> str:
        return f"ReduceOp.{self._type.name}" + (f"({self._factor!r})" if self.is_scaled else "")


for _type in RedOpType:
    if _type is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _type.name, ReduceOp(_type))

_COMBINE: dict[RedOpType, Callable[..., torch.Tensor]] = {
    RedOpType.SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
    RedOpType.AVG: torch.add,
}
_BITWISE = frozenset({RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR})
# torch takes neither sums nor minima of these dtypes.
_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64}


def accumulator(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """Return the dtype in which values are combined before they are rounded or truncated once.

    Example:
        >>> accumulator(torch.float16, ReduceOp.SUM), accumulator(torch.int8, ReduceOp.AVG)
        (torch.float32, torch.int64)
    """
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    if op.type is RedOpType.AVG and is_whole and dtype is not torch.uint64:
        return torch.int64
    return _WIDE.get(dtype, dtype)


def combine(op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Fold tensors of one dtype from the left: ``op(op(parts[0], parts[1]), …)``, in that dtype.

    Floats of 16 and 8 bits are accumulated in float32 and rounded once; MIN and MAX propagate NaN; AVG divides by the
    number of parts.

    Example:
        >>> combine(ReduceOp.MAX, [torch.tensor([1, 5]), torch.tensor([3, 2])])
        tensor([3, 5])
        >>> combine(ReduceOp.AVG, [torch.tensor([-3, 3]), torch.tensor([0, 0])])
        tensor([-1,  1])
    """
    dtype = parts[0].dtype
    if dtype is torch.uint64:
        return _combine_uint64(op, parts)
    wide = accumulator(dtype, op)
    # One part at a time is widened, so that not all of them are in memory twice.
    total = functools.reduce(_COMBINE[op.type], parts if wide is dtype else (part.to(wide) for part in parts))
    total = average(total, len(parts)) if op.type is RedOpType.AVG else total
    return total if total.dtype is dtype else total.to(dtype)


def combine_into(out: torch.Tensor, op: ReduceOp, parts: Sequence[torch.Tensor]) -> None:
    """Fill a tensor, which may be one of the parts, with ``combine(op, parts)``; most dtypes need no copy for that."""
    kind, dtype = op.type, out.dtype
    if kind is RedOpType.AVG or dtype is torch.uint64 or accumulator(dtype, op) is not dtype or len(parts) == 1:
        out.copy_(combine(op, parts))
        return
    fold, address = _COMBINE[kind], out.data_ptr()
    if any(part.data_ptr() == address for part in parts[2:]):  # it is read after the first two
        fold(functools.reduce(fold, parts[:-1]), parts[-1], out=out)
        return
    fold(parts[0], parts[1], out=out)
    for part in parts[2:]:
        fold(out, part, out=out)


def average(total: torch.Tensor, count: int) -> torch.Tensor:
    """Return a sum divided by a number of ranks; integers are truncated toward zero."""
    if total.is_floating_point() or total.is_complex():
        return total / count
    return torch.div(total, count, rounding_mode="trunc")


@functools.cache
def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Check that ``combine`` supports this dtype, with the same result on all ranks, before anything is sent.

    Raises:
        RuntimeError: The operation is not defined for the dtype (an order of complex numbers, …); torch's text, if it
            comes from torch.
    """
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    if op.type in _BITWISE and not is_whole:
        raise RuntimeError(f"Cannot use {op} with non-integral dtype {dtype}")
    if op.type is RedOpType.AVG and dtype is torch.bool:
        raise RuntimeError("Cannot use ReduceOp.AVG with torch.bool: convert it to a float")
    try:
        combine(op, [torch.zeros(1, dtype=dtype, device="cpu")] * 2)
    except TypeError as error:  # newer versions of torch raise this
        raise RuntimeError(str(error)) from None


def _combine_uint64(op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine as int64: sums and products have the same bits; for MIN and MAX, the sign bit is flipped."""
    if op.type is RedOpType.AVG:
        raise RuntimeError("Cannot use ReduceOp.AVG with torch.uint64: torch cannot divide it")
    signs = torch.iinfo(torch.int64).min if op.type in (RedOpType.MIN, RedOpType.MAX) else 0
    combined = functools.reduce(_COMBINE[op.type], (part.view(torch.int64) ^ signs for part in parts))
    return (combined ^ signs).view(torch.uint64)
