"""Memory that two ranks of a host make for their large data."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from counting import recorded

import easydist
from easydist import CollectiveTimeout, DisagreementError, ProcessState
from easydist.groups import sharing
from easydist.messages import pair_memory
from easydist.parallel import GroupCoordinator
from easydist.shm.mailbox import Mailbox
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
    return shared_with(src + dst - rank)


def shared_with(peer):
    """Return the backend of the memory that this rank shares with another one; None if there is none."""
    comms = ProcessState().communicators()
    return comms.pairs[peer].backend(comms) if peer in comms.pairs else None


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
        assert moved(rank, 0, 1, 7_000) is None  # goes with its frame
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


@distributed(world_size=3)
def test_ranks_of_one_of_several_hosts_exchange_data_in_memory(rank):
    with pytest.MonkeyPatch.context() as patch, counted(Shm, "send") as sent:
        patch.setattr(sharing, "by_host", lambda records: [[0, 1], [2]])
        easydist.wait_for_everyone()
        for numel in (40_000, NUMEL):
            moved(rank, 0, 1, numel)
    assert [data.nbytes for _, data, *_ in sent] == ([160_000, 4 * NUMEL] if rank == 0 else [])


@distributed(world_size=2)
def test_a_refused_message_makes_none(rank):
    easydist.wait_for_everyone()
    tree = {"x": torch.ones(1 if rank else NUMEL)}
    with pytest.raises(DisagreementError):
        easydist.recv_tensor_dict(0, into=tree) if rank else easydist.send_tensor_dict(tree, 1)
    assert shared_with(1 - rank) is None
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


@contextlib.contextmanager
def of_two(rank):
    """Return a coordinator whose ranks have met: from now on, frames go through shared memory."""
    group = GroupCoordinator([[0, 1]], rank, "gloo", False)
    group.barrier()
    yield group
    group.destroy()


def told(name, rank):
    """Return when both ranks have come here, which is no call of the group."""
    store = dist.group.WORLD.get_group_store()
    store.set(f"{name} {rank}", "")
    store.wait([f"{name} {rank}" for rank in (0, 1)])


def posted(rank, group, sizes, name):
    """Post messages of both ranks to each other, then receive them; return whether data came through memory, in order.

    Large ones of both ranks are under way at the same time.
    """
    with recorded() as operations:
        handles = [group.isend_tensor_dict({"x": torch.arange(size) + rank + i}) for i, size in enumerate(sizes)]
        told(name, rank)
        for i, size in enumerate(sizes):
            assert torch.equal(group.recv_tensor_dict()["x"], torch.arange(size) + (1 - rank) + i)
        for handle, _ in handles:
            handle.wait()
    return [isinstance(carrier, Shm) for kind, carrier in operations if kind == "recv" and carrier is not None]


@distributed(world_size=2)
def test_two_that_offer_memory_at_the_same_time_use_one(rank):
    """Once they share it, posted data goes through it while there is room; all arrives in order."""
    with of_two(rank) as group:
        sizes = [40_000, 20_000, 40_000]  # of 8 bytes: 320, 160 and 320 KB, of two chunks, one and two
        with pytest.MonkeyPatch.context() as patch:
            # As if both came to that at the same moment. Rank 0 attaches nothing, although the memory of rank 1 stays.
            patch.setattr(Mailbox, "attached", lambda box: None)
            create, kept = Segment.create, list[Segment]()
            patch.setattr(Segment, "create", staticmethod(lambda size: kept.append(create(size)) or kept[-1]))
            first = posted(rank, group, sizes, "first")
        second, third = [posted(rank, group, sizes, name) for name in ("second", "third")]
        comms = group.communicators
        assert comms.pairs[1 - rank].backend(comms) is not None
        assert not any(first)
        assert second.count(True) == third.count(True) == 1  # the second message finds no room
        for src in (0, 1):
            if rank == src:
                group.send(torch.arange(NUMEL))
            else:
                assert torch.equal(group.recv((NUMEL,), torch.int64), torch.arange(NUMEL))


@distributed(world_size=2)
def test_posted_data_of_a_refused_message_is_dropped(rank):
    with of_two(rank) as group:
        for number in range(4):
            data = torch.arange(40_000) + number
            if rank == 0:
                handle, _ = group.isend_tensor_dict({"x": data})
            if number == 2:
                with pytest.raises(DisagreementError):
                    group.recv_object(0) if rank else handle.wait()
            elif rank:
                assert torch.equal(group.recv_tensor_dict()["x"], data)
            else:
                handle.wait()
