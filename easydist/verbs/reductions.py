"""The reductions of ``reduce``: their names, including those of torch and torchcomms, and the dtypes that they take."""

from __future__ import annotations

from typing import Any

import torch

from easydist.base.arguments import number
from easydist.data.leaves import Leaves
from easydist.transport.reduce_op import ReduceOp

OPS: dict[str, ReduceOp | None] = {
    "mean": ReduceOp.SUM,
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "and": ReduceOp.BAND,
    "or": ReduceOp.BOR,
    "xor": ReduceOp.BXOR,
    "none": None,
}
"""The operation of each reduction; a mean is divided afterwards."""

BITWISE = ("and", "or", "xor")

_NAMES = {
    "SUM": "sum",
    "PREMUL_SUM": "sum",
    "AVG": "mean",
    "MAX": "max",
    "MIN": "min",
    "PRODUCT": "prod",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}
"""The names of the reductions by the type of a ``ReduceOp``."""


def named_reduction(reduction: Any, scale: Any) -> tuple[str, float]:
    """Return the name of a reduction, and the factor for its result.

    Args:
        reduction: A name in upper or lower case, or a ``ReduceOp`` of torch or torchcomms.
        scale: The factor that the caller asks for; that of ``PREMUL_SUM`` is multiplied by it.

    Raises:
        ValueError: There is no reduction of this name.
        TypeError: It is neither a name nor an operation, or the factor of ``PREMUL_SUM`` is missing, or not one number;
            or ``scale`` is not a number.

    Example:
        >>> (
        ...     named_reduction("SUM", 1.0),
        ...     named_reduction(ReduceOp.AVG, 1.0),
        ...     named_reduction(ReduceOp.PREMUL_SUM(3), 0.5),
        ... )
        (('sum', 1.0), ('mean', 1.0), ('sum', 1.5))
    """
    factor = float(number("reduce: scale", scale))
    if isinstance(reduction, str) and (name := reduction.lower()) in OPS:
        return name, factor
    kind = reduction.type if isinstance(reduction, ReduceOp) else getattr(reduction, "op", reduction)
    told = str(getattr(kind, "name", ""))
    if told not in _NAMES:
        known = ", ".join(map(repr, OPS))
        kind_of_error = ValueError if isinstance(reduction, str) else TypeError
        found = "that is a function" if callable(reduction) else repr(reduction)  # its address differs between ranks
        raise kind_of_error(f"reduce: there is no reduction {found}; choose from {known}")
    return _NAMES[told], factor * (_factor(reduction) if told == "PREMUL_SUM" else 1.0)


def _factor(op: Any) -> float:
    if not isinstance(op, ReduceOp) and not hasattr(op, "op"):
        raise TypeError("reduce: PREMUL_SUM without its factor; pass easydist.comms.ReduceOp.PREMUL_SUM(factor)")
    factor = op.factor if isinstance(op, ReduceOp) else op.__getstate__()[1]  # torch shows it to pickle only
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise TypeError(
            f"reduce: the factor of PREMUL_SUM is a tensor of shape {tuple(factor.shape)}; multiply the tree by it, "
            'and reduce the product with "sum"'
        )
    return float(number("reduce: factor", factor))


def check_dtypes(leaves: Leaves, reduction: str) -> None:
    """Check that a reduction is defined for the dtypes of all leaves.

    Raises:
        TypeError: It is not.
    """
    if reduction not in ("max", "min", *BITWISE):
        return
    for path, dtype in zip(leaves.layout.paths, leaves.layout.dtypes, strict=True):
        if reduction in BITWISE and (dtype.is_floating_point or dtype.is_complex):
            kind = str(dtype).removeprefix("torch.")
            raise TypeError(
                f"reduce: {path or 'the tensor'} is {kind}, and {reduction!r} combines the bits of integers and bools"
            )
        if reduction in ("max", "min") and dtype.is_complex:
            raise TypeError(f"reduce: {path or 'the tensor'} is complex, and complex numbers have no {reduction}")
