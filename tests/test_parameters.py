"""GatheredParameters: whole inside, and a change made on one rank reaches every shard."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import easydist
from easydist import RemoteError
from easydist.testing import distributed

WORLDS = (1, 2, 3)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2, bias=False))


def sharded(world_size):
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def full(net):
    return [p.full_tensor().detach().clone() for p in net.parameters()]


@distributed(world_size=WORLDS)
def test_sharded_parameters_are_whole_inside(rank, world_size):
    net = sharded(world_size)
    before = list(net.parameters())
    with easydist.GatheredParameters(net):
        for parameter, want in zip(net.parameters(), model().parameters(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter, want)
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    assert all(hasattr(parameter, "full_tensor") for parameter in before)


@distributed(world_size=WORLDS)
def test_a_change_on_modifier_rank_reaches_every_shard(rank, world_size):
    net, modifier = sharded(world_size), world_size - 1
    with easydist.GatheredParameters(net.parameters(), modifier_rank=modifier):
        if rank == modifier:
            for i, parameter in enumerate(net.parameters()):
                nn.init.constant_(parameter, i + 1.0)
        else:
            nn.init.zeros_(net[0].weight)
    assert [p.unique().tolist() for p in full(net)] == [[1.0], [2.0], [3.0]]


@distributed(world_size=(1, 2))
def test_without_modifier_rank_changes_are_thrown_away(rank, world_size):
    net = sharded(world_size)
    before = full(net)
    with easydist.GatheredParameters(net[0].weight):
        net[0].weight.data.zero_()
    assert all(torch.equal(one, other) for one, other in zip(before, full(net), strict=True))


@distributed(world_size=2)
def test_training_goes_on_before_and_after(rank, world_size):
    net, alone = sharded(world_size), model()
    for step in range(3):
        for one in (net, alone):
            torch.manual_seed(step)
            one(torch.randn(4, 5)).square().sum().backward()
            torch.optim.SGD(one.parameters(), lr=0.01).step()
            one.zero_grad()
        with easydist.GatheredParameters(net, modifier_rank=0):
            if rank == 0:
                net[0].bias.data.add_(1)
        alone[0].bias.data.add_(1)
    for one, other in zip(full(net), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@distributed(world_size=2)
def test_an_exception_in_the_body_reaches_all_and_changes_nothing(rank, world_size):
    net = sharded(world_size)
    before = full(net)

    def change():
        with easydist.GatheredParameters(net, modifier_rank=1):
            net[0].weight.data.zero_()
            if rank == 1:
                raise KeyError("broken")

    with pytest.raises(KeyError if rank else RemoteError, match="broken"):
        change()
    assert all(torch.equal(one, other) for one, other in zip(before, full(net), strict=True))


@distributed(world_size=2)
def test_plain_parameters_end_as_the_modifier_leaves_them(rank):
    net = model()
    with easydist.GatheredParameters(net, modifier_rank=1):
        net[1].weight.data.fill_(rank + 1.0)
    assert net[1].weight.unique().tolist() == [2.0]


@distributed(world_size=2)
def test_fsdp1_modules(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    with easydist.GatheredParameters(net, modifier_rank=1):
        assert sorted(tuple(p.shape) for p in net.parameters()) == [(2, 7), (7,), (7, 5)]
        for parameter in net.parameters():
            parameter.data.fill_(float(rank))
    with FullyShardedDataParallel.summon_full_params(net):
        assert [p.unique().tolist() for p in net.parameters()] == [[1.0]] * 3


@distributed(world_size=2)
def test_disabled_does_nothing(rank, world_size):
    net = sharded(world_size)
    with easydist.GatheredParameters(net, modifier_rank=0, enabled=False):
        assert hasattr(net[0].weight, "full_tensor")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # DeepSpeed's own
@distributed(world_size=2)
def test_deepspeed_zero_3(rank):
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        check_zero_3(deepspeed, rank)


def check_zero_3(deepspeed, rank):
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    with deepspeed.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}):
        layer = nn.Linear(4, 6)
    with easydist.GatheredParameters(layer, modifier_rank=1):
        assert layer.weight.shape == (6, 4)
        nn.init.constant_(layer.weight, rank + 1.0)
    assert layer.weight.shape == (0,)
    with easydist.GatheredParameters(layer.weight):
        assert layer.weight.unique().tolist() == [2.0]


@distributed(world_size=2)
def test_copies_made_in_the_body_are_ordinary_parameters(rank, world_size):
    net = sharded(world_size)
    with easydist.GatheredParameters(net):
        copies = [copy.deepcopy(net[0].weight), pickle.loads(pickle.dumps(net[0].weight))]
    for one in copies:
        assert type(one) is nn.Parameter
        assert torch.equal(one, model()[0].weight)


@distributed(world_size=2)
def test_a_parameter_that_cannot_trade_places_is_an_error_for_all_and_none_does(rank, world_size):
    net = sharded(world_size)
    reference = weakref.ref(net[0].weight) if rank == 0 else None
    with pytest.raises(RemoteError, match="rank 0: RuntimeError: Cannot swap"), easydist.GatheredParameters(net):
        pass
    assert all(hasattr(parameter, "full_tensor") for parameter in net.parameters())
    del reference
    with easydist.GatheredParameters(net):
        pass


@distributed(world_size=2)
def test_misuse_is_an_error_for_all_before_anything_happens(rank, world_size):
    net = sharded(world_size)
    with pytest.raises(ValueError, match="modifier_rank=17 is not a rank: there are 2"):
        easydist.GatheredParameters(net, 17).__enter__()
    with pytest.raises(
        RemoteError, match="rank 1: TypeError: GatheredParameters takes parameters and modules, got int"
    ):
        easydist.GatheredParameters([net[0].weight, 5] if rank else net).__enter__()

    def collective_inside():
        with easydist.GatheredParameters(net, 0):
            if rank == 0:
                raise KeyError("broken")
            easydist.gather(torch.ones(1))

    with pytest.raises((KeyError, RemoteError), match="broken"):
        collective_inside()
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_parameters_of_an_fsdp1_module_have_to_be_passed_as_the_module(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(TypeError, match="pass the module"):
            easydist.GatheredParameters(list(net.parameters())).__enter__()
