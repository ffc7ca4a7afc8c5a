"""Sums, WeightedMean, Counts: what a single process computes, to the last digit, in one exchange."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from counting import exchanges
from hypothesis import example, given, settings, strategies as st

import easydist
from easydist import DisagreementError, RemoteError
from easydist.metrics import Counts, Sums, WeightedMean, compute, distributed_loader
from easydist.testing import distributed

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)
SMALL = st.floats(-1e150, 1e150)
PARTS = st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=5)


def fsum(values):
    """The sum of all, rounded once; of more than float64 holds, infinity."""
    try:
        return float(sum(map(Fraction, values), Fraction(0)))
    except OverflowError:
        return math.inf if sum(map(Fraction, values)) > 0 else -math.inf


def merged(metrics):
    """Return the result of ``compute`` for the metrics of several ranks."""
    return metrics[0].merged([metric.state() for metric in metrics])


@given(PARTS)
@example([[1e308, 1e308], [-1e308]])
@example([[5e-324, 2.2e-308], [-0.0]])
def test_sums_of_floats_are_exact_whoever_adds_them(parts):
    ranks = [Sums() for _ in parts]
    for sums, values in zip(ranks, parts, strict=True):
        sums.update(x=np.array(values), y=torch.tensor(values, dtype=torch.float64), z=0.0)
        for value in values:
            sums.update(z=value)
    want = fsum([value for values in parts for value in values])
    assert merged(ranks) == {"x": want, "y": want, "z": want}


@given(st.lists(st.lists(st.integers(-(10**40), 10**40), max_size=6), min_size=1, max_size=4))
def test_sums_of_integers_are_integers_of_any_size(parts):
    ranks = [Sums() for _ in parts]
    for sums, values in zip(ranks, parts, strict=True):
        for value in [0, *values]:
            sums.update(n=value)
    got = merged(ranks)["n"]
    assert (got, type(got)) == (sum(map(sum, parts)), int)


@given(st.lists(st.lists(st.tuples(SMALL, st.integers(0, 1000)), max_size=9), min_size=1, max_size=4))
def test_weighted_means_are_exact(parts):
    ranks = [WeightedMean() for _ in parts]
    for mean, pairs in zip(ranks, parts, strict=True):
        mean.update(np.array([value for value, _ in pairs[:4]]), np.array([weight for _, weight in pairs[:4]]))
        for value, weight in pairs[4:]:
            mean.update(value, weight)
    pairs = [pair for part in parts for pair in part]
    total, weight = sum(Fraction(v * w) for v, w in pairs), sum(w for _, w in pairs)
    if weight:
        assert merged(ranks) == float(Fraction(total) / weight)
    else:
        assert math.isnan(merged(ranks))


@given(st.lists(st.lists(st.one_of(st.integers(-3, 3), st.sampled_from("abc")), max_size=20), min_size=1, max_size=4))
def test_counts_are_the_counter_of_all(parts):
    ranks = [Counts() for _ in parts]
    for counts, keys in zip(ranks, parts, strict=True):
        counts.update(keys)
    assert merged(ranks) == sum(map(Counter, parts), Counter())


SCALARS = [torch.tensor(1), 1, np.int8(1), 1.0, np.float64(1), True, np.bool_(True), torch.tensor(1.0).bfloat16()]


@given(st.lists(st.sampled_from(SCALARS), max_size=9), st.sampled_from([lambda key: key, lambda key: ("a", (key,))]))
@example([torch.tensor(1), torch.tensor(1)], lambda key: key)
def test_keys_that_equal_one_python_value_are_one(keys, within):
    counts = Counts()
    counts.update([within(key) for key in keys])
    counts.update({within(key): torch.tensor(2) for key in keys[:1]})
    counts.update(map(within, np.ones(1)))
    assert counts.compute() == {within(1): len(keys) + 2 * len(keys[:1]) + 1}
    assert {type(key) for key in counts.compute()} <= {int, float, bool, tuple}
    counts.reset()
    counts.update(["a", np.str_("a"), np.array("a")[()]])
    counts.update(np.array(["a"]))
    counts.update(np.array(["2020"], "M8[D]"))
    assert repr(counts.compute()) == "Counter({'a': 4, datetime.date(2020, 1, 1): 1})"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.int32])
def test_every_dtype_is_summed_exactly(dtype):
    values = torch.arange(1000).remainder(2 if dtype is torch.bool else 200).to(dtype)
    sums = Sums()
    sums.update(x=values, again=values.numpy() if dtype is not torch.bfloat16 else values)
    want = math.fsum(values.tolist())
    assert sums.compute() == {"x": want, "again": want}
    assert type(sums.compute()["x"]) is (float if dtype.is_floating_point else int)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_large_tensors_of_all_magnitudes(seed):
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(5000, generator=random, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-300, 300, (5000,), generator=random).double()
    sums = Sums()
    sums.update(x=values)
    assert sums.compute()["x"] == math.fsum(values.tolist())


def test_what_is_not_finite_shows():
    inf, nan = math.inf, math.nan
    for values, want in (([1.0, inf], inf), ([-inf, 2.0], -inf), ([inf, -inf], nan), ([nan], nan)):
        sums, mean = Sums(), WeightedMean()
        sums.update(x=np.array(values))
        mean.update(np.array(values), 1)
        got = [sums.compute()["x"], mean.compute()]
        assert str(got) == str([want, want])
    mean.reset()
    assert math.isnan(mean.compute())
    mean.update(1e308, 10)
    assert mean.compute() == inf


@distributed(world_size=(1, 2, 3))
def test_the_mean_of_a_batch_without_rows_does_not_count(rank, world_size):
    targets = torch.tensor([1.0, 2.0, 4.0, 8.0])
    mean = WeightedMean()
    for batch in distributed_loader(targets, 1):
        mean.update(torch.nn.functional.mse_loss(torch.zeros_like(batch), batch), weight=len(batch))
    mean.update(np.array([math.nan, math.inf, 1.0]), torch.tensor([0, 0, 1]))
    assert mean.compute() == (1 + 4 + 16 + 64 + world_size) / (4 + world_size)


@distributed(world_size=(1, 2, 3, 4))
def test_the_ranks_together_give_what_one_process_gives(rank, world_size):
    values = torch.randn(101, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = [f"class {i % 7}" for i in range(101)]

    def added(rows):
        mean, sums, counts = WeightedMean(), Sums(), Counts()
        for i in rows:
            mean.update(values[i], weight=i % 3)
            sums.update(loss=values[i], tokens=2**62 + i)
            counts.update([keys[i]])
        return {"mean": mean, "rest": [sums, (counts,)]}

    got = compute(added(range(rank, 101, world_size)))
    alone = added(range(101))
    want = {"mean": merged([alone["mean"]]), "rest": [merged([alone["rest"][0]]), (merged([alone["rest"][1][0]]),)]}
    assert got == want
    assert got["rest"][0] == {"loss": math.fsum(values.tolist()), "tokens": sum(2**62 + i for i in range(101))}


@distributed(world_size=3)
def test_names_and_keys_that_some_ranks_lack(rank):
    sums, counts = Sums(), Counts()
    if rank == 2:
        sums.update(late=1.5)
    if rank:
        counts.update([("pair", rank), None, b"bytes", 1.5, True])
    assert compute([sums, counts]) == [
        {"late": 1.5},
        Counter({("pair", 1): 1, ("pair", 2): 1, None: 2, b"bytes": 2, 1.5: 2, True: 2}),
    ]
    sums.reset()
    counts.reset()
    assert compute([sums, counts]) == [{}, Counter()]
    assert [counts.compute(), sums.compute()] == [Counter(), {}]


@distributed(world_size=2)
def test_ten_metrics_cost_one_header(rank):
    metrics = {f"m{i}": (WeightedMean(), Sums(), Counts())[i % 3] for i in range(10)}
    for metric in metrics.values():
        if isinstance(metric, WeightedMean):
            metric.update(0.1, 3)
        elif isinstance(metric, Sums):
            metric.update(x=1e300, y=5e-324, n=2**70)
        else:
            metric.update(range(20))
    assert exchanges(lambda: compute(metrics)) == ["header"]
    large = Counts()
    large.update(range(80_000))
    assert exchanges(lambda: compute([metrics, large])) == ["header", "all_gather"]


@distributed(world_size=2)
def test_gather_of_ten_scalars_is_one_collective(rank):
    logged = {f"metric{i}": torch.tensor(float(i + rank)) for i in range(10)}
    assert exchanges(lambda: easydist.gather(logged)) == ["header"]
    assert exchanges(lambda: easydist.reduce(logged)) == ["header"]
    one_by_one = exchanges(lambda: [easydist.gather(value) for value in logged.values()])
    assert one_by_one == 10 * ["header"]


@distributed(world_size=2)
def test_what_differs_between_ranks_is_an_error_on_all(rank):
    with pytest.raises(DisagreementError, match=r"compute\(metrics='Sums'\).*\n.*compute\(metrics='Counts'\)"):
        compute(Counts() if rank else Sums())
    with pytest.raises(DisagreementError, match=r"\['a'\]"):
        compute({"a": Sums()} if rank else {"b": Sums()})
    swapped = {"a": Sums(), "b": Counts()}
    assert compute(swapped if rank else dict(reversed(swapped.items()))) == {"a": {}, "b": Counter()}


@distributed(world_size=2)
def test_bad_input_of_one_rank_is_an_error_on_all(rank):
    for wrong, text in (
        (3, "compute: the value is int; pass Sums"),
        ({}, "there is no metric"),
        ({"a": "b"}, "is str"),
    ):
        with pytest.raises(TypeError, match=text):
            compute(wrong)
        with pytest.raises(RemoteError, match=f"rank 1: TypeError: .*{text}"):
            compute(wrong if rank else Sums())
    counts = Counts()
    counts.update([Sums] if rank else [])
    with pytest.raises(RemoteError, match=r"rank 1: UnsafeObjectError: .*easydist\.metrics\.sums\.Sums"):
        compute(counts)
    assert Sums().compute() == {}


def test_wrong_values_are_refused_and_nothing_is_added():
    sums, mean, counts = Sums(), WeightedMean(), Counts()
    wide = [np.ones(2, np.longdouble)] if np.dtype(np.longdouble).itemsize > 8 else []
    for wrong in ("0.5", None, 1j, [0.5], torch.tensor(1j), np.array(["a"]), *wide):
        with pytest.raises(TypeError, match=r"x is .*; pass a real number, or a tensor or array of them"):
            sums.update(fine=1, x=wrong)
    for value, weight, text in ((torch.ones(3), [1, 2], "weight is list"), (1.0, "a", "weight is str")):
        with pytest.raises(TypeError, match=text):
            mean.update(value, weight)
    with pytest.raises(ValueError, match="3 values, but 2 weights"):
        mean.update(torch.ones(3), torch.ones(2))
    for weight in (-1, math.nan, math.inf, torch.tensor([1, -1, 1])):
        with pytest.raises(ValueError, match="a weight is negative or not finite"):
            mean.update(torch.ones(3), weight)
    with pytest.raises(TypeError, match="'cat' is one key; pass it in a list"):
        counts.update("cat")
    with pytest.raises(TypeError, match=r"counts are ints, got 0.5"):
        counts.update({"cat": 0.5})
    masked = np.ma.array([1, 2], mask=[0, 1])
    for call in (lambda: sums.update(fine=1, x=masked), lambda: mean.update(masked, 1), lambda: counts.update(masked)):
        with pytest.raises(TypeError, match=r"is a masked array; pass \.compressed\(\)"):
            call()
    for value, weight in ((1, 10**400), (10**400, 1)):
        with pytest.raises(ValueError, match="is an integer that is too large for a float64"):
            mean.update(value, weight)
    for keys, said in (
        ([1, torch.ones(2)], r"a key is of shape \(2,\)"),
        ([[1]], "unhashable type: 'list'; pass text, numbers or tuples"),
        ([np.datetime64("2020-01-01T00", "ns")], "Python has no value that equals the key"),
        (3, "not iterable"),
    ):
        with pytest.raises(TypeError, match=f"Counts: .*{said}"):
            counts.update(keys)
    assert str([sums.compute(), mean.compute(), counts.compute()]) == "[{}, nan, Counter()]"
