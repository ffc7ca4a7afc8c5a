"""reduce(x, "sum") == (x of rank 0 + x of rank 1) + …, and so on, with torch.sum's dtypes."""

import functools
import itertools

import numpy as np
import pytest
import torch
from counting import recorded
from groups import BACKENDS, made

import easydist
from easydist.testing import distributed

ALL = (1, 2, 3, 4)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
FLOAT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = torch.complex128


def values(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(5, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (5,), generator=generator).to(dtype)


def fold(fn, parts):
    return functools.reduce(fn, parts)


def oracle(reduction, parts):
    """One process, all ranks' tensors: torch.sum's dtypes, halves through float32, in rank order."""
    dtype = parts[0].dtype
    wide = [p.to(torch.promote_types(dtype, torch.float32)) if dtype.is_floating_point else p.long() for p in parts]
    if reduction in ("max", "min"):
        return fold(torch.maximum if reduction == "max" else torch.minimum, wide).to(dtype)
    total = fold(torch.mul if reduction == "prod" else torch.add, wide)
    if reduction == "mean":
        return (total / len(parts)).to(dtype if dtype.is_floating_point else torch.float32)
    return total.to(dtype) if dtype.is_floating_point else total


@distributed(world_size=ALL)
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min", "prod"])
def test_law_for_every_dtype(rank, world_size, reduction):
    got = easydist.reduce({str(dtype): values(rank, dtype) for dtype in WHOLE + FLOAT}, reduction)
    for dtype in WHOLE + FLOAT:
        want = oracle(reduction, [values(r, dtype) for r in range(world_size)])
        assert got[str(dtype)].dtype == want.dtype, dtype
        assert torch.equal(got[str(dtype)], want), dtype


@distributed(world_size=2)
def test_sums_of_small_integers_do_not_wrap(rank):
    got = easydist.reduce(torch.tensor([200], dtype=torch.uint8), "sum")
    assert (got.tolist(), got.dtype) == ([400], torch.int64)
    assert easydist.reduce(True, "sum") == 2


@distributed(world_size=2)
def test_mean_of_integers_is_a_float(rank):
    got = easydist.reduce(torch.tensor([rank, 2 * rank]))
    assert (got.tolist(), got.dtype) == ([0.5, 1.0], torch.float32)
    assert easydist.reduce(rank) == 0.5


@distributed(world_size=2)
def test_the_mean_of_integers_follows_the_default_dtype(rank):
    assert easydist.reduce(torch.arange(2), "mean").dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert easydist.reduce(torch.arange(2), "mean").dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@distributed(world_size=3)
def test_a_mean_of_halves_does_not_overflow_on_the_way(rank):
    got = easydist.reduce(torch.full((2,), 60000.0, dtype=torch.float16))
    assert got.tolist() == [60000.0, 60000.0]


@distributed(world_size=ALL)
def test_none_is_the_identity(rank):
    x = torch.tensor([rank])
    got = easydist.reduce({"x": x, "b": torch.tensor(True)}, "none")
    assert got["x"].tolist() == [rank]
    assert got["b"].dtype == torch.bool
    assert got["x"].data_ptr() != x.data_ptr()


@pytest.mark.parametrize("numel", [3, 50_000, 100_000])
@distributed(world_size=(1, 2, 3))
def test_the_input_stays_and_the_result_is_new(rank, world_size, numel):
    x = torch.ones(numel, requires_grad=True)
    got = easydist.reduce(x, "sum")
    assert x.unique().tolist() == [1.0]
    assert got.unique().tolist() == [float(world_size)]
    got.zero_()
    assert x.unique().tolist() == [1.0]


def factor(reduction, world_size):
    return {"sum": 1.0, "mean": 1 / world_size, "none": 1.0}[reduction]


@pytest.mark.parametrize("numel", [3, 100_000], ids=["small", "large"])
@BACKENDS
@distributed(world_size=ALL)
def test_the_derivative_by_the_own_input_is_kept_without_an_exchange(rank, world_size, backend, numel):
    with made(backend) as group:
        for reduction, scale in itertools.product(("sum", "mean", "none"), (1.0, 0.5)):
            x, z = (
                torch.full((numel,), rank + 1.0, dtype=dtype, requires_grad=True) for dtype in (torch.float64, COMPLEX)
            )
            got = easydist.reduce({"x": x * 2, "z": z, "n": 1, "plain": torch.ones(2)}, reduction, scale, group=group)
            assert not got["plain"].requires_grad
            with recorded() as operations:
                (got["x"] ** 2 + (got["z"] * (1 - 2j)).real).sum().backward()
            assert operations == []
            own = scale * factor(reduction, world_size)
            torch.testing.assert_close(x.grad, 4 * own * got["x"].detach())
            torch.testing.assert_close(z.grad, torch.full_like(z, own * (1 + 2j)))


@distributed(world_size=(1, 2, 3))
def test_the_derivative_by_the_own_input_can_be_differentiated_again_and_results_changed(rank, world_size):
    x = torch.arange(3.0, requires_grad=True)
    (own,) = torch.autograd.grad(easydist.reduce(x * x, "sum").sum(), x, create_graph=True)
    own.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    x.grad = None
    got = easydist.reduce([x, x, 2 * x, torch.ones(3, requires_grad=True)])
    assert got[0] is got[1]
    kept = got[0] * got[0]
    got[2] += 1
    got[3].zero_()
    (kept + got[2]).sum().backward()
    torch.testing.assert_close(x.grad, (2 * got[0].detach() + 2) / world_size)


@distributed(world_size=2)
def test_every_dtype_has_the_derivative_by_the_own_input(rank):
    for dtype in (*FLOAT, torch.float8_e5m2, torch.complex64):
        x = torch.full((2,), 2.0).to(dtype).requires_grad_()
        y = torch.ones(2, requires_grad=True)
        got = easydist.reduce({"x": x, "y": y}, "mean", 0.5)
        got["x"].backward(torch.full((2,), 4.0).to(dtype))
        assert x.grad.dtype == dtype
        assert x.grad.to(torch.complex64).tolist() == [1, 1]
        assert y.grad is None  # unlike zeros, this keeps an optimizer from touching it


@distributed(world_size=(1, 2))
def test_other_reductions_and_calls_without_grad_mode_are_detached(rank):
    x = torch.ones(3, requires_grad=True)
    for reduction in ("max", "min", "prod"):
        assert not easydist.reduce(x, reduction).requires_grad
    assert not easydist.reduce(x.detach(), "sum").requires_grad
    assert not easydist.reduce({"x": x, "n": torch.arange(3)}, "sum")["n"].requires_grad
    with torch.no_grad():
        assert not easydist.reduce(x, "sum").requires_grad
    with torch.inference_mode():
        assert not easydist.reduce(x, "sum").requires_grad


@distributed(world_size=2)
def test_scale_multiplies_the_result(rank):
    assert easydist.reduce(torch.tensor([2.0 * rank]), "mean", 0.5).tolist() == [0.5]
    assert easydist.reduce(torch.tensor([3 * rank]), "max", 0.5).tolist() == [1.5]


@distributed(world_size=2)
def test_strides_arrays_numbers_and_ties(rank):
    grid = (torch.arange(6).view(2, 3) * (rank + 1)).t()
    got = easydist.reduce(
        {"grid": grid, "a": np.float32(rank), "b": np.arange(2) + rank, "n": 1.5, "again": grid}, "sum"
    )
    assert torch.equal(got["grid"], torch.arange(6).view(2, 3).t() * 3)
    assert got["again"] is got["grid"]
    assert type(got["a"]) is np.float32
    assert got["b"].tolist() == [1, 3]
    assert got["n"] == 3.0
    assert type(got["n"]) is float


@distributed(world_size=(2, 3))
def test_nan_is_passed_on(rank):
    x = torch.tensor([float("nan") if rank == 0 else 1.0, float(rank), -0.0])
    assert easydist.reduce(x, "max")[0].isnan()
    assert easydist.reduce(x, "min")[0].isnan()
    assert easydist.reduce(x, "sum")[0].isnan()


@distributed(world_size=3)
def test_complex_float8_and_uint64(rank):
    z = torch.tensor([complex(rank, 1)])
    assert easydist.reduce(z, "sum").tolist() == [3 + 3j]
    assert easydist.reduce(z, "prod").tolist() == [(0 + 1j) * (1 + 1j) * (2 + 1j)]
    assert easydist.reduce(z).tolist() == [1 + 1j]
    low = torch.tensor([1.5 + rank]).to(torch.float8_e4m3fn)
    assert easydist.reduce(low, "sum").float().tolist() == [7.5]
    assert easydist.reduce(low, "max").float().tolist() == [3.5]
    huge = torch.tensor([2**63 + rank], dtype=torch.uint64)
    assert easydist.reduce(huge, "max").tolist() == [2**63 + 2]
    assert easydist.reduce(huge, "min").tolist() == [2**63]
    with pytest.raises(TypeError, match="reduce: the tensor is complex, and complex numbers have no max"):
        easydist.reduce(z, "max")


@distributed(world_size=(3, 4))
def test_every_rank_gets_the_same_bits(rank, world_size):
    x = torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 4)
    everyone = easydist.gather(easydist.reduce(x, "sum")[None])
    assert (everyone == everyone[0]).all()
    assert torch.equal(
        everyone[0],
        oracle(
            "sum",
            [
                torch.randn(1001, generator=torch.Generator().manual_seed(r)) * 10.0 ** (r * 4)
                for r in range(world_size)
            ],
        ),
    )


@distributed(world_size=(1, 2))
def test_a_typo_is_an_error_on_every_rank(rank):
    with pytest.raises(
        ValueError, match="there is no reduction 'avg'; choose from 'mean', 'sum', 'max', 'min', 'prod'"
    ):
        easydist.reduce(torch.ones(1), "avg")
    assert easydist.reduce(1, "max") == 1


@distributed(world_size=2)
def test_empty_trees_and_tensors(rank):
    assert easydist.reduce({}) == {}
    assert easydist.reduce({"x": torch.empty(0, 3)}, "sum")["x"].shape == (0, 3)


@distributed(world_size=2)
def test_leaves_without_elements_may_be_tied_on_some_ranks(rank):
    """All data of such a call has come with the headers, on every rank."""
    for dtype in (torch.float32, torch.int8):
        one, other = torch.empty(2, 0, 3, dtype=dtype).unbind()
        got = easydist.reduce([one, other] if rank else [one, one], "sum")
        assert [part.shape for part in got] == [(0, 3), (0, 3)]
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=(1, 2))
def test_results_are_tensors_of_their_own(rank):
    weight = torch.ones(2, requires_grad=True)
    got = easydist.reduce({"a": torch.ones(2), "b": torch.ones(2), "big": torch.ones(100_000)})
    assert got["a"].untyped_storage().nbytes() == 8
    loss = (got["a"] * weight).sum()
    got["b"] += weight.detach()
    got["a"] = got["a"] + weight
    loss.backward()
    assert weight.grad.tolist() == [1.0, 1.0]


@distributed(world_size=2)
def test_whole_numbers_are_averaged_in_double_precision(rank):
    assert easydist.reduce(16_777_217) == 16_777_217.0
    assert easydist.reduce(np.int64(16_777_217)).dtype == np.float64
    assert easydist.reduce(torch.tensor([2**62])).tolist() == [float(2**62)]


@distributed(world_size=2)
def test_unsigned_64_bits_are_compared_as_such(rank):
    x = torch.tensor([2**63 if rank == 0 else 1], dtype=torch.uint64)
    assert easydist.reduce(x, "max").tolist() == [2**63]
    assert easydist.reduce(x, "min").tolist() == [1]
    assert easydist.reduce(x, "sum").tolist() == [2**63 + 1]


@distributed(world_size=2)
def test_scale_of_float8_and_of_equal_numbers_written_otherwise(rank):
    low = torch.tensor([2.0]).to(torch.float8_e4m3fn)
    assert easydist.reduce(low, "max", 0.5).float().tolist() == [1.0]
    assert easydist.reduce(1.0, "sum", 1 if rank else 1.0) == 2.0


@distributed(world_size=2)
def test_leaves_are_matched_by_key_whatever_the_order(rank):
    data = {"a": torch.tensor([1.0]), "b": torch.tensor([10.0])}
    got = easydist.reduce(data if rank == 0 else dict(reversed(data.items())), "sum")
    assert (got["a"].item(), got["b"].item()) == (2.0, 20.0)


@pytest.mark.parametrize("rows", [200, 1000], ids=["320 KB", "1.6 MB"])
@distributed(world_size=(2, 3))
def test_large_leaves_of_any_strides(rank, world_size, rows):
    """Large enough to be reduced where they are, if they are contiguous."""

    def tree(r):
        numbers = torch.arange(400.0 * rows).view(rows, 400) + r
        return {"transposed": numbers.t(), "columns": numbers.repeat(1, 2)[:, ::2], "contiguous": numbers}

    got = easydist.reduce(tree(rank), "sum")
    for name in got:
        assert torch.equal(got[name], sum(tree(r)[name] for r in range(world_size)))


@pytest.mark.parametrize("more", [0, 80_000])
@distributed(world_size=(1, 2, 3))
def test_python_ints_are_exact_or_an_error_on_all_ranks(rank, world_size, more):
    """With ``more`` data they do not travel with the header."""

    def reduced(value, how):
        return easydist.reduce({"n": value, "x": torch.ones(more)}, how)["n"]

    large = 2**62 // world_size
    assert reduced(large + rank, "sum") == sum(large + r for r in range(world_size))
    assert reduced(-large - rank, "sum") == -sum(large + r for r in range(world_size))
    assert reduced(3 ** (30 // world_size), "prod") == 3 ** (30 // world_size * world_size)
    assert reduced(2**62, "prod" if world_size == 1 else "max") == 2**62
    if world_size > 1:
        for value, how in ((2**62, "sum"), (-(2**62) - 1, "sum"), (2**40, "prod")):
            with pytest.raises(
                OverflowError, match=rf"the {how} of \['n'\] over {world_size} ranks does not fit 64 bits"
            ):
                reduced(value, how)
        assert easydist.reduce(torch.tensor(2**62), "sum").item() == (2**62 * world_size + 2**63) % 2**64 - 2**63
    assert reduced(1, "sum") == world_size
