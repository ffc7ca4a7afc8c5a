"""A gloo group of processes that meet in a store of their own; torch's world does not know it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]


def gloo_group(
    store: Store, rank: int, size: int, name: str, timeout: timedelta, host: str | None = None
) -> dist.ProcessGroup:
    """Connect the members.

    Args:
        store: The same for all members, and used for one group only.
        rank: This process among them.
        size: How many they are.
        name: The group's.
        timeout: How long connecting may take, and each call of the group.
        host: This process's own address, where the others can reach it; None: gloo's choice.

    Raises:
        RuntimeError: They did not all come.
    """
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
    kind = dist.ProcessGroup.BackendType.GLOO
    group: Any = dist.ProcessGroup(PrefixStore("group", store), rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo(PrefixStore("gloo", store), rank, size, options))
    group._set_group_name(name)
    return group  # type: ignore[no-any-return]
