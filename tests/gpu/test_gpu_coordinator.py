"""Coordinators whose tensors travel over NCCL: the values of one process, graphs, compiled functions."""

import pytest
import torch
from gpus import GPU, MIXED, NATIVE, ON_ANY, needs_cuda, use
from trees import DTYPES, assert_same

from easydist.parallel import GroupCoordinator
from easydist.testing import distributed

pytestmark = ON_ANY


def values(shape, dtype, rank):
    """Small numbers that differ between ranks, so that sums are exact in every dtype."""
    return ((torch.arange(torch.Size(shape).numel()) * 3 + rank * 7) % 5).view(shape).to(dtype)


def made(rank, world_size, backend=NATIVE, name="tp", **options):
    use(MIXED)
    return GroupCoordinator([[*range(world_size)]], 0, backend, True, group_name=name, **options)


@pytest.mark.parametrize("backend", [NATIVE, "gloo"])
@distributed(world_size=(1, 2))
def test_methods_give_what_one_process_computes(rank, world_size, backend):
    group = made(rank, world_size, backend)
    assert group.device.type == GPU
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        every = [values((4, 12), dtype, r).to(GPU) for r in range(world_size)]
        mine, want = every[rank], sum(every[1:], every[0])
        assert_same(group.all_reduce(mine).cpu(), want.cpu())
        assert_same(group.reduce_scatter(mine, 1).cpu(), want.chunk(world_size, 1)[rank].contiguous().cpu())
    for dtype in DTYPES:
        every = [values((4, 6), dtype, r).to(GPU) for r in range(world_size)]
        whole = torch.cat([part.cpu().view(torch.uint8) for part in every]).view(dtype)
        assert_same(group.all_gather(every[rank], 0).cpu(), whole)
        gathered = group.gather(every[rank], world_size - 1, 0)
        assert (gathered is not None and gathered.device.type == GPU) == (rank == world_size - 1)
        assert_same(group.broadcast(every[rank].clone(), world_size - 1).cpu(), every[-1].cpu())
    uneven = torch.full((rank + 1, 3), float(rank), device=GPU)
    assert group.all_gatherv(uneven)[:, 0].tolist() == [float(r) for r in range(world_size) for _ in range(r + 1)]
    data = {"x": torch.arange(10_000, device=GPU), "y": torch.ones(3), "n": 3}
    got = group.broadcast_tensor_dict(data if rank == 0 else None, 0)
    assert (got["x"].device.type, got["y"].device.type, got["n"]) == (GPU, "cpu", 3)
    assert got["x"].sum().item() == 49_995_000
    if world_size == 2:
        if rank == 0:
            group.send_tensor_dict(data, 1)
            group.send(torch.ones(5, device=GPU), 1)
        else:
            got = group.recv_tensor_dict(0)
            assert (got["x"].device.type, got["y"].device.type, got["x"].sum().item()) == (GPU, "cpu", 49_995_000)
            assert group.recv(torch.Size([5]), torch.float32, 0).tolist() == [1] * 5
    assert group.broadcast_object({"a": rank}, 0) == {"a": 0}
    group.barrier()
    group.destroy()


@needs_cuda
@distributed(world_size=(1, 2))
def test_a_captured_all_reduce_is_replayed(rank, world_size):
    group = made(rank, world_size)
    data = torch.ones(1000, device="cuda")
    group.all_reduce(data)
    graph = torch.cuda.CUDAGraph()
    with group.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
        out = group.all_reduce(data) * 1  # alone, the sum is the input
    for fill in (1.0, 5.0):
        data.fill_(fill + rank)
        graph.replay()
        torch.cuda.synchronize()
        assert out[0].item() == sum(fill + r for r in range(world_size))
        assert data[0].item() == fill + rank
    graph.reset()  # NCCL ends its communicator only after the graphs that use it
    group.destroy()


@needs_cuda
@distributed(world_size=2)
def test_gloo_says_that_it_cannot_be_captured(rank):
    group = made(rank, 2, "gloo")
    data = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match="gloo cannot be captured")
    with group.graph_capture() as context, refused, torch.cuda.graph(graph, stream=context.stream):
        group.all_reduce(data)
    torch.cuda.synchronize()
    assert group.all_reduce(data)[0].item() == 2
    group.destroy()


@needs_cuda
@distributed(world_size=2, timeout=200)
def test_compiled_functions(rank):
    group = made(rank, 2)

    @torch.compile(fullgraph=True)
    def step(x):
        return group.all_reduce(x * 2) + group.all_gather(x, 0).sum()

    x = torch.full((4,), rank + 1.0, device="cuda")
    assert step(x).tolist() == [6 + 12] * 4
    group.destroy()
