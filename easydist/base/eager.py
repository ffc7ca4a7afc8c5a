"""Functions that ``torch.compile`` skips, because a graph cannot contain exchanges with other processes."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, TypeVar

from easydist.base.torch_private import eval_frame

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_set_strategy: Callable[[Any, Any], None] | None = None
with contextlib.suppress(AttributeError, TypeError):
    _SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy((lambda: None).__code__, _SKIP)
    _set_strategy = eval_frame.set_code_exec_strategy


def eager(function: F) -> F:
    """Exclude a function from compilation, and return it: a compiled caller breaks its graph at each call.

    ``torch.compiler.disable`` does this, too, but imports the compiler at once, and costs a microsecond per call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it communicates with other processes"  # type: ignore[attr-defined]
    if _set_strategy is not None:
        _set_strategy(function.__code__, _SKIP)
    return function


def eager_methods(cls: C) -> C:
    """Make all methods that a class itself defines ``eager``, and return the class."""
    for value in vars(cls).values():
        if isinstance(value, types.FunctionType):
            eager(value)
    return cls
