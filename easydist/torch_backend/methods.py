"""The methods of a group as torch's tools and callers know those of its own groups, which are written in C++.

Those accept a second form beside the one that torch calls: ``allreduce(tensor, op)`` beside ``allreduce([tensor],
opts)``. And their calls pass torch's dispatcher. torch calls a group that is written in Python past it, so a mode such
as ``CommDebugMode`` would see nothing. While a mode is on, a group in C++ that moves nothing gets every call, too: its
calls pass the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from easydist.base import modes, torch_private
from easydist.torch_backend.work import GroupWork

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
W = TypeVar("W", bound=GroupWork)

_NAMES = ("Allreduce", "Broadcast", "Allgather", "Reduce", "Gather", "Scatter", "ReduceScatter", "Barrier", "AllToAll",
          "AllreduceCoalesced")  # fmt: skip
_OPTIONS = tuple(getattr(dist, f"{name}Options") for name in _NAMES if hasattr(dist, f"{name}Options"))
_NO_LIMIT = timedelta(0)


def overloaded(*depths: int) -> Callable[[F], F]:
    """Let a method take its second form, too.

    Args:
        *depths: For each of its arguments with tensors, in order: 1 if the first form takes a list, 2 for lists in a
            list. The second form takes one level less. A reduction, a root and a time limit follow in any order, in
            place of the options.

    The limit of either form becomes that of the work.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != len(depths) + 1 or not isinstance(args[-1], _OPTIONS):
                args = _first_form(method.__name__, args, kwargs, depths)
            return limited(method(self, *args), args[-1])

        return call  # type: ignore[return-value]

    return decorate


def limited(work: W, options: Any) -> W:
    """Give a work the limit in torch's options, and return it."""
    work.limit = limit_of(options)
    return work


def limit_of(options: Any) -> timedelta:
    """Return the limit in torch's options, or the limit itself; zero if there is none, which torch writes as -1 ms."""
    limit: timedelta = options if isinstance(options, timedelta) else getattr(options, "timeout", _NO_LIMIT)
    return max(_NO_LIMIT, limit)


def _first_form(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], depths: Sequence[int]) -> tuple[Any, ...]:
    """Return the arguments in the first form.

    Raises:
        TypeError: They have neither form.
    """
    # By name in any order: outputs come first.
    named = sorted(kwargs.items(), key=lambda item: not item[0].startswith("output"))
    values = [*args, *(value for _, value in named)]
    tensors = [value for value in values if _is_data(value)]
    if len(tensors) != len(depths):
        raise TypeError(f"{name}: takes {len(depths)} arguments with tensors, got {len(tensors)}")
    for value in tensors:
        _demand_tensors(name, value)
    return *map(_nested, tensors, depths), _options(name, [value for value in values if not _is_data(value)])


def _demand_tensors(name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        for one in value:
            _demand_tensors(name, one)
    elif not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: takes tensors, got {type(value).__name__}")


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | tuple)


def _nested(value: Any, depth: int) -> Sequence[Any]:
    """Return an argument in its first form."""
    if isinstance(value, torch.Tensor):
        value = [value]
    return [value] if depth > 1 and not (value and isinstance(value[0], list | tuple)) else value


def _options(name: str, values: Sequence[Any]) -> Any:
    """Return the options of the first form: those passed, or what the second form passes in their place."""
    options = SimpleNamespace(reduceOp=dist.ReduceOp(dist.ReduceOp.SUM), rootRank=0, timeout=_NO_LIMIT)
    for value in values:
        if isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
            options.reduceOp = dist.ReduceOp(value) if isinstance(value, dist.ReduceOp.RedOpType) else value
        elif isinstance(value, int) and not isinstance(value, bool):
            options.rootRank = value
        elif isinstance(value, timedelta):
            options.timeout = value
        elif hasattr(value, "timeout"):
            return value
        elif value is not None:
            raise TypeError(f"{name}: takes a ReduceOp, a root, a timedelta or torch's options, got {value!r}")
    return options


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
        is_hooked = self.hooks is not None and self.hooks.are_due()
        if not (is_hooked or (torch_private.mode_depth() and torch_private.idle_backend is not None)):
            return method(self, *args, **kwargs)
        modes.demand_data(name)

        def unseen() -> Any:
            with torch_private.modes_disabled():  # they see no more of it than of an operation in C++
                return method(self, *args, **kwargs)

        if is_hooked:
            return self.hooks.run(name, args, kwargs, unseen)
        show(_idle_group(self.rank(), self.size()), name, args, kwargs)
        return unseen()

    return call


def show(idle: dist.ProcessGroup, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let an idle group see a call.

    Args:
        idle: The group.
        name: The method's name.
        args: The arguments by position.
        kwargs: Those by name.
    """
    if name == "gather_single" and not kwargs:  # an idle group has none
        name, args = "gather", _gathering(idle, *args)
    elif name == "allgather" and not kwargs:
        args = _fitting(*args)
    getattr(idle, name)(*args, **kwargs)


def _gathering(idle: dist.ProcessGroup, output: Any, data: Any, options: Any) -> tuple[Any, ...]:
    """Return the arguments of ``gather`` for those of ``gather_single``."""
    return [[data] * idle.size()] if options.rootRank == idle.rank() else [], [data], options


def _fitting(outputs: Sequence[Any], inputs: Any, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments with the inputs as outputs: the idle group copies them, and outputs may have other sizes."""
    if isinstance(inputs, torch.Tensor):
        return [inputs] * len(outputs), inputs, *rest
    return [[tensor] * len(each) for each, tensor in zip(outputs, inputs, strict=True)], inputs, *rest


def new_idle_group(rank: int, size: int) -> Any:
    """Return a group in C++ whose operations move nothing.

    Args:
        rank: The rank of this process.
        size: The number of ranks.
    """
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, torch_private.idle_backend(rank, size))
    return group


_idle_group = functools.cache(new_idle_group)
