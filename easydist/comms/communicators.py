"""Which communicators a group has: one for control on the CPU, one for the data of each device type."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from easydist.comms.c10d import Gloo, over
from easydist.comms.comm import TorchComm
from easydist.comms.solo import Solo


class Communicators:
    """The communicators of one group.

    Attributes:
        control: Carries headers, sizes and objects; its tensors are on the CPU.
        rank: This process in the group.
        size: How many processes the group has.
    """

    def __init__(self, control: TorchComm, group: dist.ProcessGroup | None = None) -> None:
        self.control = control
        self.rank, self.size = control.get_rank(), control.get_size()
        self._group = group
        self._data = {control.get_device().type: control}

    def data(self, device: torch.device) -> TorchComm:
        """The communicator for tensors on ``device``; the control communicator where the group has none for it."""
        comm = self._data.get(device.type)
        if comm is None:
            backend = None if self._group is None else over(self._group, device)
            comm = self._data[device.type] = TorchComm(backend, self.control.get_name()) if backend else self.control
        return comm


_CACHE: dict[dist.ProcessGroup, Communicators] = {}
SOLO = Communicators(TorchComm(Solo(), "solo"))
"""The communicators of a process that is alone."""


def of_group(group: dist.ProcessGroup) -> Communicators:
    """The communicators of ``group``, made at the first call; on every rank of the group in the same order."""
    found = _CACHE.get(group)
    if found is None:
        for gone in [known for known in _CACHE if known not in dist.distributed_c10d._world.pg_map]:
            del _CACHE[gone]  # a destroyed group would hold its connections as long as it is known here
        name = group.group_name
        found = _CACHE[group] = Communicators(TorchComm(over(group) or gloo_beside(group), name), group)
    return found


def of_comm(comm: TorchComm) -> Communicators:
    """The communicators of a group that is given by a communicator on the CPU.

    Raises:
        ValueError: ``comm`` is not on the CPU, so that headers cannot travel on it.
    """
    if comm.get_device().type != "cpu":
        raise ValueError(f"group= needs a communicator on the CPU, or the ProcessGroup itself; got {comm!r}")
    return Communicators(comm)


def gloo_beside(group: dist.ProcessGroup) -> Gloo:
    """A gloo group with the members of ``group``, which has none of its own."""
    store = PrefixStore("easydist/control", group.get_group_store())
    gloo: Any = ProcessGroupGloo(store, group.rank(), group.size(), dist.distributed_c10d.default_pg_timeout)
    return Gloo(gloo, torch.device("cpu"), "gloo")
