"""Ranks that call different operations of torch.distributed over ``easydist_shm``, or a coordinator's."""

import pytest
import torch
import torch.distributed as dist
from differing import error_of
from launching import sampled

from easydist.parallel import GroupCoordinator
from easydist.process_group import NAME
from easydist.shm.calls import Calls
from easydist.testing import distributed

MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


def like(tensor, size):
    return [torch.zeros_like(tensor) for _ in range(size)]


CALLS = {
    "all_reduce": lambda x, g, n: dist.all_reduce(x, SUM, group=g),
    "max": lambda x, g, n: dist.all_reduce(x, MAX, group=g),
    "broadcast": lambda x, g, n: dist.broadcast(x, group=g, group_src=0),
    "from_1": lambda x, g, n: dist.broadcast(x, group=g, group_src=1),
    "all_gather": lambda x, g, n: dist.all_gather(like(x, n), x, group=g),
    "all_to_all": lambda x, g, n: dist.all_to_all(like(x, n), [x] * n, group=g),
    "gather": lambda x, g, n: dist.gather(x, like(x, n) if g.rank() == 0 else None, group=g, group_dst=0),
    "reduce": lambda x, g, n: dist.reduce(x, op=SUM, group=g, group_dst=0),
    "reduce_scatter": lambda x, g, n: dist.reduce_scatter(torch.zeros_like(x), [x] * n, SUM, group=g),
    "barrier": lambda x, g, n: dist.barrier(group=g),
}
OTHERS = {"size": torch.ones(8), "large": torch.ones(600_000), "dtype": torch.ones(4, dtype=torch.int32)}


def demand_one_error(run, group):
    """Check that ``run`` raises the same error on all ranks, and that the group goes on."""
    texts, total = [None] * dist.get_world_size(), torch.ones(3)
    dist.all_gather_object(texts, error_of(run))
    assert None not in texts, texts
    assert len({*texts}) == 1, "\n---\n".join(texts)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [dist.get_world_size()] * 3
    return texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@distributed(world_size=sampled([3, 2]))
def test_a_call_against_all_others(name, rank, world_size):
    group, is_last = dist.new_group(backend=NAME), rank == world_size - 1

    def differ(other):
        CALLS[other if is_last else name](torch.ones(4), group, world_size)
        dist.barrier(group=group)

    for other in CALLS:
        if other != name:
            text = demand_one_error(lambda other=other: differ(other), group)
            assert text.endswith("has dropped what was under way, and goes on with the next call.")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if name != "barrier"])
@distributed(world_size=sampled([4, 2, 3], 3))
def test_a_call_with_another_tensor(name, rank, world_size):
    group, is_last = dist.new_group(backend=NAME), rank == world_size - 1

    def differ(other):
        CALLS[name](other.clone() if is_last else torch.ones(4), group, world_size)
        dist.barrier(group=group)

    for other in OTHERS.values():
        demand_one_error(lambda other=other: differ(other), group)


@distributed(world_size=[2, 3])
def test_each_tensor_of_a_list_is_compared(rank, world_size):
    """``int32`` of one rank would be the bytes of another one's ``float32``."""
    group = dist.new_group(backend=NAME)
    second = torch.ones(4, dtype=torch.int32 if rank == world_size - 1 else torch.float32)
    text = demand_one_error(lambda: group.allreduce_coalesced([torch.ones(4), second]).wait(), group)
    assert "all_reduce(4 elements of int32, SUM)" in text


def gathers_unevenly(rank, group, size):
    parts = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)), group=group)
    assert [part.tolist() for part in parts] == [[float(r)] * (r + 1) for r in range(size)]


def swaps_unevenly(rank, group, size):
    """Rank r sends r + s items to rank s."""
    given, taken = [rank + s for s in range(size)], [r + rank for r in range(size)]
    output = torch.empty(sum(taken))
    dist.all_to_all_single(output, torch.full((sum(given),), float(rank)), taken, given, group=group)
    assert output.tolist() == [float(r) for r in range(size) for _ in range(r + rank)]


def sums_sparsely(rank, group, size):
    own = torch.sparse_coo_tensor([[*range(rank + 1)]], torch.ones(rank + 1), (size,), check_invariants=True)
    dist.all_reduce(own, group=group)
    assert own.to_dense().tolist() == [size - place for place in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("call", [gathers_unevenly, swaps_unevenly, sums_sparsely])
@distributed(world_size=[3])
def test_sizes_may_differ_while_ranks_wait_for_a_late_one(call, rank, world_size):
    """The last rank begins once both others have compared the calls several times."""
    group, store, looks = dist.new_group(backend=NAME), dist.group.WORLD.get_group_store(), []

    def look(calls, compare=Calls.compare):
        looks.append(compare(calls))
        if len(looks) == 3:
            store.set(f"{call.__name__}/{rank}", "")
        return looks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calls, "compare", look)
        if rank == world_size - 1:
            store.wait([f"{call.__name__}/{other}" for other in range(rank)])
        call(rank, group, world_size)
    assert {*looks} <= {None}


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["1", "0"])
@distributed(world_size=[2, 3])
def test_the_collectives_of_a_coordinator(shared, rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", shared)
        coordinator = GroupCoordinator([[*range(world_size)]], rank, "gloo", use_device_communicator=False)
    is_last = rank == world_size - 1
    calls = {
        "size": lambda: coordinator.all_reduce(torch.ones(8 if is_last else 4)),
        "dtype": lambda: coordinator.all_reduce(torch.ones(4, dtype=torch.int64 if is_last else torch.float32)),
        "operation": lambda: (coordinator.barrier if is_last else lambda: coordinator.all_gather(torch.ones(4)))(),
        "root": lambda: coordinator.broadcast(torch.ones(4), src=int(is_last)),
    }
    for call in calls.values():
        texts = [None] * world_size
        dist.all_gather_object(texts, error_of(call))
        assert None not in texts, texts
        assert len({*texts}) == 1, "\n---\n".join(texts)
        assert coordinator.all_reduce(torch.ones(2)).tolist() == [world_size] * 2
    coordinator.destroy()
