"""The context in which sharded parameters are whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb, jointly, meet, run
from easydist.base.arguments import UNSET, either, hiding
from easydist.data.backing import absence, mark_written
from easydist.data.leaves import unwritable
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.broadcast import broadcast
from easydist.verbs.ranks import check_rank
from easydist.verbs.sharded import (
    check_resharded,
    fsdp_aside,
    full,
    is_sharded,
    modules_of,
    reshard,
    trade,
    trade_back,
    write_shard,
)

__all__ = ["GatheredParameters"]


class GatheredParameters(ContextDecorator, AbstractContextManager[None]):
    """The context in which parameters are whole on every rank; a change on ``modifier_rank`` reaches every shard.

    It takes FSDP2 parameters (``DTensor``, any placement), FSDP1 modules, DeepSpeed ZeRO-3 parameters if DeepSpeed is
    installed, and plain parameters, which are whole already (all ranks then get ``modifier_rank``'s values).

    In the body, ``load_state_dict`` and forward passes of an FSDP2 module work on the whole parameters, if all
    parameters of the module are whole. An instance can be used again after its body has ended.

    Args:
        *models: Modules (all their parameters), parameters, or lists of them. With a single one, the argument order of
            DeepSpeed and accelerate works, too: ``GatheredParameters(params, modifier_rank, fwd_module, enabled)``.
        modifier_rank: The rank that makes the changes; with None all changes are discarded.
        fwd_module: For DeepSpeed: the module with the forward pass that needs the parameters.
        enabled: False to do nothing.
        params: Another name for a single one of ``models``.
        group: The ranks that take part: those that share the parameters; ``modifier_rank`` is a rank inside it.
        timeout: The time limit of each exchange of easydist's; None is the group's.

    Raises:
        RemoteError: The body raised an exception on another rank; no shard was changed. On that rank the body's own
            exception is raised.
        TypeError: An argument is not a parameter, or one without data of its own (on the meta device, not initialized,
            sparse, …), or a parameter of an FSDP1 module was passed instead of the module.
        ValueError: A parameter cannot be written, such as an expanded one, or ``modifier_rank`` is not a rank here.
        RuntimeError: A parameter cannot be made whole because a weak reference to it exists; or it was replaced by
            another parameter in the body, or got another shape there; or the body of this instance has not ended yet.

    Example:
        >>> import torch, easydist
        >>> layer = torch.nn.Linear(2, 1)
        >>> with easydist.GatheredParameters(layer, modifier_rank=0):
        ...     _ = torch.nn.init.zeros_(layer.weight)

    Cost: three header exchanges; one all-gather per sharded parameter; with ``modifier_rank`` also the cost of one
    ``broadcast`` of all parameters.

    Source: DeepSpeed's and accelerate's ``GatheredParameters``.
    """

    @hiding("params")
    def __init__(
        self,
        *models: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
        params: Any = UNSET,
        group: Group = None,
        timeout: Timeout | None = None,
    ) -> None:
        if params is not UNSET or not models:
            models = (either("GatheredParameters", "models", models or UNSET, "params", params),)
        if len(models) > 1 and not isinstance(models[1], torch.Tensor | nn.Module | Iterable):
            models, modifier_rank, fwd_module, enabled = _in_their_order(models, modifier_rank, fwd_module, enabled)
        self._params = [[*model] if isinstance(model, Iterator) else model for model in models]
        self._modifier_rank, self._fwd_module, self._enabled = modifier_rank, fwd_module, enabled
        self._group, self._timeout = group, timeout
        self._body: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        body = self._gathered()
        body.__enter__()
        self._body = body

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        body, self._body = self._body, None
        assert body is not None
        return body.__exit__(kind, error, trace)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        if not self._enabled:
            yield
            return
        modifier_rank = self._modifier_rank
        changes = _Changes(modifier_rank, self._group, self._timeout)
        opening = _Opening(self._params, modifier_rank, self._body is not None)
        modules, parameters = run(opening, communicators(self._group), self._timeout)
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(_summoned(module, changes))
            zero = [p for p in parameters if hasattr(p, "ds_id")]
            if zero:
                stack.enter_context(_deepspeed(zero, modifier_rank, self._fwd_module))
            stack.enter_context(_whole([p for p in parameters if not hasattr(p, "ds_id")], changes))
            yield


class _Changes(NamedTuple):
    """The rank that makes the changes, and the arguments of the exchanges."""

    modifier_rank: int | None
    group: Group
    timeout: Timeout | None


_Arguments = tuple[tuple[Any, ...], "int | None", "nn.Module | None", bool]


def _in_their_order(
    models: tuple[Any, ...], modifier_rank: int | None, fwd_module: nn.Module | None, enabled: bool
) -> _Arguments:
    """Return the arguments if they came in the order of DeepSpeed and accelerate: the second one is not a model."""
    theirs = ("params", "modifier_rank", "fwd_module", "enabled")
    if len(models) > len(theirs):
        raise TypeError(f"GatheredParameters: takes {', '.join(theirs)}, or models alone, got {len(models)} arguments")
    given = dict(zip(theirs, models, strict=False))
    if modifier_rank is not None or ("fwd_module" in given and fwd_module is not None):
        raise TypeError("GatheredParameters: an argument was passed by position and by name")
    fwd_module, enabled = given.get("fwd_module", fwd_module), given.get("enabled", enabled)
    return models[:1], given["modifier_rank"], fwd_module, enabled


_Sorted = tuple[list[nn.Module], list[nn.Parameter]]
"""FSDP1 modules, and single parameters without duplicates."""


class _Opening(Verb[_Sorted]):
    """The verb in which all ranks agree on the parameters to make whole."""

    operation = "GatheredParameters"

    def __init__(self, params: Sequence[Any], modifier_rank: int | None, is_open: bool) -> None:
        self._params, self._modifier_rank, self._is_open = params, modifier_rank, is_open

    def prepare(self, comms: Communicators) -> Call:
        modifier_rank = self._modifier_rank
        if self._is_open:
            raise RuntimeError("GatheredParameters: the body of this instance has not ended yet; make another instance")
        modifier_rank = check_rank(comms, self.operation, "modifier_rank", modifier_rank)
        self._sorted = modules, parameters = _sort(self._params)
        check_resharded(parameters)
        return Call({"modifier_rank": modifier_rank, "modules": len(modules), "parameters": len(parameters)})

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> _Sorted:
        return self._sorted


def _sort(params: Sequence[Any]) -> _Sorted:
    modules: list[nn.Module] = []
    found: list[nn.Parameter] = []
    for item in _opened(params):
        if isinstance(item, nn.Module) and _is_fsdp1(item):
            modules.append(item)
        elif isinstance(item, nn.Module):
            reshard(item)
            found += item.parameters()
        else:
            found.append(item)
    for item in found:
        _check(item)
    return modules, [*{id(parameter): parameter for parameter in found}.values()]


def _check(item: Any) -> None:
    """Refuse what is not a parameter, or cannot be made whole and written back."""
    if not isinstance(item, torch.Tensor):
        raise TypeError(f"GatheredParameters takes parameters and modules, got {type(item).__name__}")
    if is_sharded(item):
        if item.is_meta:
            what = f"{_described(item)} is on the meta device"
            raise TypeError(f"GatheredParameters: {what}; call model.to_empty(device=…) first")
    elif reason := absence(item):
        raise TypeError(f"GatheredParameters: {_described(item)} {reason}")
    elif reason := unwritable(item):
        raise ValueError(f"GatheredParameters: {_described(item)} {reason}, so it cannot be written in place")
    if getattr(item, "_is_flat_param", False) or getattr(item, "_fsdp_flattened", False):
        raise TypeError("GatheredParameters: a parameter of an FSDP1 module is a part of a shard; pass the module")


def _described(parameter: torch.Tensor) -> str:
    with suppress(RuntimeError):  # one that is not initialized has no shape, nor has a nested tensor
        return f"a parameter of shape {tuple(parameter.shape)}"
    return "a parameter"


def _opened(params: Sequence[Any]) -> Iterator[Any]:
    """Yield parameters and modules one by one, including those in lists."""
    for item in params:
        if isinstance(item, torch.Tensor | nn.Module):
            yield item
        elif isinstance(item, Iterable):
            yield from item
        else:
            yield item  # the caller refuses it by its type


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without an import of the class no module can be one
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules())


@contextmanager
def _summoned(module: nn.Module, changes: _Changes) -> Iterator[None]:
    """Make the parameters of an FSDP1 module whole; ``summon_full_params`` writes each rank's shard back."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = FullyShardedDataParallel.summon_full_params(module, writeback=True)
    with whole:
        params = list(module.parameters())
        with _kept(params, params, changes):
            yield


@contextmanager
def _whole(params: list[nn.Parameter], changes: _Changes) -> Iterator[None]:
    """Make DTensors whole by swapping them with their full tensors; plain parameters are whole already."""
    sharded = [parameter for parameter in params if is_sharded(parameter)]
    plain = [parameter for parameter in params if not is_sharded(parameter)]
    others = [full(parameter) for parameter in sharded]
    fault: Exception | None = None
    try:
        trade(sharded, others)
    except RuntimeError as error:  # there is a weak reference to a parameter
        fault = error
    try:
        meet(communicators(changes.group), "GatheredParameters", fault, changes.timeout)
    except Exception:
        if fault is None:
            trade_back(sharded, others)
        raise
    try:
        with fsdp_aside(sharded), _kept(params, plain, changes):
            yield
    finally:
        trade_back(sharded, others)
    if changes.modifier_rank is not None:
        for parameter, whole in zip(sharded, others, strict=True):
            write_shard(parameter, whole)
        mark_written(sharded)  # a backward pass that needs the values from before has to notice


@contextmanager
def _kept(params: list[nn.Parameter], plain: list[nn.Parameter], changes: _Changes) -> Iterator[None]:
    """Give all ranks ``modifier_rank``'s parameters after the body.

    Without one, or after an error, restore the plain ones; the others are full tensors, which are not used any more.
    """
    shapes = [parameter.shape for parameter in params]
    before = [parameter.detach().clone() for parameter in plain]
    comms = communicators(changes.group)
    try:
        with jointly(comms, "GatheredParameters", changes.timeout), _no_replacing(params):
            yield
            _check_shapes(params, shapes)
        if changes.modifier_rank is not None:
            # Not ``detach``: a forward pass in the body may still need its backward pass, which the write would forbid.
            whole = [parameter.data for parameter in params]
            broadcast(whole, group_src=changes.modifier_rank, group=changes.group, timeout=changes.timeout)
            before = [parameter.detach() for parameter in plain]
    finally:
        for parameter, values in zip(plain, before, strict=True):
            if parameter.shape == values.shape:
                parameter.data.copy_(values)
            else:  # the body has given it other data
                parameter.data = values


def _check_shapes(params: Sequence[nn.Parameter], before: Sequence[torch.Size]) -> None:
    for parameter, shape in zip(params, before, strict=True):
        if parameter.shape != shape:
            raise RuntimeError(
                f"GatheredParameters: a parameter of shape {tuple(shape)} has the shape {tuple(parameter.shape)} "
                "after the body; change its values in place"
            )


@contextmanager
def _no_replacing(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Refuse to replace these parameters in their modules: the values of the new ones would be lost at the end."""
    ours = {id(parameter) for parameter in params}
    places = [(module, dict(module._parameters)) for module in modules_of(params)]

    def check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        old = module._parameters.get(name)
        if id(old) in ours and parameter is not old:
            raise RuntimeError(_replaced(module, name))

    handle = register_module_parameter_registration_hook(check)
    replaced = []
    try:
        yield
    finally:
        handle.remove()
        for module, before in places:
            names = [n for n, old in before.items() if id(old) in ours and module._parameters.get(n) is not old]
            if names:  # replaced in a way that the hook does not see: deleted first, or set in _parameters
                replaced.append(_replaced(module, names[0]))
                now = {name: one for name, one in module._parameters.items() if name not in names}
                module._parameters.clear()
                module._parameters.update({name: now.pop(name, old) for name, old in before.items()} | now)
    if replaced:
        raise RuntimeError(replaced[0])


def _replaced(module: nn.Module, name: str) -> str:
    return (
        f"GatheredParameters: {name} of {type(module).__name__} was replaced by another parameter in the body, whose "
        f"values would be lost; write into it instead: with torch.no_grad(): module.{name}.copy_(values)"
    )


def _deepspeed(
    params: list[nn.Parameter], modifier_rank: int | None, fwd_module: nn.Module | None
) -> AbstractContextManager[Any]:
    import deepspeed  # a parameter has ds_id only if DeepSpeed made it

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(params, modifier_rank, fwd_module)
    return context
