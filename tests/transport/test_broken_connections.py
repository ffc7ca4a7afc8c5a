"""Operations over gloo after a rank has broken its connections."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from easydist.groups.connecting import gloo_beside
from easydist.testing import distributed


def notice(gloo, peer):
    """Wait until gloo has noticed that the connection to a rank broke."""
    with pytest.raises(RuntimeError):
        gloo.recv(torch.zeros(1), peer).wait()


@distributed(world_size=3)
def test_who_finds_a_connection_broken_sends_nothing_to_the_others_either(rank):
    store = dist.group.WORLD.get_group_store()
    gloo = gloo_beside(dist.group.WORLD, PrefixStore("broken", store), 30.0)
    mine, parts = torch.ones(1), [torch.zeros(1) for _ in range(3)]
    if rank == 0:  # it comes after rank 2 has given up; messages to rank 1 go first
        store.wait(["has_left"])
        notice(gloo, 2)
        with pytest.raises(RuntimeError):
            gloo.all_gather_v(parts, mine)
        gloo.disconnect()
    else:
        work = gloo.all_gather_v(parts, mine)
        from_late, from_other = work._part, next(work._parts)
        if rank == 2:
            store.wait(["has_come"])
            gloo.disconnect()
            store.set("has_left", "")
        else:
            from_other.wait()
            store.set("has_come", "")
            with pytest.raises(RuntimeError):
                from_late.wait()
    dist.barrier()
