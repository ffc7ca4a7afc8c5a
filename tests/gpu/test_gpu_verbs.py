"""Verbs on trees with tensors on a GPU: the results of the same trees on the CPU, on the devices of the inputs."""

from importlib.util import find_spec

import pytest
import torch
from gpus import GPU, MIXED, NATIVE, ON_ANY, devices, needs_cuda, on_groups, outcome, to_cpu, to_gpu, use
from trees import CASES, assert_same

import easydist
from easydist import tree
from easydist.testing import distributed

pytestmark = ON_ANY

GROUPS = [("gloo", 1), ("gloo", 2), (MIXED, 1), (MIXED, 2), (NATIVE, 2)]
REDUCTIONS = ("sum", "mean", "max", "min")


_LEFT_OUT = {"expanded"}  # it is dense on the GPU
_LEFT_OUT |= set() if find_spec("tensordict") else {"TensorDict"}


def agree(call, data):
    """Check that a call returns the same for a tree on both kinds of device, or raises the same type of error."""
    there, here = outcome(lambda: call(to_gpu(data))), outcome(lambda: call(data))
    if here is None or isinstance(here, str):
        assert there == here
        return
    assert_same(_of_one_nan(to_cpu(there)), _of_one_nan(to_cpu(here)))
    if all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(data)):  # numbers become tensors on the CPU
        assert devices(there) == devices(to_gpu(here))


def _of_one_nan(data):
    """Return the tree with the same bits for every NaN: a GPU's sum has others than the CPU's."""
    return tree.map(lambda leaf: leaf.where(leaf == leaf, torch.nan) if _is_float(leaf) else leaf, data)


def _is_float(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.itemsize > 1


def trees_of(rank):
    """Return trees of every kind, whose values differ between ranks where their dtypes have room."""
    made = {name: make() for name, make in CASES.items() if name not in _LEFT_OUT}
    grids = {
        str(dtype): (torch.arange(12).view(3, 4) * 3 + 7 * rank).remainder(5).to(dtype)
        for dtype in (torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float64)
    }
    large = torch.arange(40_000.0).view(200, 200) + rank
    return made | {
        "grids": grids,
        "large": [large, large.clone().t(), large.repeat(1, 3)[:, ::3], large.to(torch.bfloat16)],
    }


def check_trees(rank, world_size, backend):
    use(backend)
    for name, data in trees_of(rank).items():
        try:
            agree(easydist.gather, data)
            agree(lambda x: easydist.broadcast(x, world_size - 1), data)
            agree(easydist.pad_across_processes, data)
            for reduction in REDUCTIONS:
                agree(lambda x, reduction=reduction: easydist.reduce(x, reduction), data)
        except AssertionError as error:
            error.add_note(f"the tree {name!r}")
            raise


@on_groups(*GROUPS)
def test_trees_of_all_kinds(ranks, backend, world_size):
    ranks.run(check_trees, world_size, backend=backend, timeout=300)


def check_sizes(rank, world_size, backend):
    use(backend)
    rows = torch.arange(3 * (rank + 1) * 2.0).view(-1, 2) + 100 * rank
    uneven = {"rows": rows, "bits": rows.to(torch.bfloat16), "none": rows[: 2 * rank], "word": ["a"] * (rank + 1)}
    agree(easydist.gather, uneven)
    agree(lambda x: easydist.gather(x, dim=-1), rows.t())
    agree(lambda x: easydist.gather(easydist.pad_across_processes(x, dim=0, pad_index=-1)), uneven)
    agree(lambda x: easydist.pad_across_processes(x, dim=0, pad_first=True), uneven)
    even = torch.arange(6 * world_size).view(-1, 3) + rank
    last = world_size - 1
    agree(lambda x: easydist.scatter(x if rank == last else None, last), {"x": even, "n": even.t()[0]})
    agree(easydist.all_to_all, even)
    agree(easydist.gather_object, [uneven, rank])
    agree(easydist.assert_equal, {"x": torch.arange(4)})
    agree(easydist.assert_equal, {"x": torch.tensor(world_size - rank)})
    agree(lambda x: easydist.scatter_object_list([x] * world_size if rank == 0 else None), {"x": even[:0]})
    agree(easydist.broadcast_object_list, [{"x": even}, rank])


@on_groups(*GROUPS, ("gloo", 3), (MIXED, 3))
def test_uneven_parts(ranks, backend, world_size):
    ranks.run(check_sizes, world_size, backend=backend, timeout=300)


def check_turns(rank, world_size, backend):
    """Leaves that travel alone, and others that are packed and travel in several turns, along each dimension."""
    use(backend)
    last = world_size - 1
    rows = {"alone": torch.arange(90_000.0).view(300, 300) + rank, "bits": torch.ones(600, 300, dtype=torch.bfloat16)}
    rows |= {str(i): torch.arange(15_000).view(30, 500) * rank + i for i in range(40)}
    uneven = {name: value[: len(value) // 2 + 3 * rank] for name, value in rows.items()}
    whole = {name: value.repeat(world_size, 1) for name, value in rows.items()}
    for dim in (0, 1):
        agree(lambda x, dim=dim: easydist.gather(x, dim=dim), rows)
        agree(lambda x, dim=dim: easydist.gather(x, dim=dim, dst=last), rows)
        agree(lambda x, dim=dim: easydist.scatter(x if rank == last else None, last, dim=dim), whole)
        agree(lambda x, dim=dim: easydist.all_to_all(x, dim=dim), whole)
    agree(lambda x: easydist.gather(x, as_list=True), uneven)
    agree(lambda x: easydist.gather(x, dst=last), uneven)
    agree(lambda x: easydist.broadcast(x, last), rows)
    agree(lambda x: easydist.reduce(x, "sum"), rows)
    agree(lambda x: easydist.reduce(x, "max", dst=last), rows)


@on_groups(("gloo", 2), (MIXED, 2), (MIXED, 3))
def test_leaves_travel_in_turns(ranks, backend, world_size):
    ranks.run(check_turns, world_size, backend=backend, timeout=300)


def check_disagreements(rank, world_size, backend):
    """Differences in dtype, shape, structure and device are the same error on all ranks, and the group goes on."""
    use(backend)
    grid = torch.ones(2, 3, device=GPU)
    for mine in (
        [grid, grid.half()][rank],
        [grid, grid.t()][rank],
        [{"a": grid}, {"b": grid}][rank],
        [grid, None][rank],
    ):
        with pytest.raises(easydist.DisagreementError):
            easydist.gather(mine)
        assert easydist.gather(grid[:1]).shape == (2, 3)
    mixed = {"x": [grid, grid.cpu()][rank]}
    if backend == "gloo":
        assert easydist.gather(mixed)["x"].device == mixed["x"].device
        return
    for call in (easydist.gather, easydist.reduce, easydist.broadcast, easydist.all_to_all):
        with pytest.raises(easydist.DisagreementError, match=f"on {GPU}") as raised:
            call(mixed)
        assert "same type of device" in str(raised.value)
    assert easydist.gather(grid[:1]).shape == (2, 3)


@on_groups(("gloo", 2), (MIXED, 2), (NATIVE, 2))
def test_disagreements(ranks, backend, world_size):
    ranks.run(check_disagreements, world_size, backend=backend)


def check_gradients(rank, world_size, backend):
    """Autograd's thread of the GPU exchanges gradients."""
    use(backend)
    gpu, cpu = (torch.ones(2 + rank, device=device, requires_grad=True) for device in (GPU, "cpu"))
    own = easydist.reduce(gpu.sum(), "mean")
    assert own.device.type == GPU
    out = easydist.gather({"gpu": gpu, "cpu": cpu}, differentiable=True)
    (own + (out["gpu"] ** 2).sum() + out["cpu"].sum().to(GPU)).backward()
    assert gpu.grad.tolist() == [4.5] * (2 + rank)
    assert cpu.grad.tolist() == [2.0] * (2 + rank)
    for verb in (easydist.broadcast, easydist.scatter):
        (verb(None if rank else gpu, differentiable=True).sum() * 2).backward()
    parts = torch.ones(4, device=GPU, requires_grad=True)
    (easydist.all_to_all(parts, differentiable=True) * (rank + 1)).sum().backward()
    assert parts.grad.tolist() == [1, 1, 2, 2]


@on_groups(("gloo", 2), (MIXED, 2))
def test_gradients(ranks, backend, world_size):
    ranks.run(check_gradients, world_size, backend=backend)


@needs_cuda
@distributed(world_size=2)
def test_generators_of_the_gpu_agree(rank):
    use(MIXED)
    torch.cuda.manual_seed(rank)
    easydist.synchronize_rng_states(["cuda", "torch"])
    drawn = torch.rand(3, device=GPU)
    assert torch.equal(*easydist.gather(drawn).chunk(2))
    easydist.set_seed(5, device_specific=True)
    assert not torch.equal(*easydist.gather(torch.rand(3, device=GPU)).chunk(2))


@distributed(world_size=2)
def test_metrics_of_batches_on_the_gpu(rank):
    use(MIXED)
    loader = easydist.metrics.distributed_loader(torch.arange(7.0), batch_size=2)
    seen = [easydist.gather_for_metrics(batch.to(GPU), loader=loader) for batch in loader]
    assert torch.cat(seen).device.type == GPU
    assert torch.cat(seen).tolist() == [0, 1, 2, 3, 4, 5, 6]
    collector = easydist.MetricCollector(total=3)
    collector.update([[2, 0], [1]][rank], logits=torch.tensor([[2.0, 0.0], [1.0]][rank], device=GPU))
    assert collector.compute()["logits"].tolist() == [0, 1, 2]


@distributed(world_size=2)
def test_torchmetrics_on_the_gpu(rank):
    pytest.importorskip("torchmetrics")
    from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

    use(MIXED)
    logits, labels = torch.randn(31, 3, generator=torch.Generator().manual_seed(0)).softmax(1), torch.arange(31) % 3
    mine = slice(0, 20) if rank == 0 else slice(20, 31)
    for metric in (MulticlassConfusionMatrix(3), MulticlassAUROC(3)):
        want = type(metric)(3, sync_on_compute=False)
        want.update(logits, labels)
        metric = metric.to(GPU)
        metric.update(logits[mine].to(GPU), labels[mine].to(GPU))
        value = easydist.metrics.sync_dist(metric)
        assert value.device.type == GPU
        assert torch.allclose(value.cpu(), want.compute())
