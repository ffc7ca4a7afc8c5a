"""easydist in scripts written for accelerate: one line replaces accelerate's functions by easydist's.

Importing this module changes nothing, and does not load accelerate; ``enable()`` does both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any

import torch

from easydist.agreement.calling import as_inside
from easydist.data import precision, structure
from easydist.data.structure import TensorInformation
from easydist.errors import DistributedOperationException
from easydist.metrics.gather import gather_for_metrics
from easydist.state import DistributedType, ProcessState, wait_for_everyone
from easydist.tree import is_namedtuple
from easydist.verbs.broadcast import broadcast, copy_tensor_to_devices
from easydist.verbs.gather import gather
from easydist.verbs.objects import broadcast_object_list, gather_object
from easydist.verbs.padding import CannotPadNestedTensorWarning, pad_where_needed
from easydist.verbs.parameters import GatheredParameters
from easydist.verbs.random import set_seed, synchronize_rng_states
from easydist.verbs.reduce import reduce

__all__ = ["disable", "enable"]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "GatheredParameters": GatheredParameters,
    "broadcast": broadcast,
    "broadcast_object_list": broadcast_object_list,
    "concatenate": structure.concatenate,
    "convert_outputs_to_fp32": precision.convert_outputs_to_fp32,
    "convert_to_fp32": precision.convert_to_fp32,
    "copy_tensor_to_devices": copy_tensor_to_devices,
    "find_batch_size": structure.find_batch_size,
    "find_device": structure.find_device,
    "gather": gather,
    "gather_object": gather_object,
    "get_data_structure": structure.get_data_structure,
    "honor_type": structure.honor_type,
    "initialize_tensors": structure.initialize_tensors,
    "is_namedtuple": is_namedtuple,
    "is_tensor_information": structure.is_tensor_information,
    "is_torch_tensor": structure.is_torch_tensor,
    "listify": structure.listify,
    "pad_across_processes": pad_where_needed,
    "pad_input_tensors": structure.pad_input_tensors,
    "recursively_apply": structure.recursively_apply,
    "reduce": reduce,
    "send_to_device": structure.send_to_device,
    "set_seed": set_seed,
    "slice_tensors": structure.slice_tensors,
    "synchronize_rng_states": synchronize_rng_states,
    "wait_for_everyone": wait_for_everyone,
}
"""The functions that replace those of ``accelerate.utils`` when ``enable`` is called."""

CLASSES: dict[str, type] = {
    "CannotPadNestedTensorWarning": CannotPadNestedTensorWarning,
    "DistributedOperationException": DistributedOperationException,
    "TensorInformation": TensorInformation,
}
"""The classes that replace accelerate's: warnings, errors and results of these functions."""

_NOT_SERVED = {"DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"}
_SERVED = {kind.value for kind in DistributedType} - _NOT_SERVED

_lock = threading.RLock()
_places: list[tuple[Any, str, Any]] = []
"""The places that ``enable`` has changed: module or class, name, accelerate's object. Empty if not enabled."""


class Enabled:
    """The result of ``enable``. As a context manager it restores accelerate's functions after its block."""

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_first:
            disable()


def enable() -> Enabled:
    """Replace accelerate's functions by easydist's, in every module that has imported them.

    Law: afterwards ``accelerate.utils.gather(x) == easydist.gather(x)``, and likewise for every name that both have,
    for the methods of ``Accelerator``, and for transformers' ``Trainer``, which call these names. ``save`` and ``load``
    remain accelerate's, since their arguments differ. ``find_batch_size`` raises if there is no tensor, as accelerate's
    code expects. ``pad_across_processes`` checks ``pad_index`` only for leaves that a rank has to pad, because
    ``Trainer`` pads masks with -100, too. ``Accelerator.gather_for_metrics`` guesses as accelerate's does, and warns
    once if it has no loader to rely on. Data that accelerate's cannot handle (text or arrays beside tensors), and calls
    with an argument of ``easydist.gather_for_metrics``, are passed to that.

    Call it on all ranks or on none, before or after ``Accelerator()``. A second call is harmless. ``disable()``, or the
    end of a ``with enable():`` block, restores accelerate's functions; an inner block leaves that to the outer one.

    accelerate's own functions still run if easydist does not support its state (DeepSpeed, FSDP, Megatron, XLA), and if
    accelerate believes that it is alone in a world of several processes.

    Example:
        >>> import torch, easydist.accelerate
        >>> from accelerate import Accelerator
        >>> with easydist.accelerate.enable():
        ...     Accelerator(cpu=True).gather({"loss": torch.ones(2), "step": 3})
        {'loss': tensor([1., 1.]), 'step': tensor([3])}

    Returns:
        A context manager, which need not be used.

    Raises:
        ImportError: accelerate is not installed.

    Cost: no exchange; one look at every name of every loaded module.

    Source: accelerate's ``Accelerator`` and ``accelerate.utils``.
    """
    with _lock:
        is_first = not _places
        _places.extend(_replace({id(theirs): (theirs, ours) for theirs, ours in _pairs()}))
        as_inside(_folder(), True)
    return Enabled(is_first)


def disable() -> None:
    """Restore accelerate's functions wherever ``enable`` has replaced them, and in modules loaded since.

    A function that was stored elsewhere (in a partial, say) calls accelerate's again.

    Cost: as for ``enable``; nothing if it is not enabled.
    """
    with _lock:
        if not _places:
            return
        for owner, name, theirs in _places:
            setattr(owner, name, theirs)
        _places.clear()
        _replace({id(ours): (ours, theirs) for theirs, ours in _pairs() if not isinstance(ours, type)})
        as_inside(_folder(), False)


def _replace(pairs: dict[int, tuple[Any, Any]]) -> list[tuple[Any, str, Any]]:
    """Replace the first of a pair by the second wherever a module or ``Accelerator`` has it; return the places."""
    found = [
        (owner, name, *pairs[id(value)])
        for owner in _owners()
        for name, value in list(vars(owner).items())
        if id(value) in pairs
    ]
    for owner, name, _, new in found:
        setattr(owner, name, new)
    return [(owner, name, old) for owner, name, old, _ in found]


def _owners() -> Iterator[Any]:
    """Yield the objects that may have a name of accelerate's: its ``Accelerator``, and all modules but ours."""
    from accelerate import Accelerator

    loaded: list[tuple[str, Any]] = list(sys.modules.items())
    yield Accelerator
    for name, module in loaded:
        if isinstance(module, ModuleType) and name.partition(".")[0] != "easydist":
            yield module


@functools.cache
def _pairs() -> list[tuple[Any, Any]]:
    """Return all replacements, as (accelerate's, ours)."""
    from accelerate import Accelerator, utils
    from accelerate.utils import operations

    theirs = {name: getattr(utils, name) for name in FUNCTIONS}
    ours = FUNCTIONS | {"find_batch_size": _strict(FUNCTIONS["find_batch_size"], theirs["find_batch_size"])}
    functions = [(theirs[name], _choosing(ours[name], theirs[name])) for name in FUNCTIONS]
    method = Accelerator.gather_for_metrics
    functions.append((method, _choosing(_guessing(method), method)))
    return functions + [(getattr(operations, name), cls) for name, cls in CLASSES.items()]


def _choosing(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours, or accelerate's if easydist does not support accelerate's state.

    It is pickled under accelerate's name, where ``enable`` puts it: a prepared loader holds ``slice_tensors``.
    """

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if _is_served() else theirs)(*args, **kwargs)

    call.__module__, call.__qualname__ = theirs.__module__, theirs.__qualname__
    return call


def _strict(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return our ``find_batch_size``, which raises accelerate's error if there is no tensor."""

    @functools.wraps(ours)
    def find_batch_size(data: Any) -> Any:
        found = ours(data)
        return theirs(data) if found is None else found

    return find_batch_size


def _guessing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Accelerator.gather_for_metrics``: accelerate's guess over our verbs if it makes one, else ours."""

    @functools.wraps(theirs)
    def method(accelerator: Any, input_data: Any, use_gather_object: bool = False, **options: Any) -> Any:
        kind = "samples" if use_gather_object else _kind(input_data)
        if not options and kind != "tensors" and accelerator.num_processes == 1:
            return input_data
        if options or kind == "columns":
            return gather_for_metrics(input_data, use_gather_object, **options)
        if accelerator.num_processes > 1:
            _warn_without_loader(accelerator.gradient_state)
        if kind == "samples":
            input_data = list(input_data)  # accelerate's gather_object assumes this for everything
        return theirs(accelerator, input_data, kind == "samples")

    return method


def _kind(data: Any) -> str:
    """Classify data: accelerate's ``gather_for_metrics`` supports ``"tensors"`` and ``"samples"``, not ``"columns"``.

    An empty list has no samples: other ranks may have some in theirs.

    Example:
        >>> _kind({"x": torch.ones(2)}), _kind(["a", "b"]), _kind({"x": torch.ones(2), "id": ["a", "b"]})
        ('tensors', 'samples', 'columns')
    """
    is_samples = isinstance(data, list | tuple) and not any(isinstance(item, torch.Tensor) for item in data)
    if is_samples and not data:
        return "samples"
    with contextlib.suppress(TypeError):
        structure.recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
        return "tensors"
    return "samples" if is_samples else "columns"


def _warn_without_loader(state: Any) -> None:
    """Warn once that accelerate does not know which samples are repeated, and keeps all."""
    loader = state.active_dataloader
    if loader is None or (
        loader.end_of_dataloader and loader.remainder == -1 and not getattr(loader, "_drop_last", False)
    ):
        _warn_once()


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "gather_for_metrics: no loader prepared with accelerate tells which samples are repeated, so all rows are "
        "kept, as accelerate does; pass loader=, total= or indices= (easydist.gather_for_metrics) to keep each "
        "sample once",
        stacklevel=5,
    )


def _is_served() -> bool:
    """True if ours are enabled, and accelerate's state, if there is one, describes the same world as ours."""
    from accelerate import PartialState

    kind = PartialState._shared_state.get("distributed_type")
    if not _places or kind is None:
        return bool(_places)
    return kind.value in _SERVED and (kind.value != "NO" or ProcessState().num_processes == 1)


def _folder() -> str:
    return os.path.dirname(str(importlib.import_module("accelerate").__file__)) + os.sep
