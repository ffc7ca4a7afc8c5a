"""Verbs and the shared-memory backend inside ``torch.compile``, compared with the same calls outside."""

import pytest
import torch
import torch.distributed as dist
from launching import sampled
from torch.nn.parallel import DistributedDataParallel

import easydist
from easydist.process_group import NAME
from easydist.testing import distributed


def objects(x):
    told, part = [None], [None]
    easydist.broadcast_object_list(told if easydist.ProcessState().process_index else ["text"])
    easydist.scatter_object_list(part, [{"n": r} for r in range(easydist.ProcessState().num_processes)])
    return x * len(easydist.gather_object([1])) + part[0]["n"]


def tensor_dicts(x):
    state, tree = easydist.ProcessState(), easydist.broadcast_tensor_dict({"x": x})
    if state.num_processes == 2:
        if state.process_index:
            easydist.send_tensor_dict({"y": x}, 0)
        else:
            tree |= easydist.recv_tensor_dict(1)
    return sum(tree.values())


def waits(x):
    easydist.synchronize_rng_states(["torch"])
    easydist.assert_equal(["the same", 3])
    easydist.wait_for_everyone()
    easydist.ProcessState().wait_for_everyone()
    return x


def on_one(x):
    return easydist.copy_tensor_to_devices(x if easydist.ProcessState().is_last_process else None)


VERBS = [
    lambda x: easydist.gather({"x": x, "n": 2})["x"],
    lambda x: easydist.reduce([x, 1.5], "sum")[0],
    lambda x: easydist.gather_for_metrics({"x": x, "id": ["a"] * len(x)}, indices=range(len(x)))["x"],
    easydist.broadcast,
    on_one,
    easydist.scatter,
    easydist.all_to_all,
    lambda x: easydist.unpad(easydist.pad_across_processes(x), x),
    objects,
    tensor_dicts,
    waits,
]


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


@pytest.mark.slow
@distributed(world_size=sampled([2, 1]))
def test_verbs(rank):
    for verb in VERBS:

        def around(x, verb=verb):
            return verb(x * 2) + 1

        got = compiled(around)
        for numel in (4, 6, 6):
            x = torch.arange(numel) + 10.0 * rank
            assert torch.equal(got(x), around(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which Dynamo asks for
@pytest.mark.parametrize("of_graph", [False, True])
@distributed(world_size=2)
def test_backward(rank, of_graph):
    """With compiled autograd, the graph of gradients is compiled, too; the exchange in backward is in no graph."""

    def step(x):
        rows = easydist.gather(x * 2, differentiable=True)
        own = easydist.reduce(x, "sum")
        loss = (rows**3).sum() + (own**2).sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=of_graph):
        got = compiled(step)
        for numel in (4, 6):
            xs = [(torch.arange(numel) + 10.0 * rank).requires_grad_() for _ in "ab"]
            assert torch.equal(got(xs[0]), step(xs[1]))
            assert torch.equal(xs[0].grad, xs[1].grad)


@pytest.mark.slow
@distributed(world_size=2)
def test_operations_of_torch(rank):
    made = dist.new_group(backend=NAME)

    def all_reduce(x):
        dist.all_reduce(x, group=made)
        return x

    def begun(x):
        work = dist.all_reduce(x, group=made, async_op=True)
        rows = len(x)
        work.wait()
        return x + rows + work.result()[0]

    def message(x):
        if rank:
            dist.recv(x, 0, group=made)
        else:
            dist.send(x, 1, group=made)
        return x

    for operation in (all_reduce, begun, message):

        def around(x, operation=operation):
            return operation(x * 2) + 1

        got = compiled(around)
        for numel in (4, 6):
            x = torch.arange(numel) + 10.0 * rank
            assert torch.equal(got(x), around(x))


@pytest.mark.slow
@distributed(world_size=2)
def test_ddp(rank):
    def trained(change):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        model = change(DistributedDataParallel(layers, process_group=dist.new_group(backend=NAME)))
        for step in range(2):
            model(torch.arange(8.0).reshape(2, 4) * (rank + step + 1)).square().sum().backward()
        return [value for p in layers.parameters() for value in (p, p.grad)] + list(layers.buffers())

    for one, other in zip(trained(compiled), trained(lambda model: model), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@distributed(world_size=1)
def test_helpers_take_sizes_that_change():
    for function in (lambda data: easydist.concatenate([data, data]), easydist.listify):
        around = compiled(function)
        for size in (3, 4, 5):
            data = {"a": torch.arange(float(size))}
            assert repr(around(data)) == repr(function(data))
