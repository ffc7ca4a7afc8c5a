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
    kind = dist.ProcessGroup.BackendType.GLOO
    group: Any = dist.ProcessGroup(PrefixStore("group", store), rank, size)
    group._set_default_backend(kind)
    where = {"hostname": host} if host else {}
    gloo = gloo_connections(PrefixStore("gloo", store), rank, size, timeout, **where)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_group_name(name)
    return group  # type: ignore[no-any-return]


def gloo_connections(store: Store, rank: int, size: int, timeout: timedelta, **where: str) -> Any:
    """Connect the members by gloo alone, as a backend that belongs to no group.

    Args:
        store: As in ``gloo_group``, and so are the following.
        rank: Likewise.
        size: Likewise.
        timeout: Likewise.
        where: ``hostname``, this process's own address, or ``interface``; else gloo chooses.

    Raises:
        RuntimeError: They did not all come.
    """
    options = _Gloo._Options()
    options._timeout = timeout
    options._devices = [_Gloo.create_device(**where) if where else _Gloo.create_default_device()]
    return _Gloo(store, rank, size, options)


_Gloo: Any = ProcessGroupGloo
"""Not checked: what stubs say depends on the build of torch."""
