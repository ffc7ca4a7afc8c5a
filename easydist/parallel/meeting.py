"""A gloo group of processes that meet in a store of their own; torch's world does not know it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from easydist.groups.communicators import unregistered


def gloo_group(store: Store, rank: int, size: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Connect the members.

    Args:
        store: The same for all members.
        rank: This process among them.
        size: How many they are.
        name: The same on all of them; used once in this store.
        timeout: How long connecting may take, and each call of the group.

    Raises:
        RuntimeError: They did not all come.
    """
    own = PrefixStore(f"easydist/{name}", store)
    group: Any = dist.ProcessGroup(own, rank, size)
    backend = ProcessGroupGloo(own, rank, size, timeout)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(f"easydist/{name}")
    unregistered.add(group)
    return group  # type: ignore[no-any-return]
