"""broadcast_state_dict of an optimizer: all ranks continue as the source would, or all raise and keep theirs."""

import contextlib
import copy

import pytest
import torch
from groups import made
from launching import sampled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trees import assert_same

import easydist
from easydist import DisagreementError, RemoteError, weights
from easydist.testing import distributed


def net(dtype=torch.float32):
    """The same model on every rank: its parameters are those of the source."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)


def groups_of(model):
    """Three groups, of which one never gets a gradient."""
    first, second, last = model
    last.requires_grad_(False)
    return [
        {"params": list(first.parameters()), "lr": 0.01},
        {"params": list(second.parameters()), "lr": 0.1, "weight_decay": 0.5},
        {"params": list(last.parameters())},
    ]


def named_groups(model):
    return list(model.named_parameters())


class LowPrecision(torch.optim.Optimizer):
    """A state of float32 for parameters of bfloat16, values of every kind, and a state of its own beside them."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "betas": (0.9, float("inf")), "mode": "a", "nothing": None})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"] = {"seen": self.state["all"].get("seen", 0) + 1, "name": "own"}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(param, dtype=torch.float32)).add_(param.grad)
                state.setdefault("parts", ([torch.tensor(1, dtype=torch.int32)], "text", None))[0][0].add_(1)
                param.sub_(group["lr"] * state["sum"].to(param.dtype))


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(groups_of(model), amsgrad=True),
    "AdamW named": lambda model: torch.optim.AdamW(named_groups(model), lr=torch.tensor(0.01), foreach=False),
    "fused": lambda model: torch.optim.Adam(groups_of(model), fused=True),
    "SGD": lambda model: torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9),
    "SGD without state": lambda model: torch.optim.SGD(groups_of(model), lr=0.1),
    "Adafactor": lambda model: torch.optim.Adafactor(groups_of(model)),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3),
    "low precision": lambda model: LowPrecision(groups_of(model.bfloat16())),
}


def train(model, optimizer, steps):
    x = torch.arange(6.0).view(2, 3).to(next(model.parameters()).dtype) / 7

    def closure():
        optimizer.zero_grad()
        loss = model(x).float().pow(2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def trained(name, steps):
    """The same model and optimizer on every rank, after some steps."""
    model = net()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, steps)
    return model, optimizer


def changed(optimizer):
    optimizer.param_groups[0]["lr"] *= 3
    optimizer.param_groups[0]["initial_lr"] = 0.5  # by a scheduler, which the receivers may lack
    return optimizer


def exact(optimizer):
    """The state dict, detached from what comes later."""
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=sampled((3, 2, 1)))
def test_all_ranks_continue_as_the_source_would(rank, world_size, name):
    last = world_size - 1
    for backend, steps_before in (("shm", 0), ("gloo", 0), ("shm", 1), ("gloo", 4)):
        oracle_model, oracle = trained(name, 2)
        changed(oracle)
        model, optimizer = trained(name, 2 if rank == last else steps_before)
        model.load_state_dict(oracle_model.state_dict())
        if rank == last:
            changed(optimizer)
        with made(backend) if world_size > 1 else contextlib.nullcontext() as group:
            got = weights.broadcast_state_dict(optimizer, last, group=group, verify=True)
        assert_same(got, optimizer.state_dict())
        assert_same(got, oracle.state_dict())
        train(model, optimizer, 3)
        train(oracle_model, oracle, 3)
        assert_same(dict(model.state_dict()), dict(oracle_model.state_dict()))
        assert_same(optimizer.state_dict(), oracle.state_dict())


@pytest.mark.slow
@distributed(world_size=2)
def test_the_memory_is_the_receivers_own(rank):
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model)
    if rank == 0:
        train(model, optimizer, 2)
    weights.broadcast_state_dict(optimizer)
    before = exact(optimizer)
    if rank == 0:
        train(model, optimizer, 1)
    easydist.wait_for_everyone()
    if rank == 1:
        assert_same(optimizer.state_dict(), before)


@pytest.mark.slow
@distributed(world_size=2)
def test_a_receiver_without_an_optimizer_gets_the_state_dict(rank):
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model)
    if rank == 0:
        train(model, optimizer, 1)
    got = weights.broadcast_state_dict(optimizer if rank == 0 else None)
    optimizer.load_state_dict(got)
    assert_same(easydist.broadcast_object_list([optimizer.state_dict()])[0], optimizer.state_dict())
    assert optimizer.state_dict()["state"][0]["step"] == 1


def other_class(model):
    return torch.optim.SGD(groups_of(model), lr=0.1)


def other_groups(model):
    return torch.optim.AdamW(model.parameters())


def other_sizes(model):
    groups = groups_of(model)
    groups[0]["params"].append(groups[1]["params"].pop())
    return torch.optim.AdamW(groups)


def other_shapes(model):
    groups = groups_of(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
    groups[1]["params"][1].data = groups[1]["params"][1].data.double()
    return torch.optim.AdamW(groups)


MISFITS = {
    other_class: ["  the optimizer  rank 0: AdamW   rank 1: SGD"],
    other_groups: ["  param_groups  rank 0: 3 groups   rank 1: 1 groups"],
    other_sizes: [
        "  param_groups[0]  rank 0: 2 parameters   rank 1: 3 parameters",
        "  param_groups[1]  rank 0: 2 parameters   rank 1: 1 parameters",
    ],
    other_shapes: [
        "  param_groups[0]['params'][0]  rank 0: float32 (4, 3)   rank 1: float32 (4, 5)",
        "  param_groups[1]['params'][1]  rank 0: float32 (4,)   rank 1: float64 (4,)",
    ],
}


@pytest.mark.slow
@distributed(world_size=3)
def test_other_optimizers_are_an_error_on_all_ranks_and_nothing_changes(rank):
    model = net()
    for make, lines in MISFITS.items():
        optimizer = make(net()) if rank == 1 else torch.optim.AdamW(groups_of(model))
        if rank == 0:
            train(model, optimizer, 1)
        before = exact(optimizer)
        with pytest.raises(DisagreementError) as caught:
            weights.broadcast_state_dict(optimizer)
        assert str(caught.value).splitlines() == [
            f"broadcast_state_dict: ranks disagree on {len(lines)} {'entry' if len(lines) == 1 else 'entries'}",
            *lines,
            "Nothing was written. Pass optimizers of one class, with the same parameters in the same groups and the "
            "same order.",
        ]
        assert_same(optimizer.state_dict(), before)
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1, 2]


@pytest.mark.slow
@distributed(world_size=2)
def test_parameters_in_another_order_are_found_by_their_names(rank):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    optimizer = torch.optim.SGD([(name, model[name].weight) for name in names], lr=0.1)
    with pytest.raises(DisagreementError, match=r"\['params'\]\[0\]  rank 0: a float32 \(2, 2\)   rank 1: b float32"):
        weights.broadcast_state_dict(optimizer)
    if rank == 1:  # without names only the order counts
        optimizer = torch.optim.SGD([model[name].weight for name in names], lr=0.1)
    weights.broadcast_state_dict(optimizer)


@pytest.mark.slow
@distributed(world_size=2)
def test_what_is_no_optimizer_on_one_side_is_an_error_on_both(rank):
    model = net()
    optimizer = torch.optim.AdamW(groups_of(model))
    if rank == 0:
        train(model, optimizer, 1)
    before = exact(optimizer)
    with pytest.raises(DisagreementError, match="  the optimizer  rank 0: none   rank 1: AdamW"):
        weights.broadcast_state_dict(model if rank == 0 else optimizer)
    with pytest.raises(DisagreementError, match="  the optimizer  rank 0: none   rank 1: AdamW"):
        weights.broadcast_state_dict(optimizer.state_dict() if rank == 0 else optimizer)
    with pytest.raises(DisagreementError, match=r"  0\.bias  rank 0: missing   rank 1: float32"):
        weights.broadcast_state_dict(optimizer if rank == 0 else model)
    if rank == 0:
        optimizer.param_groups[0]["call"] = print
    with pytest.raises(RemoteError, match=r"\['param_groups'\]\[0\]\['call'\] is a builtin_function_or_method"):
        weights.broadcast_state_dict(optimizer)
    optimizer.param_groups[0].pop("call", None)
    assert_same(optimizer.state_dict(), before)
    target = torch.optim.AdamW(groups_of(net().to("meta")) if rank == 1 else groups_of(model))
    with pytest.raises(RemoteError, match="TypeError: the optimizer has a parameter on the meta device"):
        weights.broadcast_state_dict(target)
    mesh = init_device_mesh("cpu", (2,))
    sharded = torch.optim.SGD([nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))])
    for source in (0, 1):
        with pytest.raises(RemoteError, match="TypeError: the optimizer has a parameter that is a DTensor"):
            weights.broadcast_state_dict(sharded if rank == 0 else optimizer, source)
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]


@pytest.mark.slow
@distributed(world_size=2)
def test_accelerates_wrapper_is_an_optimizer(rank):
    from accelerate import Accelerator

    for wrapped in ((0, 1), (0,), (1,)):
        model = net()
        optimizer = OPTIMIZERS["AdamW"](model)
        if rank == 0:
            train(model, optimizer, 2)
        given = Accelerator(cpu=True).prepare_optimizer(optimizer) if rank in wrapped else optimizer
        got = weights.broadcast_state_dict(given)
        assert_same(got, optimizer.state_dict())
        assert [state["step"].item() for state in optimizer.state.values()] == [2] * 4
        assert_same(easydist.broadcast_object_list([optimizer.state_dict()])[0], optimizer.state_dict())
