"""Swapping parameters of FSDP2 (``DTensor``) with their full tensors, and back.

FSDP2 itself would interfere: its hooks gather the shards before a forward pass, and expect shards after
``load_state_dict``. They are disabled while the parameters are whole.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from easydist.base.torch_private import disabled_function, missing, swap_impl

_FSDP = "torch.distributed.fsdp._fully_shard"


def is_sharded(parameter: torch.Tensor) -> bool:
    """True if this is a ``DTensor``."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(parameter, dtensor.DTensor)


def full(parameter: Any) -> torch.Tensor:
    """Return the full tensor, as a parameter that the sharded one can be swapped with.

    Raises:
        NotImplementedError: This torch has no function for that.
    """
    if disabled_function is None or swap_impl is None:
        raise NotImplementedError(f"GatheredParameters: torch {torch.__version__} lacks {', '.join(missing())}")
    full = parameter.detach().full_tensor().clone().as_subclass(_whole_type(cast(Any, type(parameter))))
    full._is_param = True  # makes isinstance(…, nn.Parameter) true
    return cast(torch.Tensor, full.requires_grad_(parameter.requires_grad))


@functools.cache
def _whole_type(dtensor: Any) -> Any:
    """Return a plain tensor class with the slots of DTensor, because ``swap_tensors`` requires equal slots."""
    body = {
        "__slots__": dtensor.__dict__["__slots__"],
        "__torch_function__": disabled_function,
        "__deepcopy__": lambda self, memo: _plain(self, self.clone()),
        "__reduce_ex__": lambda self, protocol: _plain(self, self).__reduce_ex__(protocol),
    }
    return type("WholeParameter", (torch.Tensor,), body)


def _plain(parameter: torch.Tensor, values: torch.Tensor) -> nn.Parameter:
    """Return an ordinary parameter, for copies that outlive the body."""
    return nn.Parameter(values.detach().as_subclass(torch.Tensor), parameter.requires_grad)


def trade(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Swap each of the first tensors with its partner, wherever they are referenced; swap all of them or none.

    Not by ``torch.utils.swap_tensors``: it ends the backward pass of a graph that holds one of the tensors, and such a
    graph keeps the right one, to which the parameter returns.

    Raises:
        RuntimeError: There is a weak reference to one of the first tensors.
    """
    for one in first:
        if weakref.getweakrefs(one):
            raise RuntimeError(
                f"Cannot swap a parameter of shape {tuple(one.shape)} because it has weakref associated with it"
            )
    for one, other in zip(first, second, strict=True):
        _swap(one, other)


def write_shard(parameter: Any, full: torch.Tensor) -> None:
    """Write this rank's part of the full tensor to its shard; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(
        full.detach().as_subclass(torch.Tensor), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().detach().copy_(shard.to_local())


def trade_back(sharded: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> None:
    """Undo ``trade``, even if the body has left a weak reference, or a graph that holds a whole parameter.

    The backward pass of such a graph raises an error, because its gradients would go to a tensor that is gone.
    """
    for one, other in zip(sharded, whole, strict=True):
        if one.requires_grad and one._use_count() > 1:  # type: ignore[attr-defined]
            torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_too_late)
        _swap(one, other)


def _too_late(gradients: Any) -> None:
    raise RuntimeError(
        "GatheredParameters: backward() was called after the body for a forward pass in the body, and the parameters "
        "are sharded again; call backward() in the body, or make the forward pass after it"
    )


def _swap(one: Any, other: Any) -> None:
    """Swap as ``torch.utils.swap_tensors`` does, but also if something else holds one of the tensors."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    slots = [slot for slot in type(one).__dict__["__slots__"] if hasattr(one, slot) or hasattr(other, slot)]
    held = [{slot: getattr(tensor, slot) for slot in slots if hasattr(tensor, slot)} for tensor in (one, other)]
    for tensor, old, new in ((one, held[0], held[1]), (other, held[1], held[0])):
        for slot in old:
            delattr(tensor, slot)
        for slot, value in new.items():
            setattr(tensor, slot, value)
    swap_impl(one, other)


def _fsdp_modules() -> list[nn.Module]:
    """Return all modules of this process that FSDP2 manages."""
    composable = sys.modules.get("torch.distributed._composable_state")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if composable is None or fsdp is None:
        return []  # fully_shard has not been called
    known = list(getattr(composable, "_module_state_mapping", ()))
    return [module for module in known if isinstance(module, fsdp.FSDPModule)]


def modules_of(params: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Return the modules under FSDP2 that own one of the parameters directly."""
    ids = {id(parameter) for parameter in params}
    every = {id(part): part for module in _fsdp_modules() for part in module.modules()}
    return [module for module in every.values() if any(id(p) in ids for p in module._parameters.values())]


def reshard(module: nn.Module) -> None:
    """Let FSDP2 reshard its parameters: after a forward pass without a backward pass some are still unsharded."""
    known = {id(one) for one in _fsdp_modules()}
    for part in module.modules():
        if id(part) in known:
            cast(Any, part).reshard()


def check_resharded(params: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that are temporary copies, which FSDP2 has gathered for a forward pass.

    Raises:
        TypeError: A parameter is such a copy.
    """
    plain = {id(parameter) for parameter in params if not is_sharded(parameter)}
    for module in _fsdp_modules() if plain else ():
        used = plain.intersection(map(id, module.parameters()))
        if used:
            cast(Any, module).reshard()
            if not used <= set(map(id, module.parameters())):
                raise TypeError(
                    "GatheredParameters: FSDP2 has gathered a parameter for a forward pass, and drops this copy "
                    "of it; pass the module, or take the parameters after module.reshard()"
                )


@contextmanager
def fsdp_aside(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Disable FSDP2's hooks while these parameters are whole.

    Forward passes use the parameters as they are. A module with only some whole parameters cannot run one: FSDP2 would
    gather the shards again, and replace the whole parameters by the result.
    """
    ids = {id(parameter) for parameter in params}
    with ExitStack() as stack:
        for module in _fsdp_modules() if ids else ():
            inside = [parameter for parameter in module.parameters() if is_sharded(parameter) or id(parameter) in ids]
            if all(id(parameter) not in ids for parameter in inside):
                continue
            if all(id(parameter) in ids for parameter in inside):
                _quiet(module._forward_pre_hooks, stack)
                _quiet(module._forward_hooks, stack)
            else:
                stack.callback(module.register_forward_pre_hook(_partly_whole, prepend=True).remove)
        for module in modules_of(cast(Any, params)):
            _quiet(module._load_state_dict_post_hooks, stack)
        yield


def _quiet(hooks: MutableMapping[int, Any], stack: ExitStack) -> None:
    """Replace FSDP2's hooks by a function that does nothing, until the stack is closed."""
    for key, hook in list(hooks.items()):
        if str(getattr(hook, "__module__", "")).startswith(_FSDP):
            hooks[key] = _nothing
            stack.callback(_restore, hooks, key, hook)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _restore(hooks: MutableMapping[int, Any], key: int, hook: Any) -> None:
    if key in hooks:  # otherwise the body has removed the hook
        hooks[key] = hook


def _partly_whole(module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        f"GatheredParameters: a forward pass of {type(module).__name__} in the body needs all of its parameters whole; "
        "pass the module"
    )
