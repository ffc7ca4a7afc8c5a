"""The collectives of the tensor-parallel group, under vLLM's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from easydist.parallel.parallel_state import get_tp_group
from easydist.typing import Tree


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    """Call ``get_tp_group().all_reduce``: sum a tensor over the ranks that share a layer."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Call ``get_tp_group().all_gather``: concatenate the tensors of the ranks that share a layer."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Call ``get_tp_group().reduce_scatter``: sum a tensor over the ranks that share a layer, and return a part."""
    return get_tp_group().reduce_scatter(input_, dim)


def tensor_model_parallel_gather(input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
    """Call ``get_tp_group().gather``: concatenate the tensors of the ranks that share a layer, on one of them."""
    return get_tp_group().gather(input_, dst, dim)


def broadcast_tensor_dict(tensor_dict: dict[Any, Any] | None = None, src: int = 0) -> Tree:
    """Call ``get_tp_group().broadcast_tensor_dict``; return ``tensor_dict`` if there is no default process group."""
    return get_tp_group().broadcast_tensor_dict(tensor_dict, src) if dist.is_initialized() else tensor_dict
