"""Device meshes of communicators: their layout, and communicators that do not fit."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import within

from easydist.comms import new_comm
from easydist.comms.device_mesh import init_device_mesh
from easydist.testing import distributed

CPU = torch.device("cpu")


def parts(world, name, *lines):
    """Return the communicator of this rank's line."""
    return world.split(next(line for line in lines if world.get_rank() in line), name)


@pytest.mark.slow
@distributed(world_size=6)
def test_communicators_that_make_no_mesh_are_refused_on_all_ranks(rank):
    world = new_comm("shm", CPU, "world", timeout=timedelta(seconds=within(30)))
    tp = parts(world, "tp", [0, 1, 2], [3, 4, 5])
    dp = parts(world, "dp", [0, 3], [1, 4], [2, 5])
    crossed = parts(world, "crossed", [0, 3], [1, 5], [2, 4])  # right for ranks 0 and 3
    for comms, text in (
        ((crossed, tp), r"'dp' of rank 1 holds the ranks \[1, 5\], but the mesh needs \[1, 4\]"),
        ((tp, tp), "do not form a mesh of 3 × 3 of 6 ranks"),
        ((dp, tp) if rank else (tp, dp), "or the sizes differ"),
    ):
        with pytest.raises(RuntimeError, match=text):
            init_device_mesh(comms, ("dp", "tp"), _global_comm=world)
    with torch.device("meta"):
        mesh = init_device_mesh((dp, tp), ("dp", "tp"), _global_comm=world)
    assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mesh["tp"].mesh.tolist() == ([0, 1, 2] if rank < 3 else [3, 4, 5])
    world.barrier(False)


@distributed(world_size=2)
def test_making_a_mesh_takes_no_longer_than_the_communicators_limit(rank):
    world = new_comm("shm", CPU, "short", timeout=timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"init_device_mesh in the communicator 'short'.* timed out"):
            init_device_mesh((world,), ("dp",))
        assert world.is_broken
    dist.barrier()
