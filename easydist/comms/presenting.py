"""Communicators as process groups that ``torch.distributed`` knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from easydist.comms.comm import TorchComm
from easydist.comms.gloo_group import GlooGroup
from easydist.comms.own_gloo import OwnGloo
from easydist.liveness.monitor import Monitor

_c10d: Any = dist.distributed_c10d


def make_default(comm: TorchComm) -> None:
    """Make a communicator's ranks the world of ``torch.distributed``.

    Args:
        comm: The communicator of all ranks.
    """
    group = group_of(comm, "0", range(comm.get_size()))
    _c10d._update_default_pg(group)


def group_of(comm: TorchComm, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group over a communicator's connections; after ``wrap``, the wrapped one.

    Args:
        comm: The communicator.
        name: The group's name. If it is taken, a number is added.
        ranks: The members, as ranks of the default group.
    """
    world = _c10d._world
    own: Any = getattr(comm.backend, "_group", None)
    if own is not None and own in world.pg_map:
        known: dist.ProcessGroup = own
        return known
    store = comm.store if comm.store is not None else HashStore()
    group: dist.ProcessGroup = _made(comm, PrefixStore("presented", store))
    _register(group, _free(name, world), ranks, store, comm)
    return group


def _made(comm: TorchComm, store: Store) -> Any:
    backend = comm.backend
    if isinstance(backend, OwnGloo):
        return GlooGroup(store, comm.get_rank(), comm.get_size(), backend.process_group)
    if comm.get_device().type != "cpu":
        return backend._group  # type: ignore[attr-defined]
    from easydist.torch_backend.group import SharedMemoryGroup  # few need it

    size = comm.get_size()
    monitor = comm.monitor or Monitor(comm.get_rank(), size, comm.time_limit.total_seconds())
    group: Any = SharedMemoryGroup(backend, store, comm.time_limit, monitor)
    comm.look_to(group.guard)
    return group


def _free(name: str, world: Any) -> str:
    taken, count, free = set(world.pg_names.values()), 1, name
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free


def _register(group: Any, name: str, ranks: Sequence[int], store: Store, comm: TorchComm) -> None:
    """Add the group to the tables of ``torch.distributed``, as ``new_group`` does."""
    world = _c10d._world
    kind, tag = comm.get_device().type, f"ptd:{name}"
    group._set_group_name(name)
    group._set_group_desc(comm.get_name() or name)
    world.pg_map[group] = (comm.get_backend(), store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = f"{kind}:{comm.get_backend()}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    _c10d._register_process_group(name, group)
