"""The memory that large calls need: packed leaves go in turns, reductions to one rank in chunks."""

import importlib
import itertools
from pathlib import Path

import pytest
import resident
import torch
from groups import BACKENDS, made
from launching import sampled

import easydist
from easydist.testing import distributed
from easydist.verbs import buckets

verbs = importlib.import_module("easydist.verbs.reduce")  # the package has a function of this name
pytestmark = pytest.mark.slow
NBYTES = 32 << 20
MEASURED = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be measured here")


def peak_of(call, result_nbytes):
    """Return the peak of a call over the bytes of its result; the memory of the group is used before."""
    resident.give_back()
    easydist.memory.release()
    _, peak = resident.peak_above(call)
    return peak / result_nbytes


@MEASURED
@BACKENDS
@distributed(world_size=3)
def test_the_peak_of_a_large_call_is_near_that_of_its_result(rank, backend):
    whole = torch.full((NBYTES // 4,), float(rank))
    leaves = [part.clone() for part in whole.split(4096)]
    with made(backend) as group:
        easydist.gather(whole[: 1 << 20], group=group)
        assert peak_of(lambda: easydist.gather(leaves, group=group), 3 * NBYTES) < 1.5
        easydist.wait_for_everyone(group=group)
        assert peak_of(lambda: easydist.gather(leaves, dst=1, group=group), 3 * NBYTES) < (1.5 if rank == 1 else 0.3)
        easydist.wait_for_everyone(group=group)
        assert peak_of(lambda: easydist.reduce(whole, "sum", dst=1, group=group), NBYTES) < (2.5 if rank == 1 else 0.3)


@MEASURED
@pytest.mark.parametrize("parts", [1, 4096])
@distributed(world_size=2)
def test_parts_of_leaves_arrive_with_little_memory_beside_the_result(rank, parts):
    tree = [*torch.ones(NBYTES // 4).chunk(parts)]
    most = 1.1 if parts == 1 else 2.5
    for call, nbytes in [(easydist.all_to_all, NBYTES), (easydist.scatter, NBYTES // 2)]:
        call(tree)
        assert peak_of(lambda call=call: call(tree), nbytes) < most


@MEASURED
@distributed(world_size=2)
def test_leaves_that_are_copied_need_little_memory_beside_the_results(rank):
    small, wide = [[*torch.ones(64, NBYTES // 256).chunk(parts, 1)] for parts in (4096, 16)]
    small, wide = [[leaf.contiguous() for leaf in tree] for tree in (small, wide)]
    calls = [
        (lambda: easydist.reduce(small), NBYTES, 1.5),
        (lambda: easydist.gather(wide, dim=1), 2 * NBYTES, 1.4),
        (lambda: easydist.all_to_all(wide, dim=1), NBYTES, 2.0),
        (lambda: easydist.scatter(wide, dim=1), NBYTES // 2, 2.5),
    ]
    for i, (call, nbytes, most) in enumerate(calls):
        call()
        assert peak_of(call, nbytes) < most, i


@MEASURED
@pytest.mark.parametrize("parts", [1, 4])
@distributed(world_size=2)
def test_floats_of_16_bits_are_reduced_with_little_memory_beside_the_result(rank, parts):
    """They are accumulated in twice the bytes."""
    tree = [*torch.ones(NBYTES // 2, dtype=torch.bfloat16).chunk(parts)]
    for options, most in [({}, 1.4), ({"dst": 1}, 1.6 if rank == 1 else 0.4), ({"reduction": "none"}, 1.2)]:
        easydist.reduce(tree, **options)
        found = peak_of(lambda options=options: easydist.reduce(tree, **options), NBYTES)
        easydist.wait_for_everyone()
        assert found < most, options


@pytest.mark.parametrize("dst", [None, 1])
@BACKENDS
@distributed(world_size=3)
def test_packed_leaves_arrive_in_turns(rank, backend, dst):
    def tree(rank):
        sizes = torch.randint(0, 3000, (100,), generator=torch.Generator().manual_seed(rank)).tolist()
        dtypes = [torch.float64, torch.int16, torch.bool, torch.bfloat16]
        leaves = [torch.full((size, 2), rank + 1).to(dtypes[i % 4]) for i, size in enumerate(sizes)]
        return {"leaves": leaves, "large": torch.full((70_000,), rank)}

    with made(backend) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_TURN", 1 << 10)
        got = easydist.gather(tree(rank), dst=dst, group=group)
    if dst in (None, rank):
        trees = [tree(r) for r in range(3)]
        for i, leaf in enumerate(got["leaves"]):
            assert torch.equal(leaf, torch.cat([one["leaves"][i] for one in trees]))
        assert torch.equal(got["large"], torch.cat([one["large"] for one in trees]))
    else:
        assert got is None


@pytest.mark.parametrize("dst", [None, 1])
@pytest.mark.parametrize("op", ["mean", "none"])
@BACKENDS
@distributed(world_size=3)
def test_packed_leaves_are_reduced_in_turns(rank, backend, op, dst):
    def tree(rank):
        leaves = [torch.arange(7 * i) % 5 + rank for i in range(60)]
        return {"bf16": [leaf.bfloat16() for leaf in leaves], "int": leaves, "large": torch.full((70_000,), 3.0 * rank)}

    with made(backend) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_TURN", 1 << 10)
        got = easydist.reduce(tree(rank), op, dst=dst, group=group)
    want = tree(1 if op == "mean" else rank)
    if dst not in (None, rank):
        assert got is None
    else:
        for name in ("bf16", "int"):
            assert all(map(torch.equal, got[name], [leaf.to(got[name][0].dtype) for leaf in want[name]]))
        assert torch.equal(got["large"], want["large"])


@pytest.mark.parametrize("dst", [None, 1])
@pytest.mark.parametrize(
    ("op", "scale"), sampled([("mean", 1.0), ("sum", 1.0), ("mean", 0.3), ("prod", 0.3), ("max", 0.3)])
)
@distributed(world_size=3)
def test_values_that_are_converted_have_the_same_bits_in_pieces(rank, op, scale, dst):
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(rank))
    tree = {
        "half": values.half()[::2],
        "bfloat16": values.bfloat16().view(-1, 1),
        "float8": values.to(torch.float8_e5m2),
    }
    tree |= {"int": (9 * values).int(), "bool": values > 0, "array": (9 * values).numpy().astype("int8")}
    want = easydist.reduce(tree, op, scale, dst=dst)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "_CONVERTED", 1 << 12)
        got = easydist.reduce(tree, op, scale, dst=dst)
    assert (got is None) == (dst not in (None, rank))
    for name in got or ():
        a, b = torch.as_tensor(want[name]), torch.as_tensor(got[name])
        assert (type(got[name]), a.dtype, a.shape) == (type(want[name]), b.dtype, b.shape)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("op", "backend"), sampled([*itertools.product(["sum", "mean", "max"], ["shm", "gloo"])], 3))
@distributed(world_size=3)
def test_a_reduction_to_one_rank_has_the_same_bits_in_chunks(rank, backend, op):
    values = torch.randn(40_003, generator=torch.Generator().manual_seed(rank))
    tree = {"whole": values, "half": values.bfloat16(), "parts": [*values.split(999)], "int": values.int()}
    with made(backend) as group, pytest.MonkeyPatch.context() as patch:
        want = easydist.reduce(tree, op, group=group)
        patch.setattr(verbs, "_CHUNK", 1 << 10)
        patch.setattr(verbs, "_CHUNKS", 30)
        got = easydist.reduce(tree, op, dst=2, group=group)
    assert (got is None) == (rank != 2)
    if rank == 2:
        assert repr(got) == repr(want)
        assert torch.equal(got["whole"].view(torch.uint8), want["whole"].view(torch.uint8))
        assert all(map(torch.equal, got["parts"], want["parts"]))
    assert torch.equal(values, tree["whole"])


@MEASURED
@distributed(world_size=2)
def test_whole_parameters_are_in_memory_once(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Sequential(*[torch.nn.Linear(1024, 512, bias=False) for _ in range(16)])
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))

    def gathered(modifier_rank):
        with easydist.GatheredParameters(net, modifier_rank):
            pass

    peaks = []
    for modifier_rank in (None, 0):
        gathered(modifier_rank)
        peaks.append(peak_of(lambda modifier_rank=modifier_rank: gathered(modifier_rank), NBYTES))
    assert max(peaks) < 2, peaks  # not a second copy to restore them from
