"""Functions to call before and after every operation of a communicator, and the operations as calls of a trace."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import torch

from easydist.agreement.notes import Notes, listeners, note_data
from easydist.groups.rendezvous import site
from easydist.transport.backend import Backend
from easydist.transport.work import TorchWork

_log = logging.getLogger("easydist")
_NOTHING = nullcontext()


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
AbortHook = Callable[[BaseException], object] | Callable[[], object]


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
        self.failed: dict[int, Callable[[BaseException], object]] = {}
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

    def tell_failed(self, error: BaseException) -> None:
        """Call the hooks for a failed operation. One that raises is logged, because the caller has to get ``error``.

        Args:
            error: The error of the operation.
        """
        for hook in tuple(self.failed.values()):
            try:
                hook(error)
            except Exception:
                _log.exception("an abort hook raised an exception, after: %s", error)


def taking_the_error(hook: Callable[..., object]) -> Callable[..., object]:
    """Return an abort hook that takes the error; torchcomms' hooks take nothing.

    Example:
        >>> taking_the_error(lambda: "failed")(ValueError()), taking_the_error(type)(ValueError())
        ('failed', <class 'ValueError'>)

    Args:
        hook: The function, which takes the error or nothing.
    """
    return hook if _accepts(hook, 1) or not _accepts(hook, 0) else lambda error: hook()


def _accepts(function: Callable[..., object], count: int) -> bool:
    """True if a function can be called with ``count`` arguments, as far as Python knows."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return count == 1
    return True


def traced(backend: Backend, name: str, number: int, args: HookArgs) -> Any:
    """Return a context manager for an operation, which does nothing unless ``trace()`` is running.

    Args:
        backend: The backend of the communicator.
        name: The name of the communicator.
        number: The number of the operation.
        args: Its description.
    """
    return _Traced(backend, name, number, args) if listeners else _NOTHING


class _Traced:
    """The trace notes of one operation, as for a call of a verb."""

    def __init__(self, backend: Backend, name: str, number: int, args: HookArgs) -> None:
        monitor = SimpleNamespace(number=number + 1)
        comms: Any = SimpleNamespace(name=name, rank=backend.rank, size=backend.size, monitor=monitor)
        self._comms = comms
        self._notes = Notes(comms, args.name, None, site())
        note_data(sum(tensor.nbytes for tensor in args.outputs))

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._notes.tell(self._comms, error)
