"""Values of several dtypes that meet stay what they were, or there is an error."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import easydist
from easydist import DisagreementError, MetricCollector, RemoteError, gather_for_metrics
from easydist.metrics.joining import Padded, aligned, concatenated, padded
from easydist.testing import distributed

ALL = (1, 2, 3, 4)
PYTHON = [0, 1, 5, -3, 300, 2**53 + 1, 2**63 - 1, -(2**63), 10**400, True, 0.5, 0.9, 1e300, math.nan, math.inf, 2 - 1j]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
NUMPY = [np.bool_, np.uint8, np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64, np.complex64, ">i4"]
INTEGERS = [0, 1, 100, -100, 255, 2**15, 2**24 + 1, 2**31 - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1]


@st.composite
def tensors(draw):
    """A sample of any dtype, with values at its limits."""
    dtype = draw(st.sampled_from(DTYPES))
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0, 0.1, 1e4, math.inf]), max_size=3)), dtype=dtype)
    limits = torch.iinfo(dtype)
    fitting = [i for i in INTEGERS if limits.min <= i <= limits.max]
    return torch.from_numpy(np.array(draw(st.lists(st.sampled_from(fitting), max_size=3)), str(dtype)[6:]))


SAMPLES = st.one_of(
    st.lists(st.sampled_from(PYTHON), max_size=3),
    st.builds(np.array, st.lists(st.sampled_from([0, 1, 100]), max_size=3), st.sampled_from(NUMPY)),
    st.lists(
        st.sampled_from([np.float32(0.1), np.int8(5), np.uint8(200), np.bool_(True), np.float64(1e300)]), max_size=3
    ),
    tensors(),
)


def tried(call, *args, **kwargs):
    """The result and no text, or the text of the error."""
    try:
        return call(*args, **kwargs), ""
    except (ValueError, RemoteError) as error:
        return None, str(error)


def same(one, other):
    return len(one) == len(other) and all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@given(st.lists(SAMPLES, max_size=4))
@example([[0.9, 0.5], [1, 0, 1]])
@example([[300], torch.tensor([1, 2], dtype=torch.uint8)])
@example([[1e300], torch.ones(2)])
@example([torch.tensor([1j]), torch.ones(2)])
@example([[5], [True, False]])
@example([[2**53 + 1, 0.5]])
@example([torch.tensor([-(2**63)]), torch.ones(2, dtype=torch.float16)])
@example([torch.tensor([2**63 - 1]), torch.ones(2, dtype=torch.float64)])
def test_padding_keeps_every_value_or_raises(samples):
    got, said = tried(padded, samples, 0)
    if said:
        assert "sample" in said or "no common dtype" in said
        return
    assert got.lengths.tolist() == [*map(len, samples)]
    for row, sample in zip(got.values, samples, strict=True):
        assert same(row.tolist()[: len(sample)], sample if isinstance(sample, list) else sample.tolist())
        assert not any(row.tolist()[len(sample) :])


@given(st.lists(tensors(), min_size=1, max_size=3))
def test_the_common_dtype_is_torchs(parts):
    got, said = tried(aligned, parts)
    assert said or {part.dtype for part in got} == {torch.cat(sorted(parts, key=is_whole)).dtype}
    assert bool(tried(aligned, parts[::-1])[1]) == bool(said)


def is_whole(part):
    return not (part.is_floating_point() or part.is_complex())


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([[1], [10**400]], "sample 1: the value is an int that does not fit 64 bits"),
        ([torch.tensor([2**24 + 1]), torch.ones(2)], "sample 0: torch.float32 does not hold all values of torch.int64"),
        ([[0.5, 2**53 + 1]], "sample 0: torch.float64 does not hold all values of torch.int64"),
        ([torch.ones(1, dtype=torch.uint16), [1]], "torch.uint16 and torch.int64 have no common dtype"),
    ],
)
def test_what_would_change_is_named(samples, said):
    with pytest.raises(ValueError, match=said):
        padded(samples, 0)


@pytest.mark.parametrize(
    ("dtype", "pad_index", "holds"),
    [
        (torch.uint8, 300, False),
        (torch.uint8, -1, False),
        (torch.uint8, 255, True),
        (torch.int64, 0.5, False),
        (torch.int64, 10**400, False),
        (torch.int64, math.nan, False),
        (torch.bool, 5, False),
        (torch.bool, 1, True),
        (torch.float32, 1e300, False),
        (torch.float32, 2**24 + 1, False),
        (torch.float32, 0.1, True),
        (torch.float32, -math.inf, True),
        (torch.bfloat16, -100, True),
        (torch.float64, 1e300, True),
        (torch.float64, 1j, False),
        (torch.complex64, 0.5, True),
    ],
)
def test_the_pad_value_is_held_too(dtype, pad_index, holds):
    samples = [torch.zeros(1, dtype=dtype), torch.zeros(2, dtype=dtype)]
    if holds:
        assert padded(samples, pad_index).values.dtype == dtype
    else:
        with pytest.raises(ValueError, match=f"{dtype} cannot hold pad_index="):
            padded(samples, pad_index)


def test_samples_without_values_do_not_count():
    assert padded([[], torch.tensor([7])], 0).values.tolist() == [[0], [7]]
    assert padded([torch.ones(0, 4), torch.ones(2, 4, dtype=torch.int64)], 0).values.dtype == torch.int64
    assert padded([[], []], 0).values.shape == (2, 0)
    strings = [np.array(["a"]), np.array(["b", "c"])]
    assert padded(strings, 0) is strings


@pytest.mark.slow
@distributed(world_size=ALL)
def test_samples_of_another_dtype_on_each_rank(rank, world_size):
    mine = [[0.9, 0.5], torch.tensor([1, 0, 1]), [True], np.array([300], np.uint16)][rank]
    for options in ({}, {"dst": 0}):
        got = gather_for_metrics([mine], total=world_size, pad_index=0, **options)
        assert (got is None) == bool(options and rank)
        if got is not None:
            assert type(got) is Padded
            assert got.values.dtype == torch.float64
            assert got.values[0].tolist()[:2] == [0.9, 0.5]


@distributed(world_size=2)
def test_samples_that_no_dtype_holds_are_an_error_on_all_ranks(rank):
    mine = np.array([300], np.uint16) if rank else [1]
    for options in ({}, {"dst": 0}):
        with pytest.raises((ValueError, RemoteError), match="no common dtype"):
            gather_for_metrics([mine], total=2, pad_index=0, **options)
    assert gather_for_metrics(torch.ones(1), total=2).tolist() == [1, 1]


WIDTHS = st.lists(st.text("ab\u20ac", max_size=5), max_size=3)
UNITS = {"s": [0, 10**9, -1], "D": [0, 10**7], "ns": [0, 2**62], "us": [1, 2**50]}


@st.composite
def arrays(draw):
    """An array that no tensor can hold."""
    kind = draw(st.sampled_from(["U", "S", "M", "m"]))
    if kind in "US":
        texts = draw(WIDTHS)
        return np.array(texts, "U") if kind == "U" else np.array([text.encode() for text in texts], "S")
    unit = draw(st.sampled_from(sorted(UNITS)))
    values = draw(st.lists(st.sampled_from([*UNITS[unit], None]), max_size=3))
    return np.array([np.iinfo(np.int64).min if value is None else value for value in values], "i8").view(
        f"{kind}8[{unit}]"
    )


@pytest.mark.slow
@given(st.lists(arrays(), min_size=1, max_size=4))
@example([np.array(["9999-01-01"], "M8[D]"), np.array(["2020-01-01"], "M8[ns]")])
@example([np.array([1], "M8[s]"), np.array([1], "m8[s]")])
@example([np.array([1], "m8[Y]"), np.array([1], "m8[D]")])
def test_joined_arrays_keep_every_value_or_raise(parts):
    got, said = tried(concatenated, parts)
    if said:
        assert "dtype" in said
        return
    at = 0
    for part in parts:
        assert got.dtype.kind == part.dtype.kind
        assert same(got[at : at + len(part)], part)
        at += len(part)
    assert at == len(got)


def columns(numbers):
    """Columns of arrays that no tensor can hold, whose widths and units depend on the numbers."""
    unit = "ns" if any(i % 2 for i in numbers) else "D"
    days = np.array(numbers, "i8").view("M8[D]")
    return {
        "at": days.astype(f"M8[{unit}]"),
        "after": (days - np.datetime64("1970-01-01")).astype(f"m8[{unit}]"),
        "name": np.array(["x" * (i % 7) for i in numbers], "U"),
        "bytes": np.array([b"y" * (i % 5 + 1) for i in numbers], "S"),
        "two": np.array([[str(i), "z"] for i in numbers], "U").reshape(-1, 2),
        "object": np.array([*({"i": i} for i in numbers), None], dtype=object)[:-1],
    }


def check(got, numbers):
    want = columns(numbers)
    for name, column in want.items():
        assert got[name].dtype == column.dtype, name
        assert got[name].tolist() == column.tolist(), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"every": 2}, {"spill_nbytes": 0}], ids=["plain", "every", "spill"])
@distributed(world_size=ALL)
def test_the_collector_and_the_verb_keep_arrays(rank, world_size, options):
    collector = MetricCollector(total=8 * world_size, **options)
    for step in range(4):
        mine = [2 * world_size * step + 2 * rank + i for i in (1, 0)]
        for batch in ([i for i in mine if i % 2 == 0], [i for i in mine if i % 2]):  # of another unit
            collector.update(batch, **columns(batch))
    every = [*range(8 * world_size)]
    for dst in (None, world_size - 1):
        got, blocks = collector.compute(dst), [*collector.blocks(dst)]
        if dst not in (None, rank):
            assert got is None
            continue
        check(got, every)
        for block in blocks:
            assert {name: column.dtype for name, column in block.items()} == {n: c.dtype for n, c in got.items()}
    mine = [*range(rank, 8 * world_size, world_size)]
    check(gather_for_metrics(columns(mine), indices=mine, total=len(every)), every)


@distributed(world_size=2)
def test_a_sample_that_came_twice_may_be_of_another_width(rank):
    collector = MetricCollector(total=2)
    collector.update(
        [0, 1], at=np.array(["2020", "NaT"], f"M8[{('D', 's')[rank]}]"), name=np.array(["a", "b" * (2 - rank)])
    )
    with pytest.raises(ValueError, match=r"index 1 came with different values of \['name'\]"):
        collector.compute()
    collector.reset()
    collector.update(
        [0, 1], at=np.array(["2020", "NaT"], f"M8[{('D', 's')[rank]}]"), name=np.array(["a", "b"], ("U1", "U9")[rank])
    )
    assert collector.compute()["name"].tolist() == ["a", "b"]


@distributed(world_size=2)
def test_what_no_array_holds_is_an_error_on_all_ranks(rank):
    collector = MetricCollector()
    collector.update([rank], at=np.array(["9999" if rank else "2020"], "M8[D]" if rank else "M8[ns]"))
    with pytest.raises(
        (ValueError, RemoteError), match=r"datetime64\[ns\] does not hold all values of datetime64\[D\]"
    ):
        collector.compute()
    other = MetricCollector()
    other.update([rank], at=np.array([1], "M8[s]" if rank else "m8[s]"))
    with pytest.raises(ValueError, match="different columns"):
        other.compute()
    with pytest.raises(ValueError, match=r"timedelta64.*, but they were .*datetime64|datetime64.*were .*timedelta64"):
        other.update([2], at=np.array([1], "m8[s]" if rank else "M8[s]"))
    for mine in (np.array([1], "M8[s]" if rank else "m8[s]"), np.array(["a"]) if rank else ["a"]):
        with pytest.raises(DisagreementError, match=r"\.(datetime64|str_)\.rows"):
            gather_for_metrics(mine, total=2)
    assert gather_for_metrics(rank, total=0).tolist() == [0, 1]


@distributed(world_size=2)
def test_arrays_of_several_dimensions_that_differ_become_lists(rank):
    mine = np.full((2, 1 + rank), "b" if rank else "a")
    got = gather_for_metrics(mine, total=4, ragged=True)
    assert [row.tolist() for row in got] == [["a"], ["a"], ["b", "b"], ["b", "b"]]
    with pytest.raises(DisagreementError, match=r"\.str_\[2\]\.rows"):
        gather_for_metrics(mine, total=4)


@distributed(world_size=2)
def test_the_collector_keeps_arrays_while_pickle_is_denied(rank):
    easydist.allow_pickle(False)
    try:
        collector = MetricCollector(total=2)
        fields = np.array([(rank, "a")], [("i", "i4"), ("s", "U1")])
        collector.update([rank], at=np.array(["2020"], ("M8[D]", "M8[s]")[rank]), fields=fields)
        got = collector.compute()
    finally:
        easydist.allow_pickle(True)
    assert got["at"].dtype == np.dtype("M8[s]")
    assert (got["fields"].tolist(), got["fields"].dtype) == ([(0, "a"), (1, "a")], fields.dtype)


@distributed(world_size=2)
def test_masked_arrays_are_refused(rank):
    masked = np.ma.array(["a", "b"], mask=[0, 1])
    for values in (masked, masked.astype(object), np.ma.array([1, 2], mask=[0, 1])):
        with pytest.raises((TypeError, RemoteError), match=r"leaf \['x'\] is a masked array"):
            gather_for_metrics({"x": values if rank else values.data}, total=4)
        with pytest.raises(TypeError, match=r"leaf \['x'\] is a masked array"):
            MetricCollector().update([0, 1], x=values)
