"""Tensors that hold other tensors: results of functional collectives, as tensor-parallel modules return them."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import easydist
from easydist.comms import ReduceOp, new_comm
from easydist.testing import distributed

NUMEL = 1 << 17  # travels by itself, by its address
VERBS = {
    "gather": lambda x: easydist.gather({"x": x})["x"],
    "broadcast": lambda x: easydist.broadcast([x])[0],
    "reduce": lambda x: easydist.reduce(x, "mean"),
    "scatter": lambda x: easydist.scatter(x),
    "gather_object": lambda x: torch.stack(easydist.gather_object(x)),
    "broadcast_tensor_dict": lambda x: easydist.broadcast_tensor_dict({"x": x})["x"],
}


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=2)
def test_what_a_functional_collective_returns_is_waited_for(rank, verb):
    group = dist.new_group(list(range(2)))
    for numel in (3, NUMEL):
        under_way = functional.all_reduce(torch.full((2 * numel,), rank + 1.0), "sum", group)
        assert type(under_way) is functional.AsyncCollectiveTensor
        assert VERBS[verb](under_way).unique().tolist() == [3.0]


@distributed(world_size=2)
def test_tensors_without_memory_are_refused_on_all_ranks(rank):
    two = TwoTensor(torch.ones(2), torch.ones(2))
    for x in (two, torch.ones(2) if rank else two):
        with pytest.raises((TypeError, easydist.errors.RemoteError), match="TwoTensor, which has no memory of its own"):
            easydist.gather(x)
    assert easydist.gather(torch.ones(1)).tolist() == [1, 1]


@distributed(world_size=2)
def test_integers_of_less_than_8_bits_are_refused_on_all_ranks(rank):
    """torch has no copy of them, and the source of a broadcast needs none: it returned, and the others raised."""
    nibbles = torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    for name in ("gather", "broadcast", "reduce", "scatter", "broadcast_tensor_dict"):
        with pytest.raises(
            (TypeError, easydist.errors.RemoteError), match=r"uint4, which torch cannot copy; pass .view"
        ):
            VERBS[name](nibbles)
    assert easydist.gather(nibbles.view(torch.uint8)).tolist() == [0, 1, 2, 3] * 2


@distributed(world_size=(1, 2))
def test_dual_tensors_are_refused_on_all_ranks(rank, world_size):
    """Their tangents do not travel; other tensors in a level of forward-mode autograd do, as always."""
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch makes its decompositions with it
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for x in (torch.ones(2),) * 3:  # a guard now knows this kind
            assert easydist.gather(x).tolist() == [1.0] * 2 * world_size
        for x in (dual, torch.ones(2) if rank else dual):
            with pytest.raises((TypeError, easydist.errors.RemoteError), match="its tangent would be lost"):
                easydist.gather(x)
        assert easydist.reduce(forward_ad.unpack_dual(dual).primal, "sum").tolist() == [world_size] * 2
    assert easydist.gather(torch.ones(1)).tolist() == [1] * world_size


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distributed(world_size=2)
def test_communicators_refuse_them_before_anything_is_sent(rank, backend):
    comm = new_comm(backend, torch.device("cpu"), "main")
    under_way = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    with pytest.raises(TypeError, match=r"call wait\(\) of this AsyncCollectiveTensor first"):
        comm.all_reduce(under_way, ReduceOp.SUM, False)
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script")
        dual, x = forward_ad.make_dual(torch.ones(2), torch.ones(2)), torch.ones(2)
        for move, *given in ((comm.all_reduce, ReduceOp.SUM), (comm.broadcast, 0), (comm.all_gather_single, dual)):
            with pytest.raises(TypeError, match="its tangent would be lost"):
                move(dual, *given, False)
        comm.all_reduce(x, ReduceOp.SUM, False)
        assert x.tolist() == [2.0] * 2
    comm.barrier(False)
