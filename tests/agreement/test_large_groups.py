"""Headers of a large group, which are reduced before frames are exchanged: the same results, errors and laws."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from counting import exchanges

import easydist
from easydist import CollectiveTimeout, DisagreementError, RemoteError
from easydist.agreement import frames
from easydist.testing import distributed

SIZES = (2, 3, 4)
REDUCED, FRAMES = "all_reduce", "header"


@contextlib.contextmanager
def large():
    """As in a large group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FOLDED_FROM", 2)
        yield


@distributed(world_size=SIZES)
def test_frames_follow_only_if_something_comes_with_them(rank, world_size):
    large_data = torch.ones(100_000)
    with large():
        assert exchanges(easydist.wait_for_everyone) == [REDUCED]
        assert exchanges(lambda: easydist.reduce(large_data)) == [REDUCED, "all_reduce"]
        assert exchanges(lambda: easydist.gather(torch.ones(2))) == [REDUCED, FRAMES]
        assert exchanges(lambda: easydist.gather_object([rank] * 10 * rank)) == [REDUCED, FRAMES]
        # Only its source has data.
        assert exchanges(lambda: easydist.broadcast(large_data)) == [REDUCED, FRAMES, "broadcast"]


@distributed(world_size=SIZES)
def test_results_are_those_of_a_small_group(rank, world_size):
    tree = {"a": torch.arange(3 + rank) + 10 * rank, "b": torch.full((2, 2), float(rank)), "n": rank}
    calls = [
        lambda: easydist.gather(tree),
        lambda: easydist.gather({"large": torch.full((70_000 + rank,), rank)}),
        lambda: easydist.reduce({"b": tree["b"], "n": rank}, "sum"),
        lambda: easydist.broadcast({"b": tree["b"]}, from_process=world_size - 1),
        lambda: easydist.broadcast(tree["b"] if rank == 1 else None, from_process=1),
        lambda: easydist.gather_object({"rank": rank, "text": "x" * (100 * rank)}),
        lambda: easydist.all_to_all([torch.full((rank + 1,), float(r)) for r in range(world_size)]),
        lambda: easydist.broadcast_tensor_dict({"w": tree["b"], "step": 3} if rank == 0 else None),
    ]
    for call in calls:
        with large():  # first, or the frames of the same call would still be there
            got = call()
        want = call()
        assert repr(got) == repr(want)


@distributed(world_size=SIZES)
def test_errors_are_the_same_on_all_ranks_and_those_of_a_small_group(rank, world_size):
    def fault():
        return easydist.gather_object(lambda: 0 if rank == world_size - 1 else "fine")

    odd = rank == world_size - 1
    calls = [
        lambda: easydist.gather({"x": torch.ones(2, 2 + odd)}),
        lambda: easydist.gather(torch.ones(2)) if odd else easydist.wait_for_everyone(),
        lambda: easydist.reduce(torch.ones(100_000), "mean" if odd else "sum"),
        lambda: easydist.gather(object() if odd else torch.ones(1)),
    ]
    for call in calls:
        with pytest.raises((DisagreementError, RemoteError)) as small:
            call()
        with large(), pytest.raises(type(small.value)) as caught:
            call()
        assert str(caught.value) == str(small.value)
        with large():
            texts = easydist.gather_object(str(caught.value))
        assert len(set(texts)) == 1


@distributed(world_size=3)
def test_a_rank_that_does_not_come_is_named_and_the_group_works_again(rank, world_size):
    store = dist.group.WORLD.get_group_store()
    easydist.wait_for_everyone()
    with large():
        if rank == 1:
            store.wait(["gave up/0", "gave up/2"])
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            easydist.gather(torch.ones(1), timeout=0.5)
        store.set(f"gave up/{rank}", "")
        assert easydist.gather_object(rank) == [0, 1, 2]


@distributed(world_size=4)
def test_a_trace_knows_who_came_last(rank, world_size):
    easydist.wait_for_everyone()
    with large(), easydist.trace() as trace:
        easydist.wait_for_everyone()
        easydist.wait_for_everyone()
    for call in trace.calls:
        assert len(call.came) == world_size
        assert call.start <= call.came[rank] <= call.end
    for call in trace.calls:
        times = easydist.gather_object(call.came[rank])
        # The rank stands in the lowest bits of the time.
        assert call.last in {r for r, time in enumerate(times) if time + (1 << world_size.bit_length()) > max(times)}
        assert len({*easydist.gather_object(call.last)}) == 1
