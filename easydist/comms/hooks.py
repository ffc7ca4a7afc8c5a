"""Functions to call before and after every operation of a communicator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch

from easydist.transport.work import TorchWork


class HookArgs(NamedTuple):
    """The description of an operation for hooks."""

    name: str
    """The method's name."""
    async_op: bool
    hints: Mapping[str, str] | None
    timeout: timedelta
    """The time limit that applies."""
    outputs: Sequence[torch.Tensor]
    """The tensors that the operation fills or changes in place."""
    work: TorchWork | None = None
    """The operation, once it has begun."""


PreHook = Callable[[str, int, HookArgs], object]
PostHook = Callable[[int, HookArgs], object]
AbortHook = Callable[[BaseException], object]


class RemovableHandle:
    """A handle that removes a hook, also at the end of a ``with`` block.

    Example:
        >>> from easydist.comms import Solo, TorchComm
        >>> comm = TorchComm(Solo())
        >>> with comm.register_pre_hook(lambda name, op_id, args: print(name, op_id)):
        ...     comm.barrier(False).wait()
        barrier 0
        >>> comm.barrier(False).wait()
    """

    def __init__(self, hooks: dict[int, Any], key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        self._hooks.pop(self._key, None)

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Hooks:
    """The hooks of one communicator, in registration order.

    Attributes:
        before: Hooks called with an operation's name, number and arguments before it begins. They may raise.
        after: Hooks called with the number and the arguments once an operation has begun or, if synchronous, ended.
        failed: Hooks called with the error, once, when an operation has failed.
    """

    def __init__(self) -> None:
        self.before: dict[int, PreHook] = {}
        self.after: dict[int, PostHook] = {}
        self.failed: dict[int, AbortHook] = {}
        self._keys = itertools.count()

    def add(self, hooks: dict[int, Any], hook: Callable[..., object]) -> RemovableHandle:
        """Register a hook.

        Args:
            hooks: ``before``, ``after`` or ``failed``.
            hook: The function.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a hook has to be callable, got {hook!r}")
        hooks[key := next(self._keys)] = hook
        return RemovableHandle(hooks, key)
