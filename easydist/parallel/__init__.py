"""Groups for tensor, pipeline and data parallel engines: ``GroupCoordinator``, with vLLM's names."""

from easydist.messages.transfers import Transfer
from easydist.parallel.coordinator import GroupCoordinator
from easydist.parallel.groups import ParallelGroups, parallel_groups, rank_lists
from easydist.parallel.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    in_the_same_node_as,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from easydist.parallel.tensors import GraphCaptureContext

__all__ = [
    "GraphCaptureContext",
    "GroupCoordinator",
    "ParallelGroups",
    "Transfer",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "get_dp_group",
    "get_ep_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "in_the_same_node_as",
    "init_distributed_environment",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "parallel_groups",
    "rank_lists",
]
