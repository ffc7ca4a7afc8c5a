"""The conversion of half-precision data to float32."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import torch

from easydist import tree
from easydist.base.arguments import UNSET, either, hiding
from easydist.typing import T, Tree

__all__ = ["convert_outputs_to_fp32", "convert_to_fp32"]

P = ParamSpec("P")
R = TypeVar("R")


def convert_to_fp32(tensor: T) -> T:
    """Return the tree with its float16 and bfloat16 tensors as float32; all other values are unchanged.

    Example:
        >>> convert_to_fp32({"x": torch.ones(1, dtype=torch.bfloat16), "n": 1})
        {'x': tensor([1.]), 'n': 1}

    Args:
        tensor: The tree.
    """

    def is_half(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    converted: T = tree.map(torch.Tensor.float, tensor, is_half)
    return converted


class _ConvertOutputs:
    """A forward function with converted outputs; it refuses to be pickled, because its model cannot be pickled."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward  # after update_wrapper, which copies the __dict__ of a callable object

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self._forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "a function wrapped by convert_outputs_to_fp32 cannot be pickled: unwrap it first (it is its __wrapped__)"
        )


@overload
def convert_outputs_to_fp32(model_forward: Callable[P, R]) -> Callable[P, R]: ...
@overload
def convert_outputs_to_fp32(model_forward: Tree) -> Tree: ...
@overload
def convert_outputs_to_fp32(*, data: Tree) -> Tree: ...
@hiding("data")
def convert_outputs_to_fp32(model_forward: Any = UNSET, *, data: Any = UNSET) -> Any:
    """Wrap a function so that its float16 and bfloat16 outputs become float32; convert other values at once.

    ``__name__``, ``__doc__`` and the like are those of the function, which can be reached through ``__wrapped__``.

    Args:
        model_forward: The function. For a value that cannot be called, the result is ``convert_to_fp32`` of it.
        data: Another name for ``model_forward``.

    Example:
        >>> convert_outputs_to_fp32(lambda: torch.ones(1, dtype=torch.float16))().dtype
        torch.float32
        >>> convert_outputs_to_fp32({"logits": torch.ones(1, dtype=torch.float16)})
        {'logits': tensor([1.])}
    """
    if data is not UNSET or model_forward is UNSET:
        model_forward = either("convert_outputs_to_fp32", "model_forward", model_forward, "data", data)
    if not callable(model_forward):
        return convert_to_fp32(model_forward)
    convert = _ConvertOutputs(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert(*args, **kwargs)

    forward.__wrapped__ = convert
    return forward
