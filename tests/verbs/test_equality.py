"""assert_equal: it passes if all ranks have the same bits, and else names the paths, the elements and the ranks."""

import datetime
import enum
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from launching import examples
from trees import THING, trees

import easydist
from easydist.data.values import digest_of, values_of
from easydist.errors import RemoteError, UnequalError
from easydist.testing import distributed

BLOCK = 1 << 16


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Config:
    lr: float
    weights: Any = None


def text_of(data, message="", **options):
    """Return the error's text, which is the same on all ranks; the next call works."""
    with pytest.raises(UnequalError) as caught:
        easydist.assert_equal(data, message, **options)
    text = str(caught.value)
    assert set(easydist.gather_object(text)) == {text}
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, easydist.DisagreementError)
    easydist.assert_equal("still in step")
    return text


def big(rank, world_size, index, value):
    data = torch.zeros(5, 70_000)
    if rank == world_size - 1:
        data[index] = value
    return data


@distributed(world_size=[1, 2, 3, 4])
def test_equal_values_pass_whatever_their_memory(rank, world_size):
    square = torch.arange(6.0).view(2, 3)
    data = {
        "strided": square.t().contiguous().t() if rank else square,
        "array": square.numpy() if rank else square,
        "parameter": torch.nn.Parameter(square) if rank else square,
        "big": torch.arange(300_000),
        "half": torch.ones(3).bfloat16(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "conj": torch.tensor([1 + 2j]).conj() if rank else torch.tensor([1 - 2j]),
        "python": [1, True, 0.5, float("nan"), 10**40, 1j, "text", None, b"x", datetime.date(2026, 1, 2), {"a", "b"}],
        "strings": np.array(["a", "bc"]),
        "dates": np.array(["2026-01-02"], "M8[D]"),
        "config": Config(0.1, torch.ones(0)),
        "enum": [Color.RED, Access.READ | Access.WRITE],
        "classes": [torch.float32, int, len, torch.device("cpu"), torch.Size([2])],
        "empty": [{}, [], ()],
    }
    easydist.assert_equal(dict(sorted(data.items(), reverse=rank % 2 == 1)), "never seen")
    easydist.assert_equal(None)
    easydist.assert_equal({})


@distributed(world_size=[2, 3, 4])
def test_the_error_names_paths_elements_and_ranks(rank, world_size):
    x = torch.arange(12.0).view(3, 4)
    x[1, 2] += rank == 1
    others = ", ".join(str(r) for r in range(world_size) if r != 1)
    which = "rank 0" if world_size == 2 else f"ranks {others}"
    data = {"x": x, "same": torch.ones(2), "name": "b" if rank == 1 else "a", "n": torch.tensor(5 + (rank == 1))}
    lines = text_of(data, "after step 3").splitlines()
    assert lines[:2] == ["after step 3", "assert_equal: ranks differ in 3 of 4 values"]
    assert lines[2:5] == [  # data in the order of the tree, then the rest
        f"  ['x'] at [1, 2]  {which}: 6.0   rank 1: 7.0",
        f"  ['n']  {which}: 5   rank 1: 6",
        f"  ['name']  {which}: 'a'   rank 1: 'b'",
    ]
    assert re.fullmatch(r"Called at .*test_equality.py:\d+", lines[5])


DIFFER = {
    "dtype": (torch.ones(2), torch.ones(2).double(), "float32 (2,)", "float64 (2,)"),
    "shape": (torch.ones(2), torch.ones(2, 1), "float32 (2,)", "float32 (2, 1)"),
    "number and tensor": (3, torch.tensor(3), "3", "int64 ()"),
    "int and float": (3, 3.0, "3", "3.0"),
    "int and bool": (1, True, "1", "True"),
    "long ints": (10**40, 10**40 + 1, str(10**40), str(10**40 + 1)),
    "zeros": (torch.tensor(0.0), torch.tensor(-0.0), "0.0", "-0.0"),
    "python zeros": (0.0, -0.0, "0.0", "-0.0"),
    "nans": (
        torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32),
        torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32),
        "nan (0x7fc00000)",
        "nan (0x7fc00001)",
    ),
    "empty and absent": ([], None, "an empty list", "None"),
    "empties": ([], {}, "an empty list", "an empty dict"),
    "text": ("a", b"a", "'a'", "b'a'"),
    "enums": (Color.RED, Color.BLUE, "Color.RED", "Color.BLUE"),
    "sets": ({1, 2}, {2, 3}, "set(1, 2)", "set(2, 3)"),
    "strings": (np.array(["a", "b"]), np.array(["a", "c"]), "'b'", "'c'"),
    "dates": (np.array(["2026-01-02"], "M8[D]"), np.array(["2026-01-03"], "M8[D]"), "", ""),
    "missing": (Config(1.0), {}, "missing", "an empty dict"),
    "surrogates": ("\ud800", "\ud801", "'\\ud800'", "'\\ud801'"),
}


@pytest.mark.parametrize("name", DIFFER)
@distributed(world_size=2)
def test_every_difference_is_found(rank, name):
    first, second, *shown = DIFFER[name]
    text = text_of([second if rank else first])
    assert all(part in text for part in shown), text
    if name != "missing":
        assert "ranks differ in 1 of 1 values\n  [0]" in text


DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)


@pytest.mark.parametrize("dtype", DTYPES.split())
@distributed(world_size=2)
def test_elements_of_every_dtype(rank, dtype):
    dtype = getattr(torch, dtype)
    data = torch.zeros(3 * dtype.itemsize, dtype=torch.uint8)
    data[2 * dtype.itemsize] = rank
    assert "the value at [2]  rank 0: " in text_of(data.view(dtype))


PLACES = [(0, 0), (4, 69_999), (2, 30_000), (0, BLOCK // 4), (0, BLOCK // 4 - 1)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@distributed(world_size=[2, 4])
def test_the_first_element_of_a_large_tensor_is_named_without_sending_it(rank, world_size, place):
    data = big(rank, world_size, place, 1.5)
    last = world_size - 1
    data[4, 69_999] = 7 if rank == last and place != (4, 69_999) else data[4, 69_999]
    text = text_of({"w": data, "v": data.t() if rank == 0 else data.t().contiguous()})
    assert f"['w'] at [{place[0]}, {place[1]}]  " in text
    assert f"rank {last}: 1.5" in text
    assert "['v'] at [" in text


@distributed(world_size=3)
def test_three_values_and_many_rows(rank):
    text = text_of({f"k{i:02}": torch.tensor([0, i * rank]) for i in range(13)})
    assert "ranks differ in 12 of 13 values" in text
    assert "['k01'] at [1]  rank 0: 0   rank 1: 1   rank 2: 2" in text
    assert text.splitlines()[-2] == "  … and 2 more"


@distributed(world_size=3)
def test_groups_have_their_own_values(rank):
    pair = torch.distributed.new_group([0, 1])
    if rank < 2:
        easydist.assert_equal(rank < 2, group=pair)
        with pytest.raises(UnequalError, match="rank 0: 0   rank 1: 1"):
            easydist.assert_equal(rank, group=pair, timeout=60, check=False)
        easydist.assert_equal("again", group=pair)
    easydist.wait_for_everyone()


@distributed(world_size=3)
def test_the_message_of_the_lowest_rank_counts(rank):
    assert text_of(rank, f"said by {rank}").startswith("said by 0\nassert_equal: ranks differ")


UNKNOWN = {
    "object": lambda: THING,
    "generator": torch.Generator,
    "objects": lambda: np.array([None]),
    "long doubles": lambda: np.ones(1, np.longdouble),
    "sparse": lambda: torch.ones(2).to_sparse(),
    "iterator": lambda: iter([1]),
    "set of objects": lambda: {THING},
    "keys": lambda: {1: 2, _Same(): 3},
    "masked": lambda: np.ma.masked_array([1], [True]),
}


class _Same:
    def __repr__(self):
        return "1"


@pytest.mark.parametrize("name", UNKNOWN)
@distributed(world_size=2)
def test_a_value_that_cannot_be_compared_is_an_error_on_all_ranks(rank, name):
    value = UNKNOWN[name]()
    with pytest.raises((TypeError, ValueError)):
        easydist.assert_equal({"a": value})
    with pytest.raises(RemoteError, match=r"rank 1: (TypeError|ValueError): .*\['a'\]"):
        easydist.assert_equal({"a": UNKNOWN[name]() if rank else 1})
    easydist.assert_equal("still in step")


def test_one_process_refuses_the_same_values():
    easydist.assert_equal({"x": torch.ones(2), "n": float("nan")})
    with pytest.raises(TypeError, match=r"^\['a'\] is a .*, whose value easydist cannot compare; pass its parts"):
        easydist.assert_equal({"a": THING})


@distributed(world_size=2)
def test_another_call_is_a_disagreement(rank):
    with pytest.raises(easydist.DisagreementError, match="rank 1: wait_for_everyone") as caught:
        easydist.wait_for_everyone() if rank else easydist.assert_equal(1)
    assert not isinstance(caught.value, AssertionError)


@distributed(world_size=2)
def test_sets_are_equal_in_any_order_also_inside_of_tuples(rank):
    inner = frozenset([0, 8] if rank else [8, 0])  # two numbers of one hash, which keep the order in which they came
    easydist.assert_equal({"a": {(1, inner)}})
    with pytest.raises(UnequalError):
        easydist.assert_equal({"a": {(1, inner, rank)}})


@settings(max_examples=examples(40), deadline=None)
@given(trees(), trees())
def test_digests_are_equal_exactly_if_the_values_are(one, other):
    def rows(data):
        return sorted((v.path, v.text, v.data is not None and v.block(0)) for v in values_of(data))

    assert (digest_of(values_of(one)) == digest_of(values_of(other))) == (rows(one) == rows(other))
    assert digest_of(values_of(one)) == digest_of(values_of(one))
