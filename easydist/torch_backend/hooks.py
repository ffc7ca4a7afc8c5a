"""The hooks of a group, which torch 2.14 and newer call around each operation of its own groups, written in C++."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from easydist.base import torch_private
from easydist.torch_backend.methods import new_idle_group, show
from easydist.torch_backend.rendezvous import NAME


class _Calls(threading.local):
    """The calls of a thread.

    Attributes:
        inner: True within an operation that hooks have seen.
        described: What hooks after the operation get, but for its work; nothing if torch has no hooks for it.
    """

    def __init__(self) -> None:
        self.inner = False
        self.described: list[tuple[Any, bool, int]] = []


_calls = _Calls()


class Hooked(NamedTuple):
    """The argument of a hook after an operation, with the fields of torch's ``PostHookArgs``."""

    name: Any
    async_op: bool
    work: Any
    op_id: int


class GroupHooks:
    """The hooks of a group. A group in C++ that moves nothing calls them, and describes the operations to them.

    Args:
        rank: The rank of this process.
        size: The number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        if torch_private.idle_backend is None or not hasattr(dist.ProcessGroup, "register_post_hook"):
            raise NotImplementedError(f"this torch ({torch.__version__}) cannot call the hooks of such a group")
        self.idle = new_idle_group(rank, size)
        self.after: dict[int, Callable[[Any], None]] = {}
        self.idle.register_post_hook(0, self._note)

    @classmethod
    def at_first(cls, rank: int, size: int) -> GroupHooks | None:
        """Return the hooks that a new group has: torch's for ``TORCH_DIST_NAN_CHECK``, if it is set."""
        if torch_private.nan_hook is None or os.environ.get("TORCH_DIST_NAN_CHECK") != "1":
            return None
        hooks = cls(rank, size)
        torch_private.nan_hook.attach(hooks.idle)
        return hooks

    def are_due(self) -> bool:
        """False within an operation that they have seen."""
        return not _calls.inner

    def _note(self, args: Any) -> None:
        _calls.described.append((args.name, args.async_op, args.op_id))

    def run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """Run an operation between its hooks, and return its work.

        Args:
            name: The name of the group's method.
            args: Its arguments by position.
            kwargs: Those by name.
            call: Begins the operation.
        """
        _calls.described.clear()
        show(self.idle, name, args, kwargs)
        described, _calls.inner = list(_calls.described), True
        try:
            work = call()
        finally:
            _calls.inner = False
        for kind, async_op, number in described:
            for hook in list(self.after.values()):
                hook(Hooked(kind, async_op, work, number))
        return work


def _lacking(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"Backend {NAME} does not support {name}")

    return method


class OfLaterTorch:
    """The methods that torch 2.14 and newer have for groups in C++ only."""

    hooks: GroupHooks | None
    supports_splitting = supports_reconfigure = supports_window = False
    supports_abort_hooks = supports_completion_hooks = False
    new_window, reconfigure, get_reconfigure_handle, register_abort_hook, unregister_abort_hook = map(
        _lacking,
        ("new_window", "reconfigure", "get_reconfigure_handle", "register_abort_hook", "unregister_abort_hook"),
    )

    def _hooked(self) -> GroupHooks:
        group: Any = self
        self.hooks = self.hooks or GroupHooks(group.rank(), group.size())
        return self.hooks

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a function before each operation."""
        self._hooked().idle.register_pre_hook(hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Call it no longer."""
        self._hooked().idle.unregister_pre_hook(hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a function after the begin of each operation, with its work."""
        self._hooked().after[hook_id] = hook

    def unregister_post_hook(self, hook_id: int) -> None:
        """Call it no longer."""
        self._hooked().after.pop(hook_id, None)
