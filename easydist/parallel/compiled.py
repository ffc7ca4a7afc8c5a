"""The collectives as operators that ``torch.compile`` knows, so that compiled functions call them without a break.

An operator cannot take the coordinator itself, so it gets the coordinator's name and looks it up. The compiler keeps an
operator whose result nobody uses, because the other ranks wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from easydist.agreement.runner import run
from easydist.parallel.collectives import EvenGather
from easydist.parallel.members import named


@torch.library.custom_op("easydist::group_all_reduce", mutates_args=())
def _all_reduce(input_: torch.Tensor, group_name: str) -> torch.Tensor:
    group: Any = named(group_name)
    return _own(group._all_reduce_out_place(input_), input_)


@_all_reduce.register_fake
def _(input_: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(input_, memory_format=torch.contiguous_format)


@torch.library.custom_op("easydist::group_all_gather", mutates_args=())
def _all_gather(input_: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    group: Any = named(group_name)
    gathered: torch.Tensor = run(EvenGather(input_, None, dim), group.communicators)
    return _own(gathered, input_)


@_all_gather.register_fake
def _(input_: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    return input_.new_empty(_resized(input_, dim, input_.shape[dim] * world_size))


@torch.library.custom_op("easydist::group_reduce_scatter", mutates_args=())
def _reduce_scatter(input_: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    group: Any = named(group_name)
    return _own(group._reduce_scatter_out_place(input_, dim), input_)


@_reduce_scatter.register_fake
def _(input_: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    return input_.new_empty(_resized(input_, dim, input_.shape[dim] // world_size))


for _name in ("all_reduce", "all_gather", "reduce_scatter"):
    has_side_effect(getattr(torch.ops.easydist, f"group_{_name}").default)


def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Size:
    shape = [*tensor.shape]
    shape[dim] = size
    return torch.Size(shape)


def _own(result: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that is not the input itself, as the fake implementations promise."""
    return result.clone() if result is input_ else result.contiguous()


def all_reduce(input_: torch.Tensor, group_name: str) -> torch.Tensor:
    """Call ``all_reduce`` of the coordinator with this name."""
    total: torch.Tensor = torch.ops.easydist.group_all_reduce.default(input_.detach(), group_name)
    return total


def all_gather(input_: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    """Call ``all_gather`` of the coordinator with this name."""
    vector = input_.detach().reshape(1) if input_.ndim == 0 else input_.detach()
    gathered: torch.Tensor = torch.ops.easydist.group_all_gather.default(vector, dim, world_size, group_name)
    return gathered


def reduce_scatter(input_: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    """Call ``reduce_scatter`` of the coordinator with this name."""
    operator = torch.ops.easydist.group_reduce_scatter.default
    part: torch.Tensor = operator(input_.detach(), dim, world_size, group_name)
    return part
