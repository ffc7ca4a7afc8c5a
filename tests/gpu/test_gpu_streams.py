"""Streams of a GPU: verbs run on the caller's, never make the CPU wait, and launch few kernels."""

import re
from collections import Counter

import pytest
import torch
from gpus import MIXED, NEEDED, busy, never_waiting, own_stream, use

import easydist
from easydist.testing import distributed

pytestmark = NEEDED


def verbs(rank, world_size):
    """Return calls of (tree of two large tensors), each with the result's first elements that rank 0 should see."""
    last = world_size - 1
    return {
        "gather": (easydist.gather, [1.0, float(world_size)]),
        "reduce": (lambda x: easydist.reduce(x, "sum"), [world_size * (world_size + 1) / 2] * 2),
        "broadcast": (lambda x: easydist.broadcast(x, last), [float(world_size)] * 2),
        "all_to_all": (easydist.all_to_all, [1.0, float(world_size)]),
        "scatter": (lambda x: easydist.scatter(x if rank == last else None, last), [float(world_size)] * 2),
        "tensor dict": (lambda x: easydist.broadcast_tensor_dict(x if rank == last else None, last), [world_size] * 2),
    }


def late(value, numel=1 << 16):
    """Return tensors whose values are written only after a while of the current stream."""
    tensors = [torch.full((numel,), -1.0, device="cuda"), torch.full((numel // 4, 3), -1.0, device="cuda")]
    torch.cuda.synchronize()
    busy()
    for tensor in tensors:
        tensor.fill_(value)
    return {"a": tensors[0], "b": tensors[1], "strided": tensors[1][:, ::2]}


@pytest.mark.parametrize("backend", ["gloo", MIXED])
@distributed(world_size=2)
def test_verbs_wait_for_the_callers_stream_and_it_for_them(rank, backend):
    use(backend)
    with own_stream():
        for name, (call, (first, last)) in verbs(rank, 2).items():
            got = call(late(rank + 1.0))
            for leaf in got.values():
                leaf = leaf + 0  # on the caller's stream, without waiting for any other
                assert (leaf.flatten()[0].item(), leaf.flatten()[-1].item()) == (first, last), name


@distributed(world_size=2)
def test_inputs_may_be_freed_at_once(rank):
    use(MIXED)
    with own_stream():
        for name, (call, (first, last)) in verbs(rank, 2).items():
            got = call(late(rank + 1.0))
            torch.full((1 << 18,), -7.0, device="cuda")  # takes the memory that the inputs have left
            assert [got["a"][0].item(), got["a"][-1].item()] == [first, last], name


@pytest.mark.parametrize("world_size", [1, 2])
def test_verbs_over_nccl_never_wait_for_the_gpu(ranks, world_size):
    ranks.run(check_never_waiting, world_size)


def check_never_waiting(rank, world_size):
    use(MIXED)
    calls = {name: call for name, (call, _) in verbs(rank, world_size).items()}
    calls["pad"] = lambda x: easydist.gather(easydist.pad_across_processes(x, dim=0))
    calls["mean"] = lambda x: easydist.reduce(x, "mean", scale=0.5)
    calls["max"] = lambda x: easydist.reduce(x, "max")
    calls["uneven"] = lambda x: easydist.gather({name: value[: (rank + 1) * 1000] for name, value in x.items()})
    data = late(rank + 1.0)
    for call in calls.values():
        call(data)
    for name, call in calls.items():
        with never_waiting():
            busy()
            got = call(data)
            assert not torch.cuda.current_stream().query(), f"{name} has waited for the GPU"
        del got


def launches(call, data):
    """Return the names of the kernels that a call launches, NCCL's and copies included."""
    from torch.profiler import ProfilerActivity, profile

    call(data)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call(data)
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@distributed(world_size=2)
def test_leaves_are_packed_in_one_launch_for_each_dtype(rank):
    use(MIXED)
    half = {str(i): torch.full((100 + i, 3), float(rank), device="cuda", dtype=torch.float16) for i in range(50)}
    data = half | {f"f{i}": torch.ones(7, i + 1, device="cuda") for i in range(50)}
    for call, most in ((easydist.gather, 110), (lambda x: easydist.reduce(x, "sum"), 12), (easydist.broadcast, 12)):
        names = [
            re.sub(r"void |at::native::|\(anonymous namespace\)::", "", name)[:40] for name in launches(call, data)
        ]
        seen = Counter(names).most_common()
        packs = rank == 0 or call is not easydist.broadcast
        assert sum("CatArray" in name for name in names) == (2 if packs else 0), seen
        assert len(names) <= most, seen
