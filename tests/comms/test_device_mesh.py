"""Device meshes of communicators: their layout, and communicators that do not fit."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import within
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

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
    world = new_comm("shm", CPU, "short", timeout=timedelta(seconds=within(30)))
    world.set_timeout(timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"init_device_mesh in the communicator 'short'.* timed out"):
            init_device_mesh((world,), ("dp",))
        assert world.is_broken
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@distributed(world_size=2)
def test_fsdp_with_a_divide_factor(backend, rank, world_size):
    """It asks for ``PREMUL_SUM``, which torch's gloo does not have."""
    mesh = init_device_mesh((new_comm(backend, CPU, "fsdp"),), ("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    whole = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    whole.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(3.0)
    data = [torch.arange(8.0).view(2, 4) + r for r in range(world_size)]
    model(data[rank]).sum().backward()
    for each in data:
        whole(each).sum().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad / 3)
    group, half = mesh.get_group(), dist._make_nccl_premul_sum(0.5)
    for run in (
        lambda tensor: dist.all_reduce(tensor, half, group=group),
        lambda tensor: dist.reduce(tensor, 1, half, group=group),
        lambda tensor: dist.reduce_scatter(tensor, [torch.ones(3)] * 2, half, group=group),
    ):
        run(tensor := torch.ones(3))
        assert tensor.tolist() == [1.0] * 3
    dist.all_reduce(tensor := torch.ones(3), group=group)
    assert tensor.tolist() == [2.0] * 3


@distributed(world_size=2)
def test_all_operations_of_a_gloo_group_go_through_python(rank):
    """A functional collective does not let go of the interpreter while gloo takes it, and could then wait forever."""
    mesh = init_device_mesh((new_comm("gloo", CPU, "through"),), ("dp",))
    group = mesh.get_group()
    others = {
        "abort",
        "boxed",
        "get_group_store",
        "merge_remote_group",
        "monitored_barrier",
        "name",
        "rank",
        "set_timeout",
    }
    others |= {"shutdown", "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous"}
    others |= {"get_backend", "get_reconfigure_handle", "new_window", "reconfigure"}  # of torch 2.14
    others |= {f"{verb}_{kind}_hook" for verb in ("register", "unregister") for kind in ("abort", "pre", "post")}
    methods = {name for name, kind in vars(dist.ProcessGroup).items() if callable(kind) and not name.startswith("_")}
    operations = methods - others - {"BackendType"}
    assert len(operations) >= 15
    assert operations <= vars(type(group)).keys()
    dist.barrier(group=group)
    parts = [torch.empty(2) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    dist.all_to_all_single(swapped := torch.empty(2), torch.tensor([0.0, 1.0]) + 10 * rank, group=group)
    dist.broadcast(told := torch.tensor([rank]), group=group, group_src=1)
    assert [*map(torch.Tensor.tolist, (*parts, swapped, told))] == [[0, 0], [1, 1], [rank, 10 + rank], [1]]
    found = DTensor.from_local(torch.full((1,), float(rank)), mesh, [Shard(0)]).full_tensor()
    assert found.tolist() == [0, 1]
