"""GatheredParameters: whole inside, and a change made on one rank reaches every shard."""

import copy
import functools
import gc
import inspect
import pickle
import warnings
import weakref

import numpy as np
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


def collect_fsdp1():
    """Let go of it here: torch 2.9 warns of its own FSDP1, in whatever runs when that is collected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Deallocating Tensor that still has live PyObject references")
        gc.collect()


def full(net):
    return [p.full_tensor().detach().clone() for p in net.parameters()]


@pytest.mark.slow
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


@pytest.mark.slow
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
    del net, parameter
    collect_fsdp1()


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


def split_over_two(net):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})


@pytest.mark.slow
@distributed(world_size=2)
def test_a_backward_pass_goes_on_after_the_block_if_its_forward_pass_came_before(rank):
    alone, x = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2)), torch.arange(10.0).view(2, 5)
    easydist.broadcast(alone.state_dict())
    net = split_over_two(copy.deepcopy(alone))
    (alone(x) ** 2).sum().backward()
    output = net(x)  # a graph that holds the shards themselves, as FSDP2's does not
    with easydist.GatheredParameters(net):
        assert torch.equal(net[0].weight, alone[0].weight)
    (output**2).sum().backward()
    for parameter, one in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad)


@pytest.mark.slow
@distributed(world_size=2)
def test_such_a_backward_pass_notices_that_values_were_changed(rank):
    net = split_over_two(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2)))
    output = net(torch.ones(2, 5))
    with easydist.GatheredParameters(net, modifier_rank=0):
        net[1].weight.data.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert net[1].weight.full_tensor().unique().tolist() == [1.0]


@distributed(world_size=2)
def test_the_modifier_rank_is_the_same_number_in_any_type(rank, world_size):
    layer = torch.nn.Linear(2, 1)
    with easydist.GatheredParameters(layer, modifier_rank=torch.tensor(1) if rank else np.int64(1)):
        torch.nn.init.constant_(layer.weight, rank)
    assert layer.weight.tolist() == [[1.0, 1.0]]


@distributed(world_size=2)
def test_misuse_is_an_error_for_all_before_anything_happens(rank, world_size):
    net = sharded(world_size)
    with pytest.raises(ValueError, match="modifier_rank=17 is not a rank of the group, which has 2"):
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


@torch.inference_mode()
def of_inference():
    return nn.Linear(2, 1)


UNFIT = {
    "not initialized": (lambda: nn.LazyLinear(2), "TypeError: .* a parameter is not initialized yet"),
    "meta": (lambda: nn.Linear(2, 1, device="meta"), r"TypeError: .* a parameter of shape \(1, 2\) is a meta tensor"),
    "expanded": (lambda: nn.Parameter(torch.ones(1).expand(3)), r"ValueError: .* shape \(3,\) is an expanded tensor"),
    "inference": (of_inference, "ValueError: .* is an inference tensor .*, so it cannot be written"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("modifier_rank", [None, 0])
@distributed(world_size=2)
def test_a_parameter_that_cannot_be_written_back_is_refused_before_the_body(rank, name, modifier_rank):
    make, text = UNFIT[name]
    with pytest.raises(RemoteError, match=f"rank 1: {text}"):
        easydist.GatheredParameters(make() if rank else nn.Linear(2, 1), modifier_rank).__enter__()
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.slow
@distributed(world_size=2)
def test_a_sharded_parameter_on_the_meta_device_is_refused_on_all_ranks(rank):
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta" if rank else "cpu"):
        net = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(
        RemoteError, match=r"rank 1: TypeError: .* shape \(4, 4\) is on the meta device; call model.to_empty"
    ):
        easydist.GatheredParameters(net, 0).__enter__()
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize("make", [model, functools.partial(sharded, 2)], ids=["plain", "sharded"])
@distributed(world_size=2)
def test_another_shape_in_the_body_is_an_error_on_all_ranks_and_changes_nothing(rank, make, modifier_rank):
    layer = make()[0]
    before = [getattr(p, "to_local", p.detach)().detach().clone() for p in layer.parameters()]

    def reshape():
        with easydist.GatheredParameters(layer, modifier_rank):
            layer.bias.data.fill_(7.0)
            if rank == 0:
                layer.weight.data = torch.zeros(3, 3)

    with pytest.raises(RemoteError if rank else RuntimeError, match=r"has the shape \(3, 3\) after the body"):
        reshape()
    after = [getattr(p, "to_local", p.detach)().detach() for p in layer.parameters()]
    assert all(map(torch.equal, after, before))
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_parameters_of_an_fsdp1_module_have_to_be_passed_as_the_module(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(TypeError, match="pass the module"):
            easydist.GatheredParameters(list(net.parameters())).__enter__()
    del net
    collect_fsdp1()


# --- the class, and the calls it takes


@distributed(world_size=(1, 2))
def test_an_instance_is_a_context_manager_that_can_be_used_again(rank, world_size):
    net = sharded(world_size)
    whole = easydist.GatheredParameters(net.parameters(), modifier_rank=0)
    assert isinstance(whole, easydist.GatheredParameters)
    for number in (1.0, 2.0):
        with whole:
            assert [tuple(p.shape) for p in net.parameters()] == [(7, 5), (7,), (2, 7)]
            for parameter in net.parameters():
                parameter.data.fill_(number + 10 * rank)
        assert [p.unique().tolist() for p in full(net)] == [[number]] * 3
    with whole, pytest.raises(RuntimeError, match="the body of this instance has not ended yet; make another instance"):
        whole.__enter__()
    with whole, easydist.GatheredParameters(net[0]):  # another one may be open as well
        assert net[0].weight.shape == (7, 5)

    @easydist.GatheredParameters(net)
    def shape():
        return tuple(net[0].weight.shape)

    assert shape() == shape() == (7, 5)


@distributed(world_size=2)
def test_several_models_and_accelerates_order(rank, world_size):
    one, two = sharded(world_size), sharded(world_size)

    def filled(*args, **kwargs):
        with easydist.GatheredParameters(*args, **kwargs):
            one[0].weight.data.fill_(rank + 1.0)
        (weight, *_) = full(one)
        return weight.unique().tolist()

    assert filled(one, two, modifier_rank=1) == [2.0]
    assert filled(one, two[0].weight, list(two[1].parameters()), modifier_rank=0) == [1.0]
    assert filled(one, 1) == filled(one, 1, None, True) == filled(params=one, modifier_rank=1) == [2.0]
    assert filled([one], None) == filled(one.parameters(), None) == [2.0]
    assert filled(one, 0, None, enabled=True) == [1.0]
    assert str(inspect.signature(easydist.GatheredParameters)).startswith("(*models: 'Any', modifier_rank: ")
    for args, kwargs, text in (
        ((), {}, "missing 1 required positional argument: 'models'"),
        ((one,), {"params": one}, "models= and params= are the same argument"),
        ((one, 0), {"modifier_rank": 0}, "an argument was passed by position and by name"),
        ((one, 0, None, True, 5), {}, "got 5 arguments"),
    ):
        with pytest.raises(TypeError, match=text):
            easydist.GatheredParameters(*args, **kwargs)


# --- in the body


@pytest.mark.filterwarnings("error")
@distributed(world_size=WORLDS)
@pytest.mark.parametrize("forward_before", [False, True])
def test_a_forward_pass_in_the_body_uses_the_whole_parameters(rank, world_size, forward_before):
    net, alone, batch = sharded(world_size), model(), torch.arange(10.0).view(2, 5)
    if forward_before:
        net(batch).sum().backward()
        net.zero_grad()
    with easydist.GatheredParameters(net, modifier_rank=0):
        with torch.no_grad():
            for one in (net, alone):
                one[0].weight.mul_(rank + 2)  # this rank's own values count in the body
        kept = net(batch)
        torch.testing.assert_close(kept, alone(batch))
        net(batch).sum().backward()
        alone(batch).sum().backward()
        torch.testing.assert_close(net[1].weight.grad, alone[1].weight.grad)
    with pytest.raises(RuntimeError, match="the parameters are sharded again; call backward"):
        kept.sum().backward()
    for one, other in zip(full(net), (model()[0].weight * 2, *list(model().parameters())[1:]), strict=True):
        torch.testing.assert_close(one, other.detach())
    del kept
    train_alike(net, world_size)


def train_alike(net, world_size):
    """One step of training: what the body has left behind does not disturb FSDP2."""
    other = model()
    other.load_state_dict(dict(zip(other.state_dict(), full(net), strict=True)))
    for one in (net, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
        one(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        one.zero_grad()
    for one, expected in zip(full(net), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected.detach())


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("forward_before", [False, True])
def test_load_state_dict_in_the_body_reaches_every_shard(rank, world_size, forward_before):
    net = sharded(world_size)
    if forward_before:
        net(torch.ones(1, 5))
    state = {name: torch.full_like(value, 1.0 + i) for i, (name, value) in enumerate(model().state_dict().items())}
    with easydist.GatheredParameters(net, modifier_rank=world_size - 1):
        if rank == world_size - 1:
            net.load_state_dict(state)
        assert all(type(value) is not type(net) for value in net.state_dict().values())
    assert [one.unique().tolist() for one in full(net)] == [[1.0], [2.0], [3.0]]
    net.load_state_dict(net.state_dict())  # of shards, as before
    train_alike(net, world_size)


@distributed(world_size=2)
def test_replacing_a_parameter_in_the_body_is_an_error_on_all_ranks(rank, world_size):
    net = sharded(world_size)
    before = full(net)
    said = "weight of FSDPLinear was replaced by another parameter in the body"

    def by_assignment(layer):
        layer.weight = nn.Parameter(torch.zeros(7, 5))

    def by_deletion(layer):
        del layer.weight
        layer.weight = nn.Parameter(torch.zeros(7, 5))

    def by_loading(layer):
        layer.load_state_dict({"weight": torch.zeros(7, 5), "bias": torch.zeros(7)}, assign=True)

    def gathered(replace, ranks, params):
        with easydist.GatheredParameters(params, modifier_rank=0):
            if rank in ranks:
                replace(net[0])

    for replace in (by_assignment, by_deletion, by_loading):
        for ranks in ({0, 1}, {1}):
            for params in (net, list(net.parameters())):
                with pytest.raises(RuntimeError if rank in ranks else RemoteError, match=said):
                    gathered(replace, ranks, params)
    assert all(torch.equal(one, other) for one, other in zip(before, full(net), strict=True))
    train_alike(net, world_size)


@distributed(world_size=2)
def test_plain_parameters_are_not_replaced_either(rank):
    net = model()
    with pytest.raises(RuntimeError, match="weight of Linear was replaced"), easydist.GatheredParameters(net, 0):
        net[1].weight = nn.Parameter(torch.zeros(2, 7))
    net[1].weight = nn.Parameter(torch.zeros(2, 7))  # outside of a body as ever


@distributed(world_size=2)
def test_a_forward_pass_needs_all_parameters_whole(rank, world_size):
    net = sharded(world_size)
    with easydist.GatheredParameters(net[0].weight):
        with pytest.raises(RuntimeError, match=r"a forward pass of FSDP.* needs all of its parameters whole"):
            net[0](torch.ones(1, 5))
        with pytest.raises(RuntimeError, match="pass the module"):
            net(torch.ones(1, 5))
    with easydist.GatheredParameters(net[0]):
        net[0](torch.ones(1, 5))
    train_alike(net, world_size)


@distributed(world_size=2)
def test_after_a_forward_pass_without_a_backward_pass(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=init_device_mesh("cpu", (world_size,)))  # the root stays gathered after it
    with torch.no_grad():
        net(torch.ones(1, 5))
    assert not hasattr(net[0].weight, "full_tensor")
    taken = [net[0].weight]
    with easydist.GatheredParameters(net, modifier_rank=1):
        net[0].weight.data.fill_(rank + 1.0)
    assert full(net)[0].unique().tolist() == [2.0]
    with torch.no_grad():
        net(torch.ones(1, 5))
    with pytest.raises(TypeError, match=r"drops this copy of it; pass the module, or take .* after module\.reshard"):
        easydist.GatheredParameters([net[0].weight]).__enter__()
    del taken
    train_alike(net, world_size)


@distributed(world_size=2)
def test_a_weak_reference_taken_in_the_body_does_no_harm(rank, world_size):
    net = sharded(world_size)
    with easydist.GatheredParameters(net):
        reference = weakref.ref(net[0].weight)
    assert reference() is net[0].weight
    assert hasattr(net[0].weight, "full_tensor")
    train_alike(net, world_size)
