"""The default process group of ``torch.distributed``: finding, creating, leaving and destroying it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from easydist import forks
from easydist.state.environment import World, launched

_creating: dict[str, threading.Thread] = {}
"""The thread that is creating the group; empty otherwise."""

_made: list[World] = []
"""One entry for each group that easydist has made in this process."""


class _Survivors(NamedTuple):
    """The group of the survivors of a default group."""

    left_of: dist.ProcessGroup
    group: dist.ProcessGroup
    world: World


_survivors: _Survivors | None = None


def default_group() -> dist.ProcessGroup | None:
    """Return the default group, made by easydist or by others, or the group of its survivors; None if there is none."""
    world = dist.group.WORLD
    return _survivors.group if _survivors is not None and _survivors.left_of is world else world


def current_rank() -> int:
    """Return the rank of this process among all, without making a state, which would choose a device."""
    group = default_group()
    if group is None or (group in forks.groups_of_parents and not forks.is_copy()):
        return launched(has_group=True).rank
    return world_of(group).rank


def is_recovered(group: dist.ProcessGroup) -> bool:
    """True if this is the group of the survivors of a default group."""
    return _survivors is not None and _survivors.group is group


def replace_default_group(group: dist.ProcessGroup, world: World) -> None:
    """Make this the default group of easydist, until torch has another default group.

    Args:
        group: The group of the survivors.
        world: This process among the survivors.
    """
    global _survivors
    assert dist.group.WORLD is not None
    _survivors = _Survivors(dist.group.WORLD, group, world)


def world_of(group: dist.ProcessGroup) -> World:
    """Return the world of an existing group; if LOCAL_RANK and the like are unset, all ranks count as one host's."""
    if _survivors is not None and group is _survivors.group:
        return _survivors.world
    rank, size = group.rank(), group.size()
    with contextlib.suppress(ValueError):  # variables that another launcher has left over; the group counts
        told = launched(has_group=True)
        if (told.rank, told.size) == (rank, size):
            return told
    local_rank = int(os.environ.get("LOCAL_RANK") or rank)
    if size == 1:
        return World("adopted", rank, size, local_rank)
    return World("adopted", rank, size, local_rank, size, tells_local_size=False, node_rank=None, num_nodes=None)


def backend_for(device: torch.device) -> str:
    """Return the backend of a process group that moves tensors on the CPU and on this device.

    Example:
        >>> backend_for(torch.device("cuda")), backend_for(torch.device("cpu"))
        ('cpu:gloo,cuda:nccl', 'gloo')
    """
    native = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl", "hpu": "hccl"}.get(device.type)
    return f"cpu:gloo,{device.type}:{native}" if native else "gloo"


def create(world: World, backend: str, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Create the default group, with all ranks of the world; it is destroyed at exit.

    Raises:
        RuntimeError: This process is a copy of a rank, or another thread is creating the group.
    """
    if forks.is_copy():
        raise RuntimeError(forks.NOT_A_RANK)
    if _creating.setdefault("thread", threading.current_thread()) is not threading.current_thread():
        raise RuntimeError(
            f"the process group is being created in {_creating['thread'].name}, by the first call of this process: "
            "let one thread begin (ProcessState().process_group), then give each thread a group of its own"
        )
    try:
        return _create_alone(world, backend, timeout)
    finally:
        _creating.clear()


def _create_alone(world: World, backend: str, timeout: timedelta | None) -> dist.ProcessGroup | None:
    store = PrefixStore(f"easydist/{len(_made)}", _store(world))  # a second group must not see keys of the first
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    _made.append(world)
    group = dist.group.WORLD
    atexit.register(_take_down, group)
    return group


def _take_down(group: dist.ProcessGroup | None) -> None:
    """Destroy the group that easydist made, unless that has been done."""
    if dist.group.WORLD is group:
        dist.destroy_process_group()


def leave_groups_of_parents() -> None:
    """Make torch forget the parent's groups without ending them, so that this process can make its own."""
    c10d: Any = dist.distributed_c10d
    c10d._update_default_pg(None)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(c10d._world, name).clear()
    c10d._world.group_count = 0
    c10d._unregister_all_process_groups()


@functools.cache
def _store(world: World) -> Store:
    """Return the store in which the ranks meet: under torchrun its agent serves it, else rank 0."""
    has_agent = world.launcher == "torchrun" and all(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
    url = "env://" if has_agent else f"tcp://{world.address}:{world.port}"
    store: Store = next(rendezvous(url, world.rank, world.size))[0]
    return store
