from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from easydist.comms import Native, TorchComm
from easydist.comms.communicators import gloo_beside
from easydist.testing import check_comm, distributed
from easydist.testing.conformance import default_group, solo


def native(rank, world_size):
    """The backend for nccl and its like; gloo has the same collectives."""
    return TorchComm(Native(dist.group.WORLD, torch.device("cpu"), "gloo"))


def beside(rank, world_size):
    """The gloo group that carries headers for a group without a CPU backend."""
    return TorchComm(gloo_beside(dist.group.WORLD, PrefixStore("beside", dist.group.WORLD.get_group_store())))


def sub_group(rank, world_size):
    """A new group with its ranks in the same order."""
    from easydist.state import communicators

    return communicators(dist.new_group(list(range(world_size)))).met().control


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_over_the_default_group(world_size):
    check_comm(default_group, [world_size])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "world_size"), [(native, 1), (native, 3), (beside, 2), (sub_group, 3)])
def test_over_other_groups(make, world_size):
    check_comm(make, [world_size])


def test_solo():
    check_comm(solo, [1])


@distributed(world_size=2)
def test_arguments_of_other_types_are_refused_before_anything_begins():
    comm = default_group(0, 2)
    with pytest.raises(TypeError, match=r"^timeout must be a timedelta, got 5$"):
        comm.barrier(async_op=False, timeout=5)
    with pytest.raises(TypeError, match="float"):
        comm.broadcast(torch.ones(2), 0.5, async_op=False)
    comm.barrier(async_op=False, timeout=timedelta(seconds=20))
