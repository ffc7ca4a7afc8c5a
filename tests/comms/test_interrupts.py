"""Ctrl-C while a communicator waits: it is heard at once, and the other ranks hear who was interrupted."""

import contextlib
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import within

from easydist.comms import CommRemoteError, new_comm
from easydist.errors import RemoteError
from easydist.testing import distributed

CPU = torch.device("cpu")


@contextlib.contextmanager
def ctrl_c_soon():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@distributed(world_size=2)
def test_ctrl_c_ends_a_wait_and_the_other_ranks_hear_who_was_interrupted(rank, backend):
    comm = new_comm(backend, CPU, "main", timeout=timedelta(seconds=60))
    comm.barrier(False)
    if rank == 1:
        with ctrl_c_soon():
            comm.recv(torch.ones(1), 1 - rank, False)
    else:
        with pytest.raises(RuntimeError, match="rank 1 was interrupted") as info:
            comm.recv(torch.ones(1), 1 - rank, False)
        assert isinstance(info.value, CommRemoteError)
        assert isinstance(info.value, RemoteError)
    with pytest.raises(RuntimeError, match="is broken"):
        comm.barrier(False)
    comm.finalize()
    assert new_comm(backend, CPU, "main").split([0, 1], "next").get_size() == 2


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@distributed(world_size=2)
def test_ranks_meet_after_ctrl_c_has_ended_the_wait_of_one_for_the_others(rank, backend):
    if rank == 0:
        with ctrl_c_soon():
            new_comm(backend, CPU, "main", timeout=timedelta(seconds=within(30)))
    dist.barrier()
    comm = new_comm(backend, CPU, "main", timeout=timedelta(seconds=within(30)))
    comm.barrier(False)
    comm.finalize()
