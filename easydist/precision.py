"""Half-precision data back in float32."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch

from easydist import tree
from easydist.typing import Tree

__all__ = ["convert_outputs_to_fp32", "convert_to_fp32"]

P = ParamSpec("P")
R = TypeVar("R")


def convert_to_fp32(tensor: Tree) -> Tree:
    """The tree with its float16 and bfloat16 tensors as float32; everything else as it is.

    Example:
        >>> convert_to_fp32({"x": torch.ones(1, dtype=torch.bfloat16), "n": 1})
        {'x': tensor([1.]), 'n': 1}
    """

    def is_half(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    return tree.map(torch.Tensor.float, tensor, is_half)


class _ConvertOutputs:
    """A forward function whose outputs are converted; it refuses to be pickled, as the model around it cannot be."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward  # after: update_wrapper copies the __dict__ of a callable object

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self._forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "a function wrapped by convert_outputs_to_fp32 cannot be pickled: unwrap it first (it is its __wrapped__)"
        )


def convert_outputs_to_fp32(model_forward: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that its float16 and bfloat16 outputs become float32.

    ``__name__``, ``__doc__`` and the like are those of the function, which ``__wrapped__`` leads to.

    Example:
        >>> convert_outputs_to_fp32(lambda: torch.ones(1, dtype=torch.float16))().dtype
        torch.float32
    """
    convert = _ConvertOutputs(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, convert(*args, **kwargs))

    forward.__wrapped__ = convert
    return forward
