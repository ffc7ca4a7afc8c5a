"""The groups of this process's engine, by vLLM's names: made once, and asked for anywhere."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from easydist.agreement.calling import seconds
from easydist.liveness.peer import host_id
from easydist.parallel.coordinator import GroupCoordinator
from easydist.parallel.groups import ParallelGroups, parallel_groups
from easydist.state import ProcessState, communicators
from easydist.typing import Group, Timeout
from easydist.verbs.objects import gather_object
from easydist.verbs.ranks import check_rank

_made: dict[str, GroupCoordinator] = {}


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Create the default process group, where there is none, and the group of the whole world.

    Args:
        world_size: -1 is what the launcher says.
        rank: Likewise.
        distributed_init_method: Where the ranks meet, if ``rank`` is given.
        local_rank: -1 is what the launcher says.
        backend: As in ``init_process_group``; None fits the machine.
        timeout: How long a call may take; None is torch's default.
    """
    if rank >= 0 and not dist.is_initialized():
        limit = None if timeout is None else timedelta(seconds=seconds(timeout, "init_distributed_environment"))
        method = distributed_init_method
        dist.init_process_group(backend or "gloo", method, timeout=limit, world_size=world_size, rank=rank)
    elif not dist.is_initialized():
        ProcessState(backend=backend, timeout=timeout)
    if "world" not in _made:
        state = ProcessState()
        local = state.local_process_index if local_rank < 0 else local_rank
        ranks = [[*range(state.num_processes)]]
        _made["world"] = GroupCoordinator(ranks, local, "gloo", False, group_name="world")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    backend: str | None = None,
    *,
    data_parallel_size: int | None = None,
) -> None:
    """Make the groups that ``get_tp_group`` and its like return; all ranks of the world call it.

    Args:
        tensor_model_parallel_size: Ranks that share a layer.
        pipeline_model_parallel_size: Ranks that have layers one after another.
        backend: For tensors on the accelerator.
        data_parallel_size: None is what is left.

    Raises:
        RuntimeError: They were made already.
        ValueError: The sizes do not multiply to that of the world.
    """
    if model_parallel_is_initialized():
        raise RuntimeError("the model parallel groups exist already; call destroy_model_parallel first")
    groups: ParallelGroups = parallel_groups(
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        dp=data_parallel_size,
        backend=backend,
        use_message_queue_broadcaster=True,
    )
    if "world" in _made:
        groups["world"].destroy()
    _made.update({**groups, **_made})


def model_parallel_is_initialized() -> bool:
    """True if ``initialize_model_parallel`` has made the groups."""
    return "tp" in _made


def _group(name: str, maker: str) -> GroupCoordinator:
    if name not in _made:
        raise RuntimeError(f"the group {name!r} does not exist yet; call {maker} first")
    return _made[name]


def get_world_group() -> GroupCoordinator:
    """The group of all ranks."""
    return _group("world", "init_distributed_environment")


def get_tp_group() -> GroupCoordinator:
    """The tensor-parallel group of this rank."""
    return _group("tp", "initialize_model_parallel")


def get_pp_group() -> GroupCoordinator:
    """The pipeline-parallel group of this rank."""
    return _group("pp", "initialize_model_parallel")


def get_dp_group() -> GroupCoordinator:
    """The data-parallel group of this rank."""
    return _group("dp", "initialize_model_parallel")


def get_ep_group() -> GroupCoordinator:
    """The expert-parallel group of this rank."""
    return _group("ep", "initialize_model_parallel")


def get_tensor_model_parallel_rank() -> int:
    """This rank in its tensor-parallel group."""
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks the tensor-parallel group has."""
    return get_tp_group().world_size


def destroy_model_parallel() -> None:
    """Take down the groups of the model; the world's stays."""
    for name in [name for name in _made if name != "world"]:
        _made.pop(name).destroy()


def destroy_distributed_environment() -> None:
    """Take down the group of the world, and the default process group."""
    destroy_model_parallel()
    if "world" in _made:
        _made.pop("world").destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


def in_the_same_node_as(pg: Group, source_rank: int = 0) -> list[bool]:
    """For each rank of a group, whether it is on the host of one of them; all ranks of the group call it.

    Args:
        pg: The group.
        source_rank: The rank inside the group whose host it is.

    Example:
        >>> from easydist.parallel import in_the_same_node_as
        >>> in_the_same_node_as(None)
        [True]
    """
    check_rank(communicators(pg), "source_rank", source_rank)
    hosts = gather_object([host_id()], weights_only=True, group=pg)
    return [host == hosts[source_rank] for host in hosts]
