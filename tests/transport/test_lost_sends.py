"""Messages that gloo has lost: a wait for one ends nonetheless."""

import os
import threading
import traceback
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from easydist.base import gloo
from easydist.comms import CommPeerLost, new_comm
from easydist.testing import distributed
from easydist.transport.backends.c10d import Gloo
from easydist.transport.backends.waits import LOST


class Closed:
    """A group whose connections are all closed: it refuses messages, and closes nothing."""

    def recv(self, *args):
        raise RuntimeError("Connection closed by peer")


def soon(call):
    threading.Timer(0.1, call).start()


@distributed(world_size=2)
def test_another_thread_ends_a_wait(rank):
    group = dist.new_group()
    if rank == 0:
        work = group.send([torch.ones(1)], 1, 5)
        soon(lambda: gloo.end_wait(work))
        assert work.wait(timedelta(seconds=60)) is False
    dist.barrier()
    gloo.end_wait(dist.barrier(async_op=True))  # no message that is being sent: nothing happens
    dist.barrier()


@distributed(world_size=2)
def test_breaking_the_connections_ends_a_wait_for_a_message_that_gloo_has_lost(rank):
    backend = Gloo(dist.new_group(), torch.device("cpu"), "gloo")
    if rank == 0:
        work = backend.send(torch.ones(1), 1)
        backend._group = Closed()
        soon(backend.disconnect)
        with pytest.raises(RuntimeError, match=LOST) as error:
            work.wait(timedelta(seconds=60))
        assert error.value.peer == 1
        assert not backend.gloo_waits.under_way
    dist.barrier()


@distributed(world_size=2)
def test_a_communicator_ends_a_wait_for_a_message_to_a_rank_that_has_ended(rank):
    comm = new_comm("gloo", torch.device("cpu"), "lost", timeout=timedelta(seconds=60))
    dist.barrier()
    if rank == 0:
        with (
            mock.patch.object(comm.monitor.peers[1], "has_ended", return_value=True),  # but its connection stays
            pytest.raises(CommPeerLost, match=r"rank 1 .* has ended") as error,
        ):
            comm.send(torch.ones(1), 1, async_op=False)
        assert LOST in "".join(traceback.format_exception(error.value))  # the limit did not end it
    dist.barrier()


def test_a_torch_without_the_methods_is_left_alone(monkeypatch):
    monkeypatch.setattr(gloo, "_CLASSES", (*gloo._CLASSES, "no such class"))
    gloo._methods.cache_clear()
    assert not gloo.can_end_waits()
    gloo.end_wait(os)  # not even looked at
    monkeypatch.undo()
    gloo._methods.cache_clear()
    assert gloo.can_end_waits()
