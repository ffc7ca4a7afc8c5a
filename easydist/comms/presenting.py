"""Communicators as process groups that ``torch.distributed`` knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from easydist.base import torch_groups
from easydist.comms.comm import TorchComm
from easydist.comms.gloo_group import GlooGroup
from easydist.comms.own_gloo import OwnGloo
from easydist.liveness.monitor import Monitor


def make_default(comm: TorchComm) -> None:
    """Make a communicator's ranks the world of ``torch.distributed``.

    Args:
        comm: The communicator of all ranks.
    """
    group = group_of(comm, "0", range(comm.get_size()))
    torch_groups.set_default(group)


def group_of(comm: TorchComm, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group over a communicator's connections; after ``wrap``, the wrapped one.

    Args:
        comm: The communicator.
        name: The group's name. If it is taken, a number is added.
        ranks: The members, as ranks of the default group.
    """
    own: Any = getattr(comm.backend, "_group", None)
    if own is not None and torch_groups.is_known(own):
        known: dist.ProcessGroup = own
        return known
    store = comm.store if comm.store is not None else HashStore()
    group: dist.ProcessGroup = _made(comm, PrefixStore("presented", store))
    free, backend = torch_groups.free_name(name), (comm.get_backend(), comm.get_device().type)
    torch_groups.present(group, free, ranks, backend, store, comm.get_name() or free)
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
