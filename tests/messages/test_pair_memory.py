"""Memory that two ranks of a host make for their large data."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import easydist
from easydist import CollectiveTimeout, DisagreementError, ProcessState
from easydist.messages import pair_memory
from easydist.messages.pair_memory import PairMemory
from easydist.parallel import GroupCoordinator
from easydist.shm.segment import Segment
from easydist.testing import distributed
from easydist.transport.backends.shm import Shm

NUMEL = 1 << 20
"""The elements of 4 MB."""


def moved(rank, src, dst, numel=NUMEL):
    """Move data between two ranks; return the backend of the memory that this one shares with the other, or None."""
    data = torch.arange(numel, dtype=torch.float32)
    if rank == src:
        easydist.send_tensor_dict({"x": data}, dst)
    elif rank == dst:
        assert torch.equal(easydist.recv_tensor_dict(src)["x"], data)
    pair = ProcessState().communicators().pairs.get(src + dst - rank)
    return pair and pair.backend


@contextlib.contextmanager
def counted(cls, name, error=None):
    """Count the calls of a method, which raises if there is an error."""
    calls, method = [], getattr(cls, name)

    def counting(*args):
        calls.append(args)
        if error is not None:
            raise error
        return method(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, name, counting)
        yield calls


@distributed(world_size=[2, 3])
def test_two_ranks_make_it_once_for_both_directions(rank, world_size):
    easydist.wait_for_everyone()  # from now on, frames go through shared memory
    with counted(Segment, "create") as made, counted(Segment, "attach") as attached:
        assert moved(rank, 0, 1, 9_000) is None  # not worth it
        backend = moved(rank, 0, 1)
        for numel in (9_000, 40_000, NUMEL, 3 * NUMEL + 1):
            for src in (0, 1):
                assert moved(rank, src, 1 - src, numel) is backend
        assert [len(made), len(attached), backend is not None] == [[1, 0, 1], [0, 1, 1], [0, 0, 0]][rank]
    assert easydist.gather(rank).tolist() == [*range(world_size)]
    if world_size == 3:
        assert (moved(rank, 2, 0) is None) == (rank == 1)


@pytest.mark.parametrize(("who", "method"), [(0, "create"), (1, "attach")])
@distributed(world_size=2)
def test_data_arrives_without_it_where_one_of_them_cannot_map_it(rank, who, method):
    easydist.wait_for_everyone()
    fault = counted(Segment, method, OSError("no room")) if rank == who else contextlib.nullcontext([0])
    with fault as tried:
        assert [moved(rank, 0, 1) for _ in range(3)] == [None] * 3
    assert len(tried) == 1
    assert moved(rank, 1, 0) is not None  # the other way they can


@distributed(world_size=2)
def test_a_quarter_of_shared_memory_stays_free_for_the_rest(rank):
    easydist.wait_for_everyone()
    with pytest.MonkeyPatch.context() as patch, counted(Segment, "create") as made:
        patch.setattr(pair_memory, "spare", lambda: pair_memory._NBYTES - 1)
        assert moved(rank, 0, 1) is None
    assert not made


@distributed(world_size=2)
def test_a_refused_message_makes_none(rank):
    easydist.wait_for_everyone()
    tree = {"x": torch.ones(1 if rank else NUMEL)}
    with pytest.raises(DisagreementError):
        easydist.recv_tensor_dict(0, into=tree) if rank else easydist.send_tensor_dict(tree, 1)
    assert ProcessState().communicators().pairs[1 - rank].backend is None
    assert moved(rank, 0, 1) is not None


@distributed(world_size=2)
def test_ranks_that_reconnect_make_it_anew(rank):
    """Rank 1 accepts a message, and takes its data when rank 0 has given up."""
    easydist.wait_for_everyone()
    before, store, recv = moved(rank, 0, 1), dist.group.WORLD.get_group_store(), Shm.recv

    def late(*args):
        store.wait(["gave up"])
        return recv(*args)

    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Shm, "recv", late)
        large = {"x": torch.ones(NUMEL)}
        with pytest.raises(CollectiveTimeout, match="send_tensor_dict"):
            easydist.recv_tensor_dict(0) if rank else easydist.send_tensor_dict(large, 1, timeout=0.5)
        store.set("gave up", "")
    with pytest.raises(RuntimeError):  # else it might yet write to the caller's tensors
        before.send(torch.ones(1), 1 - rank)
    assert moved(rank, 0, 1) not in (None, before)


@distributed(world_size=2)
def test_none_is_offered_for_what_is_posted(rank):
    """Nobody would move it in memory while no rank waits."""
    group, data = GroupCoordinator([[0, 1]], rank, "gloo", False), torch.arange(NUMEL)
    group.barrier()
    with counted(PairMemory, "offer") as offers:
        if rank == 0:
            [handle] = group.isend_tensor_dict({"x": data})
            handle.wait()
        else:
            assert torch.equal(group.recv_tensor_dict()["x"], data)
    assert not offers
    group.destroy()
