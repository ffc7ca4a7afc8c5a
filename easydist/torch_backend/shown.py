"""The view that torch's tools have of a group: the operators that they would see with gloo, and events.

torch calls a group that is written in Python past the dispatcher, so a mode such as ``CommDebugMode`` would see
nothing. While a mode is on, a group in C++ that moves nothing gets every call, too: its calls pass the dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from easydist.base import modes, torch_private
from easydist.torch_backend.rendezvous import NAME

C = TypeVar("C", bound=type)

_nothing = contextlib.nullcontext()


def shown_to_modes(cls: C) -> C:
    """Show the operations of a class of groups to modes, and return the class: torch's methods that return a work."""
    for name, method in [*vars(cls).items()]:
        is_operation = getattr(method, "__annotations__", {}).get("return") == "GroupWork"
        if is_operation and hasattr(dist.ProcessGroup, name) and name != "_end_coalescing":
            setattr(cls, name, _shown(name, method))
    return cls


def _shown(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_private.mode_depth() and torch_private.idle_backend is not None:
            modes.demand_data(name)
            seen = _fitting(*args) if name == "allgather" and not kwargs else args
            getattr(_idle_group(self.rank(), self.size()), name)(*seen, **kwargs)
            with torch_private.modes_disabled():  # they see no more of it than of an operation in C++
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


def _fitting(outputs: Sequence[Any], inputs: Any, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments with the inputs as outputs: the idle group copies them, and outputs may have other sizes."""
    if isinstance(inputs, torch.Tensor):
        return [inputs] * len(outputs), inputs, *rest
    return [[tensor] * len(each) for each, tensor in zip(outputs, inputs, strict=True)], inputs, *rest


@functools.cache
def _idle_group(rank: int, size: int) -> dist.ProcessGroup:
    """Return a group in C++ whose operations move nothing."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, torch_private.idle_backend(rank, size))
    return group


def event(operation: str, what: str = "") -> AbstractContextManager[Any]:
    """Return the context that a profiler shows under the name of the backend and this operation."""
    return torch.profiler.record_function(f"{NAME}:{operation}{what}") if torch_private.is_profiled() else _nothing
