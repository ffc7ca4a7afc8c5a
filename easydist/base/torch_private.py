"""Names of torch that are not public, and the consequences in a torch that lacks one.

Every other module asks this one, or ``torch_groups`` about process groups. A name that is gone costs speed, or the
recognition of a rare case. Only ``tree.register`` and ``GatheredParameters`` cannot do without theirs, and say so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_missing: list[str] = []


def missing() -> list[str]:
    """Return the names that this torch does not have.

    Example:
        >>> missing()
        []
    """
    return list(_missing)


def found(path: str, default: Any) -> Any:
    """Return what a dotted name refers to; ``default`` if torch does not have it."""
    if (value := later(path, _missing)) is not _missing:
        return value
    _missing.append(path)
    return default


def later(path: str, default: Any) -> Any:
    """Do as ``found``, for a name that only later versions of torch have: an earlier one is not said to lack it."""
    module, _, name = path.rpartition(".")
    with contextlib.suppress(AttributeError, ImportError):
        names = module.split(".")
        for last in range(len(names), 0, -1):
            with contextlib.suppress(ImportError):
                start = importlib.import_module(".".join(names[:last]))
                return getattr(functools.reduce(getattr, names[last:], start), name)
    return default


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def _refuse(cls: type) -> None:
    raise NotImplementedError(f"this torch ({torch.__version__}) has no registry of containers, so {cls} stays a leaf")


class _NoGuard:
    """A guard that recognises nothing."""

    def __init__(self, *tensors: torch.Tensor, **kinds: Any) -> None: ...

    def check(self, *tensors: torch.Tensor) -> bool:
        return False


def _no_mode(key: Any) -> None:
    return None


backward_id = found("torch._C._current_graph_task_id", lambda: -1)
"""Returns the number of this thread's backward pass, -1 outside of one. Without it: calls of several threads of one
backward pass are an error, and DDP's reductions complete in background threads in backward, too."""

foreach_copy = found("torch._foreach_copy_", _copy_each)
"""Copies many tensors in one call. Without it: one by one."""

foreach_clone = found("torch._foreach_clone", lambda tensors: [tensor.clone() for tensor in tensors])
"""Clones many tensors in one call. Without it: one by one."""


def _no_handle(*fields: Any) -> None:
    raise NotImplementedError(f"this torch ({torch.__version__}) cannot share memory of a GPU")


cuda_handle = found("torch.UntypedStorage._share_cuda_", _no_handle)
"""Returns the handle by which other processes map memory of a GPU. Without it: weights on GPUs travel through the CPU,
unless NCCL moves them."""

release_cuda_handle = found("torch.UntypedStorage._release_ipc_counter_cuda", _no_handle)
"""Counts one process less that has to map the memory before it may be freed. Without it: the same."""

cuda_storage = found("torch.UntypedStorage._new_shared_cuda", _no_handle)
"""Maps the memory behind a handle on a device. Without it: the same."""

TensorGuards = found("torch._C._dynamo.guards.TensorGuards", _NoGuard)
"""Recognises tensors of the same kind. Without it: every call looks at each tensor, 0.25 µs more for each."""

has_storage = found("torch._C._has_storage", lambda tensor: False)
"""True for tensors that a guard may look at. Without it: as without ``TensorGuards``."""

DisableTorchFunctionSubclass = found("torch._C.DisableTorchFunctionSubclass", contextlib.nullcontext)
"""The context in which subclasses of tensors cannot answer themselves. Without it: they can."""

is_functorch_wrapped = found("torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
"""True for a tensor inside vmap, grad and the like. Without it: its error says that it has lost its memory."""

is_batch_of_gradients = found("torch._C._functorch.is_legacy_batchedtensor", lambda tensor: False)
"""True for a gradient that stands for several (``is_grads_batched``). Without it: torch says that it has no storage."""

is_functional = found("torch._is_functional_tensor", lambda tensor: False)
"""True for a functional tensor. Without it: the same."""

is_zerotensor = found("torch.Tensor._is_zerotensor", lambda tensor: False)
"""True for a tensor whose zeros are not in memory, which autograd makes. Without it: it is refused as one without
memory."""

_forward_ad = torch.autograd.forward_ad


def has_tangents() -> bool:
    """True in a ``forward_ad.dual_level``, where tensors may have tangents. Without its name: in no level.

    Cost: 0.1 µs.
    """
    return getattr(_forward_ad, "_current_level", -1) >= 0


def tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tangent of a tensor in a ``forward_ad.dual_level``; None if it has none."""
    return _forward_ad.unpack_dual(tensor).tangent if has_tangents() else None


def unpickled(load: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return what a function unpickles. The next ``torch.load`` does not check its sparse tensors.

    torch keeps those that it has rebuilt until then: for good in a process that loads nothing. Without the names of
    its list (torch 2.15 has the first): so it does.

    Cost: 0.3 µs.
    """
    kept = _kept_sparse()
    count = len(kept)
    try:
        return load(*args, **kwargs)
    finally:
        del kept[count:]


_kept_of_all: list[torch.Tensor] = later("torch._utils._sparse_tensors_to_validate", [])
_kept_sparse = later("torch._utils._get_sparse_tensors_to_validate", lambda: _kept_of_all)


dispatch_keys = found("torch._C._dispatch_keys", None)
"""Returns the keys by which torch chooses the implementation for a tensor. Without it: subclasses that consist of other
tensors are recognised by ``__tensor_flatten__`` only."""

PYTHON_KEY = found("torch._C.DispatchKey.Python", None)
"""The key of a tensor class that is written in Python. Without it: the same."""


def is_of_python(tensor: torch.Tensor) -> bool:
    """True if the class of a tensor is known to be written in Python."""
    return None not in (dispatch_keys, PYTHON_KEY) and bool(dispatch_keys(tensor).has(PYTHON_KEY))


transform = found("torch._C._functorch.peek_interpreter_stack", lambda: None)
"""Returns the innermost transform of ``torch.func`` in this thread. Without it: a call inside one is refused because
its tensors have no memory."""

transforms_left = found("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", contextlib.nullcontext)
"""The context outside of these transforms. Without it: the same."""

tracing = found("torch._C._get_tracing_state", lambda: None)
"""Returns the trace of this thread if ``torch.jit.trace`` records, else None. Without it: what is sent is recorded."""

set_tracing = found("torch._C._set_tracing_state", lambda state: None)
"""Begins a trace again, or leaves it for None. Without it: the same."""

mode_depth = found("torch._C._len_torch_dispatch_stack", lambda: 0)
"""Returns the number of modes of this thread that see every operation. Without it: as without ``transform``."""

mode_of = found("torch._C._get_dispatch_mode", _no_mode)
"""Returns the mode of a kind. Without it: the same."""

set_mode = found("torch._C._set_dispatch_mode", None)
"""Begins a mode again. Without it: the same."""

unset_mode = found("torch._C._unset_dispatch_mode", None)
"""Ends the mode of a kind, and returns it. Without it: the same."""

if set_mode is None or unset_mode is None:  # no mode may be ended that cannot begin again
    unset_mode = mode_of = set_mode = _no_mode

modes_disabled = found("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
"""The context outside of all modes. Without it: they see the copies of ``easydist_shm``, too."""

idle_backend = found("torch._C._distributed_c10d.FakeProcessGroup._create_internal", None)
"""Makes a backend in C++ that moves nothing. Without it: modes do not see the operations of ``easydist_shm``."""

nan_hook = later("torch._C._distributed_c10d.NanCheckHook", None)
"""Checks tensors for NaN before each operation if ``TORCH_DIST_NAN_CHECK=1``, from torch 2.14. Without it: nothing
does."""

is_profiled = found("torch.autograd._profiler_enabled", lambda: False)
"""True while a profiler is on. Without it: profilers do not see these operations."""

MODE_KEYS = found("torch._C._TorchDispatchModeKey", None)
"""The kinds of modes: ``FAKE``, ``PROXY``, ``FUNCTIONAL``. Without it: the same."""

eval_frame = found("torch._C._dynamo.eval_frame", None)
"""The part of torch.compile that decides per function. Without it: compiled callers trace into calls, and break their
graph a few frames later."""

NODES = found("torch.utils._pytree.SUPPORTED_NODES", {})
"""The classes whose instances are containers, for torch. Without it: those of Python and dataclasses are, no others."""

register_node = found("torch.utils._pytree.register_pytree_node", lambda cls, flatten, unflatten: _refuse(cls))
"""Makes instances of a class containers, for torch. Without it: ``tree.register`` is an error."""

disabled_function = found("torch._C._disabled_torch_function_impl", None)
"""Makes torch treat the tensors of a class as plain ones. Without it: ``GatheredParameters`` is an error for
parameters of FSDP2."""

swap_impl = found("torch._C._swap_tensor_impl", None)
"""Swaps the values of two tensors, wherever they are referenced. Without it: the same."""
