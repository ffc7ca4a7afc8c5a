"""Tests that need an accelerator."""

import pytest
import torch

import easydist
from easydist import is_torch_tensor as is_tensor, tree
from easydist.testing import distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]


@distributed(world_size=2)
def test_gloo_moves_cuda_tensors_through_the_host(rank):
    x = {"gpu": torch.full((3,), rank, device="cuda"), "cpu": torch.tensor([rank])}
    got = easydist.gather(x)
    assert got["gpu"].is_cuda
    assert got["gpu"].tolist() == [0, 0, 0, 1, 1, 1]
    assert got["cpu"].tolist() == [0, 1]
    assert easydist.reduce(x, "sum")["gpu"].tolist() == [1, 1, 1]
    assert easydist.broadcast(x, 1)["gpu"].tolist() == [1, 1, 1]
    assert easydist.scatter(x if rank == 0 else None)["gpu"].is_cuda


@distributed(world_size=2)
def test_autograds_thread_of_the_gpu_exchanges_gradients(rank):
    gpu, cpu = (torch.ones(2 + rank, device=device, requires_grad=True) for device in ("cuda", "cpu"))
    own = easydist.reduce(gpu.sum(), "mean")
    assert own.is_cuda
    out = easydist.gather({"gpu": gpu, "cpu": cpu}, differentiable=True)
    (own + (out["gpu"] ** 2).sum() + out["cpu"].sum().cuda()).backward()
    assert gpu.grad.tolist() == [4.5] * (2 + rank)
    assert cpu.grad.tolist() == [2.0] * (2 + rank)
    for verb in (easydist.broadcast, easydist.scatter):
        (verb(None if rank else gpu, differentiable=True).sum() * 2).backward()


def weights():
    """Return leaves on both devices that travel alone, packed and not at all."""
    return {
        "large": torch.arange(1 << 18, device="cuda").view(512, 512).t(),
        "small": [torch.tensor([0.5, -0.0], device="cuda", dtype=torch.bfloat16), torch.ones(2)],
        "empty": torch.empty(0, 2, device="cuda"),
        "number": 3,
    }


def check_weights(got):
    assert (got["large"].is_cuda, got["small"][0].is_cuda, got["small"][1].is_cuda) == (True, True, False)
    assert torch.equal(got["large"], weights()["large"])
    assert [part.tolist() for part in got["small"]] == [[0.5, -0.0], [1, 1]]
    assert (got["empty"].shape, got["empty"].device.type, got["number"]) == ((0, 2), "cuda", 3)


@distributed(world_size=2)
def test_tensor_dicts_arrive_on_the_device_of_their_type(rank):
    check_weights(easydist.broadcast_tensor_dict(weights() if rank == 0 else None))
    on_the_cpu = tree.map(lambda leaf: torch.zeros_like(leaf, device="cpu") if is_tensor(leaf) else 0, weights())
    if rank == 0:
        easydist.send_tensor_dict(weights(), 1)
        easydist.send_tensor_dict(weights(), 1)
    else:
        check_weights(easydist.recv_tensor_dict(0))
        got = easydist.recv_tensor_dict(0, into=on_the_cpu)
        assert torch.equal(got["large"], weights()["large"].cpu())


def state():
    """Return tensors on both devices, large and small, with several strides."""
    return {
        "large": torch.arange(1 << 18, device="cuda").view(512, 512),
        "strided": torch.arange(1 << 18, device="cuda").view(512, 512).t(),
        **{str(i): torch.full((5,), float(i), device="cuda") for i in range(9)},
        "here": torch.arange(7.0),
    }


def check_state(rank):
    """Check new tensors on their own type of device, on the CPU and pinned, and existing ones on either device."""
    from easydist.weights import broadcast_state_dict

    wanted = {name: value.cpu() for name, value in state().items()}
    new = broadcast_state_dict(state() if rank == 0 else None, verify=True)
    assert {name: value.is_cuda for name, value in new.items()} == {name: name != "here" for name in wanted}
    pinned = broadcast_state_dict(state() if rank == 0 else None, offload_to_cpu=True, pin_memory=True)
    assert rank == 0 or all(value.is_pinned() for value in pinned.values())
    there = broadcast_state_dict(state() if rank == 0 else {name: torch.zeros_like(v) for name, v in wanted.items()})
    back = broadcast_state_dict(wanted if rank == 0 else {n: torch.zeros_like(v).cuda() for n, v in wanted.items()})
    for got in (new, pinned, there, back):
        assert all(torch.equal(got[name].cpu(), value) for name, value in wanted.items())


@distributed(world_size=2)
def test_weights_on_a_gpu_go_by_way_of_the_host(rank):
    check_state(rank)


def on_nccl(rank, world_size):
    """Call every verb over an NCCL group without a CPU backend, whose headers travel on a gloo group."""
    torch.distributed.destroy_process_group()
    torch.cuda.set_device(rank)
    store = torch.distributed.TCPStore("127.0.0.1", 29611, world_size, rank == 0)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    x = {
        "a": torch.full((2 + rank, 3), float(rank), device="cuda"),
        "b": torch.tensor([rank], device="cuda", dtype=torch.int16),
    }
    got = easydist.gather(x)
    assert got["a"].shape == (sum(2 + r for r in range(world_size)), 3)
    assert got["b"].tolist() == list(range(world_size))
    total = world_size * (world_size - 1) // 2
    assert easydist.reduce(x["b"], "sum").tolist() == [total]
    assert easydist.reduce(x["b"], "max").tolist() == [world_size - 1]
    assert easydist.broadcast(x["b"], world_size - 1).tolist() == [world_size - 1]
    assert easydist.all_to_all(torch.arange(world_size, device="cuda")).tolist() == [rank] * world_size
    check_weights(easydist.broadcast_tensor_dict(weights() if rank == 0 else None))
    if rank == 0 and world_size > 1:
        easydist.send_tensor_dict(weights(), 1)
    elif rank == 1:
        check_weights(easydist.recv_tensor_dict(0))
    check_state(rank)
    assert easydist.gather_object(rank) == list(range(world_size))
    assert easydist.gather(torch.tensor([rank])).tolist() == list(range(world_size))
    easydist.wait_for_everyone()


def test_verbs_over_nccl(ranks):
    ranks.run(on_nccl, torch.cuda.device_count())
