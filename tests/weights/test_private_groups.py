"""Groups of actors, without Ray: who does not come is named on all, and a rank that comes later meets the others."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from launching import sampled, within

import easydist
from easydist.errors import CollectiveTimeout, PeerLostError
from easydist.state import communicators
from easydist.testing import distributed
from easydist.weights.group import Participant, PrivateGroup, is_given_up


def group(name, rank, size, seconds):
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    participant, deadline = Participant(rank, size, "127.0.0.1"), time.monotonic() + seconds
    return PrivateGroup(name, store, participant, deadline, within(30), lambda: None)


@pytest.mark.slow
@distributed(world_size=sampled([3, 2]))
def test_members_that_do_not_come_are_named_on_all(rank, world_size):
    """The first rank gives up, and the others hear of it long before their own time is over."""
    with pytest.raises(CollectiveTimeout) as caught:
        group("incomplete", rank, world_size + 1, within(1 if rank == 0 else 60))
    assert caught.value.missing == (world_size,)
    text = f"group 'incomplete': 1 of {world_size + 1} ranks did not come within "
    assert str(caught.value).startswith(text)
    assert f"\n  rank {world_size}: missing; not seen in this group yet\nEach member has to call" in str(caught.value)
    assert is_given_up(dist.PrefixStore("incomplete", dist.group.WORLD.get_group_store()))
    made = group("complete", rank, world_size, within(60))
    assert easydist.gather(rank, group=made.comm).tolist() == [*range(world_size)]
    dist.barrier()
    made.close()


@pytest.mark.slow
@distributed(world_size=3)
def test_a_call_of_another_thread_raises_when_its_process_leaves(rank):
    """As an engine that waits for weights while its driver makes the group again; rank 2 makes no call."""
    made = group("left", rank, 3, within(60))
    easydist.gather(rank, group=made.comm)
    with ThreadPoolExecutor(1) as pool:
        if rank < 2:
            call = pool.submit(easydist.gather, rank, group=made.comm)
        if rank == 1:
            while not communicators(made.comm).under_way:
                assert not call.done()
            made.close()
        if rank < 2:
            with pytest.raises(PeerLostError, match=r"^gather: rank 1 has left the group: ") as caught:
                call.result()
            assert caught.value.rank == 1
    dist.barrier()
    if rank != 1:
        made.close()
