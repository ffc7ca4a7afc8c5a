"""A group's own methods in their second form: ``allreduce(tensor, op)`` beside ``allreduce([tensor], opts)``.

torch calls the first form. Its own groups, which are written in C++, accept both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = tuple(
    getattr(dist, f"{name}Options")
    for name in ("Allreduce", "Broadcast", "Allgather", "Reduce", "Gather", "Scatter", "ReduceScatter", "Barrier")
    if hasattr(dist, f"{name}Options")
)


def overloaded(*depths: int) -> Callable[[F], F]:
    """Let a method take its second form, too.

    Args:
        *depths: For each of its arguments with tensors, in order: 1 if the first form takes a list, 2 for lists in a
            list. The second form takes one level less. A reduction, a root and a time limit follow in any order, in
            place of the options.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs and len(args) == len(depths) + 1 and isinstance(args[-1], _OPTIONS):
                return method(self, *args)
            # By name in any order: outputs come first.
            named = sorted(kwargs.items(), key=lambda item: not item[0].startswith("output"))
            values = [*args, *(value for _, value in named)]
            tensors = [value for value in values if _is_data(value)]
            return method(self, *map(_nested, tensors, depths), _options([v for v in values if not _is_data(v)]))

        return call  # type: ignore[return-value]

    return decorate


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | tuple)


def _nested(value: Any, depth: int) -> Sequence[Any]:
    """Return an argument in its first form."""
    if isinstance(value, torch.Tensor):
        value = [value]
    return [value] if depth > 1 and not (value and isinstance(value[0], list | tuple)) else value


def _options(values: Sequence[Any]) -> Any:
    """Return the options of the first form: those passed, or what the second form passes in their place."""
    options = SimpleNamespace(reduceOp=dist.ReduceOp(dist.ReduceOp.SUM), rootRank=0)
    for value in values:
        if isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
            options.reduceOp = dist.ReduceOp(value) if isinstance(value, dist.ReduceOp.RedOpType) else value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None and not isinstance(value, timedelta):
            return value
    return options
