"""reduce: bits and logic, the names of torch's and torchcomms' operations, and results on one rank only."""

import functools
import operator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import exchanges
from groups import BACKENDS, check_works, made
from launching import sampled

import easydist
from easydist.comms import RedOpType, ReduceOp
from easydist.errors import DisagreementError, RemoteError
from easydist.testing import distributed

ALL = (1, 2, 3, 4)
BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


def numbers(rank, dtype, size=7):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype is torch.bool else 127, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("size", [7, 70_000])
@distributed(world_size=ALL)
def test_bits_are_combined_as_by_the_operator(rank, world_size, size):
    dtypes = (*WHOLE, torch.uint64)
    every = [{str(dtype): numbers(r, dtype, size) for dtype in dtypes} for r in range(world_size)]
    more = {"array": numbers(rank, torch.int64, size).numpy(), "n": rank + 1, "b": rank < 2}
    for name, combined in BITS.items():
        got = easydist.reduce(every[rank] | more, name)
        for dtype in dtypes:
            assert got[str(dtype)].dtype is dtype
            wide = [tree[str(dtype)].long() for tree in every]
            assert torch.equal(got[str(dtype)].long(), functools.reduce(combined, wide)), dtype
        assert isinstance(got["array"], np.ndarray)
        assert got["n"] == functools.reduce(combined, range(1, world_size + 1))
        assert got["b"] is functools.reduce(combined, [r < 2 for r in range(world_size)])


@distributed(world_size=(1, 2))
def test_floats_have_no_bits_to_combine_on_any_rank(rank, world_size):
    for name in BITS:
        for value, kind in ((0.5, "float64"), (torch.ones(1), "float32"), (1j, "complex128")):
            told = rf"^reduce: \['x'\] is {kind}, and '{name}' combines the bits of integers and bools$"
            with pytest.raises(TypeError, match=told):
                easydist.reduce({"x": value}, name)
    if world_size == 2:
        with pytest.raises(RemoteError, match="TypeError: reduce: the tensor is float64, and 'or' combines the bits"):
            easydist.reduce(1.0 if rank else 1, "or")
    assert easydist.reduce(rank, "or") == (world_size - 1)


NAMED = {
    "SUM": "sum",
    "AVG": "mean",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}


@distributed(world_size=2)
def test_operations_of_torch_and_torchcomms_are_names_too(rank):
    x = torch.tensor([3 + rank, 6 - rank])
    for name, reduction in NAMED.items():
        want = easydist.reduce(x, reduction)
        of_torch, of_comms = getattr(dist.ReduceOp, name), getattr(ReduceOp, name)
        for op in (of_torch, dist.ReduceOp(of_torch), of_comms, RedOpType[name], reduction.upper(), reduction.title()):
            got = easydist.reduce(x, op if rank else reduction)  # the ranks agree whatever each calls it
            assert torch.equal(got, want), op
            assert got.dtype is want.dtype, op


@distributed(world_size=2)
def test_a_premultiplied_sum_is_scaled(rank):
    x = torch.tensor([1.0, 2.0 + rank])
    of_torch = dist.ReduceOp.__new__(dist.ReduceOp)
    of_torch.__setstate__((dist.ReduceOp.PREMUL_SUM, 0.5))  # its maker is in builds with NCCL only
    for op in (ReduceOp.PREMUL_SUM(0.5), ReduceOp.PREMUL_SUM(torch.tensor([0.5])), of_torch):
        assert easydist.reduce(x, op).tolist() == [1.0, 2.5]
        assert easydist.reduce(x, op, scale=4).tolist() == [4.0, 10.0]
    with pytest.raises(
        TypeError, match=r"the factor of PREMUL_SUM is a tensor of shape \(2,\); multiply the tree by it"
    ):
        easydist.reduce(x, ReduceOp.PREMUL_SUM(torch.ones(2)))
    with pytest.raises(DisagreementError, match=r"rank 1: reduce\(reduction='sum', scale=2.0\)"):
        easydist.reduce(x, ReduceOp.PREMUL_SUM(rank + 1))
    for bare in (RedOpType.PREMUL_SUM, dist.ReduceOp.PREMUL_SUM):
        with pytest.raises(TypeError, match=r"^reduce: PREMUL_SUM without its factor"):
            easydist.reduce(x, bare)
    for unknown in ("summ", None, 3, "", "premul_sum"):
        with pytest.raises(
            ValueError if isinstance(unknown, str) else TypeError,
            match=rf"^reduce: there is no reduction {unknown!r}; choose from 'mean', 'sum'",
        ):
            easydist.reduce(x, unknown)
    with pytest.raises(TypeError, match="there is no reduction that is a function; choose from 'mean'"):
        easydist.reduce(x, torch.sum)


def tree(rank, size):
    return {
        "float": torch.arange(size, dtype=torch.float32) * 0.1 + rank,
        "half": torch.full((size,), 60000.0 / (rank + 1), dtype=torch.float16),
        "strided": torch.arange(2.0 * size).view(2, size).t() * (rank + 1),
        "whole": torch.arange(size) + rank,
        "array": np.arange(3.0) * rank,
        "n": rank + 1,
    }


ALONE = [
    (reduction, size)
    for i, reduction in enumerate(["mean", "sum", "max", "prod", "none"])
    for size in ((5, 100_000) if i % 2 else (100_000, 5))
]
"""The sample is each reduction with one of both sizes, in turn."""


@pytest.mark.parametrize(("reduction", "size"), sampled(ALONE))
@distributed(world_size=ALL)
def test_one_rank_alone_gets_what_all_would_get(rank, world_size, reduction, size):
    want = easydist.reduce(tree(rank, size), reduction, 0.5)
    mine = tree(rank, size)
    for dst in range(world_size):
        for named in ({"dst": dst}, {"group_dst": dst}):
            got = easydist.reduce(mine, reduction, 0.5, **named)
            assert (got is None) == (rank != dst)
            for name in got or ():
                assert np.array_equal(got[name], want[name]), name
                assert type(got[name]) is type(want[name])
    for name, value in tree(rank, size).items():
        assert np.array_equal(mine[name], value), name


@BACKENDS
@distributed(world_size=3)
def test_a_reduction_to_one_rank_over_every_backend(rank, backend):
    with made(backend) as group:
        check_works(group, backend)
        for dst in range(3):
            got = easydist.reduce(torch.full((200_000,), 0.1 * rank), "sum", dst=dst, group=group)
            assert got is None if rank != dst else torch.equal(got, torch.full((200_000,), 0.1) + 0.1 * 2)
            assert easydist.reduce(rank, "max", group_dst=dst, check=False, group=group) == (2 if rank == dst else None)


@distributed(world_size=2)
def test_a_large_tree_travels_to_dst_only(rank):
    x = torch.ones(100_000)
    assert exchanges(lambda: easydist.reduce(x, "sum", dst=1)) == ["header", "reduce"]
    assert exchanges(lambda: easydist.reduce(x[:10], "sum", dst=1)) == ["header"]
    with_bound = exchanges(lambda: easydist.reduce({"x": x, "n": 1}, "sum", dst=0))
    assert with_bound.count("all_reduce") == 1  # 8 bytes, by which all ranks learn that a Python int has overflowed


@pytest.mark.parametrize("more", [0, 100_000])
@distributed(world_size=2)
def test_an_overflow_is_raised_on_the_ranks_that_get_nothing_too(rank, more):
    with pytest.raises(OverflowError, match=r"the sum of \['n'\] over 2 ranks does not fit 64 bits"):
        easydist.reduce({"n": 2**62, "x": torch.ones(more)}, "sum", dst=1)
    assert easydist.reduce({"n": 1, "x": torch.ones(more)}, "sum", dst=1) is None or rank == 1


@distributed(world_size=2)
def test_the_ranks_have_to_name_one_dst(rank):
    with pytest.raises(DisagreementError, match=r"rank 1: reduce\(reduction='mean', scale=1.0, dst=1\)"):
        easydist.reduce(torch.ones(1), dst=rank)
    with pytest.raises(ValueError, match="dst=2 is not a rank of the group, which has 2"):
        easydist.reduce(torch.ones(1), dst=2)
    with pytest.raises(RemoteError, match="dst=-1 is not a rank"):
        easydist.reduce(torch.ones(1), dst=-rank)
    assert easydist.reduce(rank, "sum") == 1
