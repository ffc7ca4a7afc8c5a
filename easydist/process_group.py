"""A ``torch.distributed`` backend over shared memory, for ranks of one host: ``init_process_group("easydist_shm")``.

Importing this module registers it. ``import easydist`` alone does not: as soon as any backend is registered, torch
leaves the default backend of ``init_process_group("cpu:gloo")`` undefined.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from easydist.base import torch_groups
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.torch_backend.group import SharedMemoryGroup
from easydist.torch_backend.rendezvous import NAME, met
from easydist.transport.backends.solo import Solo

__all__ = ["NAME", "SharedMemoryGroup"]


def _create(options: Any, _: object) -> SharedMemoryGroup:
    """Create a group with this backend, for torch."""
    if getattr(options, "enable_reconfigure", False):  # from torch 2.14
        raise ValueError(f"{NAME}: enable_reconfigure is for other backends; easydist.recover() renews its groups")
    store, size, timeout = options.store, options.group_size, options.timeout
    if size == 1:
        return SharedMemoryGroup(Solo(), store, timeout, Monitor(0, 1, timeout.total_seconds()))
    rendezvous, backend = met(store, options.group_rank, size, timeout, _known(options.global_ranks_in_group))
    group = SharedMemoryGroup(backend, rendezvous.store, timeout, rendezvous.monitor)
    rendezvous.look_to(group.guard)
    return group


def _known(ranks: Sequence[int]) -> dict[int, Peer]:
    """Return the other processes of a new group, as far as they are known from the default group.

    Those of a broken group have left it, or recover it, and count as gone there.
    """
    default = dist.GroupMember.WORLD
    if not isinstance(default, SharedMemoryGroup) or default.monitor.broken is not None:
        return {}
    peers = default.monitor.peers
    return {i: peers[rank] for i, rank in enumerate(ranks) if rank in peers}


def _at_exit() -> None:
    """Wait for collectives that other ranks may need, as gloo does, unless an exception ends the process."""
    if not hasattr(sys, "last_value"):
        for group in torch_groups.known():
            if isinstance(group, SharedMemoryGroup):
                group.finish()


atexit.register(_at_exit)
if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
