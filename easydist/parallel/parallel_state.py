"""The groups of this process's engine, under vLLM's names: created once, available everywhere."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from easydist import memory
from easydist.agreement.calling import seconds
from easydist.base import torch_groups
from easydist.groups.connecting import connect
from easydist.liveness.peer import host_id
from easydist.parallel.coordinator import GroupCoordinator
from easydist.parallel.groups import ParallelGroups, parallel_groups
from easydist.parallel.tensors import GraphCaptureContext
from easydist.state import ProcessState, communicators
from easydist.state.groups import backend_for, current_rank
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
    """Create the default process group, if there is none, and the group of the whole world.

    Args:
        world_size: The number of ranks; -1 uses the launcher's.
        rank: The rank of this process; -1 uses the launcher's.
        distributed_init_method: The address where the ranks meet if ``rank`` is given. All that follows ``file://`` is
            the path, as in vLLM; torch would end it at ``#`` or ``?``.
        local_rank: The rank on this host; -1 uses the launcher's.
        backend: As in ``init_process_group``; None chooses one that fits the machine.
        timeout: The time limit of a call; None is torch's default.
    """
    if rank >= 0 and not dist.is_initialized():
        limit = None if timeout is None else timedelta(seconds=seconds(timeout, "init_distributed_environment"))
        fitting = backend or backend_for(ProcessState().device)
        wait = (limit or torch_groups.default_timeout()).total_seconds()
        join = functools.partial(dist.init_process_group, fitting, timeout=limit, world_size=world_size, rank=rank)
        connect(lambda: join(**_meeting(distributed_init_method, world_size)), wait)
    elif not dist.is_initialized():
        ProcessState(backend=backend, timeout=timeout)
    if not _exists("world"):
        state = ProcessState()
        local = state.local_process_index if local_rank < 0 else local_rank
        ranks = [[*range(state.num_processes)]]
        _made["world"] = GroupCoordinator(ranks, local, "gloo", False, group_name="world")


def _meeting(method: str, world_size: int) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` that say where the ranks meet."""
    if method.startswith("file://") and world_size > 0:  # torch says that the size is missing
        return {"store": dist.FileStore(method.removeprefix("file://"), world_size)}
    return {"init_method": method}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    *,
    data_parallel_size: int | None = None,
) -> None:
    """Create the groups that ``get_tp_group`` and its like return. All ranks of the world call it.

    Args:
        tensor_model_parallel_size: The number of ranks that share a layer.
        pipeline_model_parallel_size: The number of ranks that have successive layers.
        prefill_context_model_parallel_size: The number of ranks that share the tokens of a prompt.
        decode_context_model_parallel_size: The number of ranks that share the cache of a sequence; None is 1.
        backend: The backend for tensors on the accelerator; None is the default group's, and on the CPU gloo.
        data_parallel_size: The number of model replicas; None uses the remaining ranks.

    Raises:
        RuntimeError: The groups exist already.
        TypeError: The third argument is a backend, as it was in older versions of vLLM.
        ValueError: The product of the sizes is not the world size, or the decode context is no divisor. If that is so
            on some ranks only, a RemoteError on all.
        DisagreementError: The ranks have passed different sizes.
    """
    if model_parallel_is_initialized():
        raise RuntimeError("the model parallel groups exist already; call destroy_model_parallel first")
    third: Any = prefill_context_model_parallel_size
    if isinstance(third, str):
        raise TypeError(
            "initialize_model_parallel: the third parameter is prefill_context_model_parallel_size, as in vLLM 0.33; "
            f"pass backend={third!r}"
        )
    groups: ParallelGroups = parallel_groups(
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        dp=data_parallel_size,
        pcp=prefill_context_model_parallel_size,
        dcp=1 if decode_context_model_parallel_size is None else decode_context_model_parallel_size,
        backend=backend or _backend_of_world(),
        use_message_queue_broadcaster=True,
    )
    kept = {"world": _made["world"]} if _exists("world") else {}
    if kept:
        groups["world"].destroy()
    _made.update({**groups, **kept})


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Call ``initialize_model_parallel`` if there are no groups yet; else check that they have these sizes.

    Args:
        tensor_model_parallel_size: As there.
        pipeline_model_parallel_size: As there.
        prefill_context_model_parallel_size: As there.
        decode_context_model_parallel_size: As there.
        backend: As there.

    Raises:
        ValueError: The groups exist, and have other sizes.
    """
    sizes = {
        "tp": tensor_model_parallel_size,
        "pp": pipeline_model_parallel_size,
        "pcp": prefill_context_model_parallel_size,
        "dcp": 1 if decode_context_model_parallel_size is None else decode_context_model_parallel_size,
    }
    if not model_parallel_is_initialized():
        tp, pp, pcp, dcp = sizes.values()
        initialize_model_parallel(tp, pp, pcp, dcp, backend)
        return
    for name, size in sizes.items():
        if (found := _made[name].world_size) != size:
            raise ValueError(f"the group {name!r} exists with {found} ranks, not {size}; call destroy_model_parallel")


def init_world_group(ranks: list[int], local_rank: int, backend: str) -> GroupCoordinator:
    """Return a coordinator of these ranks of the world; all of them call it.

    Args:
        ranks: The ranks.
        local_rank: The rank on its node.
        backend: The backend of the group.
    """
    return GroupCoordinator([ranks], local_rank, backend, use_device_communicator=False, group_name="world")


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_device_communicator: bool = True,
    use_all2all: bool = False,
) -> GroupCoordinator:
    """Call ``GroupCoordinator`` with these arguments, whose order there is another one, and return it."""
    queues = use_message_queue_broadcaster
    return GroupCoordinator(group_ranks, local_rank, backend, use_device_communicator, queues, group_name, use_all2all)


def _backend_of_world() -> str | None:
    """Return the backend for tensors on the accelerator; None without an accelerator."""
    state = ProcessState()
    return None if state.device.type == "cpu" else state.backend


def model_parallel_is_initialized() -> bool:
    """True if ``initialize_model_parallel`` has created the groups."""
    return _exists("tp")


def _exists(name: str) -> bool:
    """True if there is such a group; users may have destroyed it themselves."""
    return name in _made and not _made[name].is_destroyed


def _group(name: str, maker: str) -> GroupCoordinator:
    if not _exists(name):
        raise RuntimeError(f"the group {name!r} does not exist; call {maker} first")
    return _made[name]


def get_world_group() -> GroupCoordinator:
    """Return the group of all ranks."""
    return _group("world", "init_distributed_environment")


def get_tp_group() -> GroupCoordinator:
    """Return the tensor-parallel group of this rank."""
    return _group("tp", "initialize_model_parallel")


def get_pp_group() -> GroupCoordinator:
    """Return the pipeline-parallel group of this rank."""
    return _group("pp", "initialize_model_parallel")


def get_dp_group() -> GroupCoordinator:
    """Return the data-parallel group of this rank."""
    return _group("dp", "initialize_model_parallel")


def get_ep_group() -> GroupCoordinator:
    """Return the expert-parallel group of this rank."""
    return _group("ep", "initialize_model_parallel")


def get_pcp_group() -> GroupCoordinator:
    """Return the group of ranks that share the tokens of a prompt with this one."""
    return _group("pcp", "initialize_model_parallel")


def get_dcp_group() -> GroupCoordinator:
    """Return the group of ranks that share the cache of a sequence with this one."""
    return _group("dcp", "initialize_model_parallel")


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    """Return the size of ``get_dcp_group()`` and this rank's position; ``(1, 0)`` without the group or if disabled.

    Args:
        enabled: False for ``(1, 0)``.
    """
    if not enabled or not _exists("dcp"):
        return 1, 0
    return get_dcp_group().world_size, get_dcp_group().rank_in_group


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's position in its pipeline-parallel group."""
    return get_pp_group().rank_in_group


def get_node_count() -> int:
    """Return the number of hosts of the world."""
    return len(set(get_world_group().hosts))


def is_global_first_rank() -> bool:
    """True if this process is rank 0 of the world; also in a process that belongs to none."""
    return current_rank() == 0


def is_local_first_rank() -> bool:
    """True if this process is rank 0 on its host; also in a process that belongs to no world."""
    return (get_world_group().local_rank if _exists("world") else ProcessState().local_process_index) == 0


@contextmanager
def graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    """Provide one stream on which the tensor-, pipeline- and data-parallel group record; see ``graph_capture`` there.

    Args:
        device: The accelerator; the coordinators know theirs.
    """
    with (
        get_tp_group().graph_capture() as context,
        get_pp_group().graph_capture(context),
        get_dp_group().graph_capture(context),
    ):
        yield context


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's position in its tensor-parallel group."""
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    """Return the size of the tensor-parallel group."""
    return get_tp_group().world_size


def destroy_model_parallel() -> None:
    """Destroy the groups of the model, but not the world's."""
    for name in [name for name in _made if name != "world"]:
        _made.pop(name).destroy()


def destroy_distributed_environment() -> None:
    """Destroy all groups, including the world's, and the default process group."""
    destroy_model_parallel()
    if "world" in _made:
        _made.pop("world").destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Destroy all groups, and release memory that is not in use.

    Args:
        shutdown_ray: Shut Ray down in this process, too.
    """
    destroy_distributed_environment()
    if shutdown_ray:
        import ray

        ray.shutdown()
    gc.collect()
    memory.release()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def in_the_same_node_as(pg: Group, source_rank: int = 0) -> list[bool]:
    """Return for each rank of a group whether it is on the host of ``source_rank``. All ranks of the group call it.

    Args:
        pg: The group.
        source_rank: A rank inside the group.

    Raises:
        ValueError: ``source_rank`` of a rank is not a rank of the group. All ranks raise.

    Example:
        >>> from easydist.parallel import in_the_same_node_as
        >>> in_the_same_node_as(None)
        [True]
    """
    told = gather_object([(host_id(), source_rank)], weights_only=True, group=pg)
    for _, source in told:  # here, so that all ranks raise
        check_rank(communicators(pg), "in_the_same_node_as", "source_rank", source)
    return [host == told[source_rank][0] for host, _ in told]
