"""Parameters that are spread over ranks, whole for a while."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn

from easydist.agree import Call, agree, report
from easydist.calling import calling
from easydist.collectives import broadcast
from easydist.state import communicators

__all__ = ["GatheredParameters"]


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's and accelerate's name
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Inside the body the parameters are whole on every rank; a change made on ``modifier_rank`` reaches every shard.

    Takes FSDP2 parameters (``DTensor``, any placement), FSDP1 modules, DeepSpeed ZeRO-3 parameters where DeepSpeed is
    installed, and plain parameters, which are whole already (``modifier_rank``'s values are then given to all).

    Args:
        params: A parameter, several, or a module (all its parameters).
        modifier_rank: The rank whose changes count; None means that changes are thrown away.
        fwd_module: For DeepSpeed: the module whose forward needs the parameters.
        enabled: Do nothing if False.

    Raises:
        RemoteError: The body raised on another rank; no shard was changed. Where it raised, its own exception goes on.
        TypeError: Something is no parameter, or a parameter of an FSDP1 module was passed instead of the module.
        RuntimeError: A parameter cannot be made whole, because a weak reference to it exists.

    Example:
        >>> import torch, easydist
        >>> layer = torch.nn.Linear(2, 1)
        >>> with easydist.GatheredParameters(layer.weight, modifier_rank=0):
        ...     _ = torch.nn.init.zeros_(layer.weight)

    Cost: three header exchanges; one all-gather per parameter; with ``modifier_rank`` one broadcast of all of them.

    Source: DeepSpeed's and accelerate's ``GatheredParameters``.
    """
    if not enabled:
        yield
        return
    comms = communicators()
    modules: list[nn.Module] = []
    parameters: list[nn.Parameter] = []

    def prepare() -> Call:
        if modifier_rank is not None and not 0 <= modifier_rank < comms.size:
            raise ValueError(f"modifier_rank={modifier_rank} is not a rank: there are {comms.size}, counted from 0")
        _sort(params, modules, parameters)
        return Call({"modifier_rank": modifier_rank, "modules": len(modules), "parameters": len(parameters)})

    with calling(comms, "GatheredParameters"):
        agree(comms, "GatheredParameters", prepare)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_summoned(module, modifier_rank))
        zero = [p for p in parameters if hasattr(p, "ds_id")]
        if zero:
            stack.enter_context(_deepspeed(zero, modifier_rank, fwd_module))
        stack.enter_context(_whole([p for p in parameters if not hasattr(p, "ds_id")], modifier_rank))
        yield


def _sort(params: Any, modules: list[nn.Module], parameters: list[nn.Parameter]) -> None:
    """FSDP1 modules, and single parameters, each once."""
    items: list[Any] = [params] if isinstance(params, torch.Tensor | nn.Module) else list(params)
    found: list[nn.Parameter] = []
    for item in items:
        if isinstance(item, nn.Module) and _is_fsdp1(item):
            modules.append(item)
        else:
            found += item.parameters() if isinstance(item, nn.Module) else [item]
    for item in found:
        if not isinstance(item, torch.Tensor):
            raise TypeError(f"GatheredParameters takes parameters and modules, got {type(item).__name__}")
        if getattr(item, "_is_flat_param", False) or getattr(item, "_fsdp_flattened", False):
            raise TypeError("GatheredParameters: a parameter of an FSDP1 module is a part of a shard; pass the module")
    parameters += {id(parameter): parameter for parameter in found}.values()


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a module can be one only if somebody imported the class
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules())


def _is_sharded(parameter: torch.Tensor) -> bool:
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(parameter, dtensor.DTensor)


@contextmanager
def _summoned(module: nn.Module, modifier_rank: int | None) -> Iterator[None]:
    """The parameters of an FSDP1 module; ``summon_full_params`` writes each rank's shard back."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = FullyShardedDataParallel.summon_full_params(module, writeback=True)
    with whole, _kept(list(module.parameters()), modifier_rank):
        yield


@contextmanager
def _whole(params: list[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Plain parameters, and DTensors, which trade places with their full tensors."""
    sharded = [parameter for parameter in params if _is_sharded(parameter)]
    others = [_full(parameter) for parameter in sharded]
    fault: Exception | None = None
    try:
        _trade(sharded, others)
    except RuntimeError as error:  # somebody holds a weak reference, or the parameter's place in a graph
        fault = error
    try:
        report(communicators(), "GatheredParameters", fault)
    except Exception:
        if fault is None:
            _trade(sharded, others)
        raise
    try:
        with _kept(params, modifier_rank):
            yield
    finally:
        _trade(sharded, others)
    for parameter, full in zip(sharded, others, strict=True):
        _write_shard(parameter, full)


@contextmanager
def _kept(params: list[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Whole parameters that end as ``modifier_rank`` leaves them; as they were without one, or where a body raised."""
    before = [parameter.detach().clone() for parameter in params]
    comms = communicators()
    try:
        try:
            yield
        except BaseException as error:
            with suppress(Exception):  # the others raise RemoteError; here the body's own exception goes on
                report(comms, "GatheredParameters", error)
            raise
        report(comms, "GatheredParameters")
        if modifier_rank is not None:
            broadcast([parameter.data for parameter in params], modifier_rank)
            before = [parameter.detach() for parameter in params]
    finally:
        for parameter, values in zip(params, before, strict=True):
            parameter.data.copy_(values)


def _full(parameter: Any) -> torch.Tensor:
    """The full tensor, as a parameter with which the sharded one can trade places."""
    full = parameter.detach().full_tensor().clone().as_subclass(_whole_type(cast(Any, type(parameter))))
    full._is_param = True  # what makes isinstance(…, nn.Parameter) true
    return cast(torch.Tensor, full.requires_grad_(parameter.requires_grad))


@functools.cache
def _whole_type(dtensor: Any) -> Any:
    """A plain tensor class, laid out as DTensor is in memory: ``swap_tensors`` asks for equal slots."""
    body = {
        "__slots__": dtensor.__dict__["__slots__"],
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "__deepcopy__": lambda self, memo: _plain(self, self.clone()),
        "__reduce_ex__": lambda self, protocol: _plain(self, self).__reduce_ex__(protocol),
    }
    return type("WholeParameter", (torch.Tensor,), body)


def _plain(parameter: torch.Tensor, values: torch.Tensor) -> nn.Parameter:
    """An ordinary parameter, for copies that live on after the body."""
    return nn.Parameter(values.detach().as_subclass(torch.Tensor), parameter.requires_grad)


def _trade(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Every reference to one of the first becomes a reference to its partner, and the other way round; all or none."""
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for one, other in zip(first, second, strict=True):
            torch.utils.swap_tensors(one, other)
            done.append((one, other))
    except RuntimeError:
        for one, other in done:
            torch.utils.swap_tensors(one, other)
        raise


def _write_shard(parameter: Any, full: torch.Tensor) -> None:
    """Each rank cuts its own shard out of the full tensor; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(
        full.detach().as_subclass(torch.Tensor), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().detach().copy_(shard.to_local())


def _deepspeed(
    params: list[nn.Parameter], modifier_rank: int | None, fwd_module: nn.Module | None
) -> AbstractContextManager[Any]:
    import deepspeed  # a parameter has ds_id only where DeepSpeed made it

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(params, modifier_rank, fwd_module)
    return context
