"""The battery over what ``new_comm`` makes."""

from datetime import timedelta

import pytest
import torch
from launching import within

from easydist.comms import new_comm
from easydist.testing import check_comm


def made(backend):
    return new_comm(backend, torch.device("cpu"), "battery", timeout=timedelta(seconds=within(60)))


def gloo(rank, world_size):
    return made("gloo")


def shm(rank, world_size):
    return made("shm")


def part(rank, world_size):
    """A sub-communicator in shared memory."""
    return made("shm").split(list(range(world_size)), "part")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "world_size"), [(gloo, 2), (shm, 1), (shm, 3), (part, 2)])
def test_communicators_pass_the_battery(make, world_size):
    check_comm(make, [world_size])
