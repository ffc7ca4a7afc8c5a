"""DDP, meshes and hooks over ``easydist_shm``, as over gloo."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import easydist
from easydist.process_group import NAME
from easydist.testing import distributed


def group(**options):
    return dist.new_group(backend=NAME, **options)


@pytest.mark.slow
@pytest.mark.parametrize("initial", [False, True])
@distributed(world_size=2)
def test_ddp_join(initial, rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False), process_group=group())
    with model.join(divide_by_initial_world_size=initial):  # C++ holds its works
        for _ in range(2 + rank):
            model(torch.full((1, 2), 10.0)).sum().backward()
    third = 15 if initial else 30  # of rank 1 alone
    assert model.module.weight.grad.unique().tolist() == [[20, third][rank]]


@pytest.mark.slow
@distributed(world_size=2)
def test_objects_functional_collectives_and_meshes(rank):
    made = group(timeout=timedelta(seconds=50))
    every = [None, None]
    dist.all_gather_object(every, {"rank": rank, "pad": "x" * 10 * rank}, group=made)
    assert every == [{"rank": 0, "pad": ""}, {"rank": 1, "pad": "x" * 10}]
    told = [rank, {"a": rank}]
    dist.broadcast_object_list(told, group_src=1, group=made)
    assert told == [1, {"a": 1}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.13 has new names for some
        assert functional.all_reduce(torch.tensor([rank]), "sum", made).tolist() == [1]
        assert functional.all_gather_tensor(torch.tensor([rank]), 0, made).tolist() == [0, 1]
        assert functional.reduce_scatter_tensor(torch.tensor([1, 2]), "sum", 0, made).tolist() == [2 + 2 * rank]
        assert (
            functional.all_to_all_single(torch.tensor([rank, 5]), None, None, made).tolist() == [[0, 1], [5, 5]][rank]
        )
    assert easydist.comms.of_group(made).monitor.timeout == made.timeout.total_seconds() == 50
    mesh = dist.DeviceMesh.from_group(made, "cpu")
    assert mesh.get_group() is made
    assert easydist.gather(torch.tensor([rank]), group=made).tolist() == [0, 1]
    assert easydist.gather_object([rank], group=mesh) == [0, 1]
    assert easydist.reduce({"x": torch.ones(2)}, "sum", group=made)["x"].tolist() == [2, 2]


class Forked(torch.nn.Module):
    """A model one of whose branches may stay unused."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (torch.nn.Linear(8, 8) for _ in range(3))
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x, branch):
        x = torch.relu(self.first(x))
        return self.last(torch.tanh((self.left if branch else self.right)(x)))


def trained(made, rank, world_size, unused):
    """The weights after 20 steps, every second one of which accumulates two gradients."""
    torch.manual_seed(0)
    # Buckets of a few hundred bytes, so that there are several.
    model = DistributedDataParallel(Forked(), process_group=made, find_unused_parameters=unused, bucket_cap_mb=0.0003)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(rank + 1)

    def backward(step):
        x = torch.randn(4, 8, generator=draw)
        branch = (step + rank) % 3 > 0
        loss = model(x, branch).square().mean()
        (loss if unused else loss + 0 * sum(p.sum() for p in model.parameters())).backward()

    for step in range(20):
        if step % 2:
            with model.no_sync():
                backward(step)
        backward(step)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("unused", [False, True], ids=["all", "unused"])
@distributed(world_size=[2, 3])
def test_ddp_trains_as_over_gloo(unused, rank, world_size):
    made = group()
    ours, theirs = (trained(one, rank, world_size, unused) for one in (made, dist.new_group(backend="gloo")))
    if world_size == 2:  # a + b == b + a
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    every = [torch.empty_like(ours) for _ in range(world_size)]
    dist.all_gather(every, ours, group=made)
    assert all(torch.equal(one, ours) for one in every)


def then_hook(made, bucket):
    """As torch's power SGD: a future, and further operations when it has come."""
    made_of = dist.all_reduce(bucket.buffer(), group=made, async_op=True).get_future()

    def again(future):
        tensor = future.value()[0]
        dist.all_reduce(tensor, group=made, async_op=True).get_future().wait()
        return tensor / 4

    return made_of.then(again)


@pytest.mark.slow
@distributed(world_size=2)
def test_communication_hooks(rank):
    made = group()
    model = DistributedDataParallel(torch.nn.Linear(50, 50), process_group=made, bucket_cap_mb=0.001)
    model.register_comm_hook(made, then_hook)
    model(torch.full((1, 50), rank + 1.0)).sum().backward()
    assert (model.module.weight.grad == 1.5).all()
