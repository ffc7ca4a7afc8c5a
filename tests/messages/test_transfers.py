"""Messages under way whose parts end in a thread."""

import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from test_entries import ways

import easydist
from easydist import CollectiveTimeout, ProcessState
from easydist.messages.transfers import Part, Transfer
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed
from easydist.transport.work import ENDED

KINDS = pytest.mark.parametrize("kind", ["shm", "gloo"])


class Fails:
    """A message that does not arrive."""

    def wait(self, timeout=None):
        raise RuntimeError("Timed out")


class Held:
    """A message that arrives once ``comes`` is set."""

    def __init__(self):
        self.is_awaited, self.comes = threading.Event(), threading.Event()

    def wait(self, timeout=None):
        self.is_awaited.set()
        self.comes.wait()


def transfer_of(rank, *parts):
    """Return a message under way once both ranks have connected."""
    easydist.gather(rank)
    store = dist.group.WORLD.get_group_store()
    store.set(f"connected/{rank}", "")
    store.wait(["connected/0", "connected/1"])
    return Transfer(ProcessState().communicators(), "irecv", 1 - rank, parts)


@distributed(world_size=2)
def test_a_message_that_fails_in_its_thread_raises_at_each_wait(rank):
    transfer = transfer_of(rank, Part(ENDED if rank else Fails(), torch.empty(4)))
    while not transfer.is_completed():
        pass
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(CollectiveTimeout, match="irecv"):
            transfer.wait()


@distributed(world_size=2)
def test_the_memory_of_a_part_is_released_before_the_next_one_arrives(rank):
    held = Held()
    first, last = Part(ENDED, torch.empty(4)), Part(held, torch.empty(4))
    memory = weakref.ref(first.memory)
    transfer = transfer_of(rank, first, last)
    del first
    assert not transfer.is_completed()
    held.is_awaited.wait()
    assert memory() is None
    held.comes.set()
    transfer.wait()
    easydist.gather(rank)  # a message from a rank that has left counts as completed


@distributed(world_size=2)
def test_a_rank_that_has_waited_for_handles_learns_that_the_other_one_has_given_up(rank):
    pair, store = GroupCoordinator([[0, 1]], rank, "gloo", False), dist.group.WORLD.get_group_store()
    if rank == 0:
        for handle in [pair.isend_object(step, 1) for step in range(3)]:
            handle.wait()
        store.wait(["given up"])
        with pytest.raises(CollectiveTimeout, match="recv_object"):
            pair.send_object("too late", 1)
        pair.send_object("next", 1)
    else:
        assert [pair.recv_object(0) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CollectiveTimeout):
            easydist.recv_object(src=0, group=pair, timeout=0.1)
        store.set("given up", "")
        assert pair.recv_object(0) == "next"
    pair.destroy()


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("late", [0, 1])
@distributed(world_size=2)
def test_messages_under_way_during_a_call_of_all_ranks_count_for_both(late, kind, rank):
    with ways(kind, rank):
        pair = GroupCoordinator([[0, 1]], rank, "gloo", False)
        for _ in range(2):
            for step in range(3) if rank == 0 else ():
                pair.isend_object(step, 1)
            pair.barrier()
            assert rank == 0 or [pair.recv_object(0) for _ in range(3)] == [0, 1, 2]
            _both_give_up(pair, rank, late)
        pair.destroy()


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("late", [0, 1])
@distributed(world_size=2)
def test_a_message_that_came_while_its_receiver_sent_counts_once(late, kind, rank):
    with ways(kind, rank):
        pair = GroupCoordinator([[0, 1]], rank, "gloo", False)
        if rank == 0:
            handle = pair.isend_object("posted", 1)
            assert pair.recv_object(1) == "asked"
            pair.barrier()
            handle.wait()
        else:
            pair.send_object("asked", 0)
            pair.barrier()
            assert pair.recv_object(0) == "posted"
        if late == 1:
            pair.barrier()  # by which all that have begun are counted again
        _both_give_up(pair, rank, late)
        pair.destroy()


def _both_give_up(pair, rank, late):
    """Let one rank give up a message before the other one sends it: both raise, and the next message arrives."""
    store = dist.group.WORLD.get_group_store()
    if rank == late:
        with pytest.raises(CollectiveTimeout):
            easydist.recv_object(src=1 - late, group=pair, timeout=0.1)
        store.set("given up", "")
        assert pair.recv_object(1 - late) == "next"
        assert store.delete_key("given up")
    else:
        store.wait(["given up"])
        with pytest.raises(CollectiveTimeout, match="recv_object"):
            pair.send_object("too late", late)
        pair.send_object("next", late)
    pair.barrier()
