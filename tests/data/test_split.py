"""Laws of shares: without padding they add up to the input, with it they are equally long."""

import copy
import itertools
import re
import types
from collections import OrderedDict, UserDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from launching import examples
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from trees import DTYPES, Batch, Items, Pair, Point, assert_same, batch_encoding, tensordict

from easydist.data.arithmetic import split_bounds, split_sizes
from easydist.data.split import split

PROPERTY = settings(max_examples=examples(60), deadline=None)

lengths = st.integers(0, 9)
parts_of = st.integers(1, 5)


def naive_shares(items, parts, padding=False):
    """Deal out one by one; then repeat the last element of all where a share is short."""
    shares = [[] for _ in range(parts)]
    counts = [0] * parts
    for i in range(len(items)):
        counts[i % parts] += 1
    rest = list(items)
    for share, count in zip(shares, counts, strict=True):
        share += rest[:count]
        rest = rest[count:]
    if padding and items:
        for share in shares:
            share += [items[-1]] * (max(counts) - len(share))
    return shares


def shares(inputs, parts, padding=False):
    return [split(inputs, parts, part, padding) for part in range(parts)]


KINDS = {
    "list": list,
    "tuple": tuple,
    "list subclass": Items,
    "tuple subclass": Pair,
    "range": lambda items: range(len(items)),
    "tensor": lambda items: torch.tensor(items, dtype=torch.int16),
    "matrix": lambda items: torch.tensor(items, dtype=torch.int64).view(-1, 1).expand(-1, 2),
    "array": lambda items: np.array(items, dtype=np.int64),
    "list of strings": lambda items: [f"s{i}" for i in items],
    "list of tensors": lambda items: [torch.tensor(i) for i in items],
    "torch dataset": lambda items: Subset(list(items), range(len(items))),
}


def as_items(value):
    return value.tolist() if hasattr(value, "tolist") else list(value)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(length=lengths, parts=parts_of, padding=st.booleans())
def test_shares_are_what_dealing_out_by_hand_gives(kind, length, parts, padding):
    value = KINDS[kind](range(length))
    got = [as_items(share) for share in shares(value, parts, padding)]
    assert got == naive_shares(as_items(value), parts, padding)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(length=lengths, parts=parts_of)
def test_shares_one_after_the_other_are_the_input(kind, length, parts):
    value = KINDS[kind](range(length))
    assert [item for share in shares(value, parts) for item in as_items(share)] == as_items(value)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(length=lengths, parts=parts_of)
def test_with_padding_all_shares_are_equally_long(kind, length, parts):
    value = KINDS[kind](range(length))
    assert {len(share) for share in shares(value, parts, padding=True)} == {-(-length // parts)}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_shares_are_of_one_type(kind, padding):
    value = KINDS[kind](range(3))
    types = {type(share) for share in shares(value, 2, padding)}
    assert len(types) == 1
    assert issubclass(type(value), types.pop()) or kind == "range"


@PROPERTY
@given(length=lengths, parts=parts_of, padding=st.booleans())
def test_mappings_and_namedtuples_are_split_value_by_value(length, parts, padding):
    items = list(range(length))
    data = {
        "ids": items,
        "nested": OrderedDict(x=torch.tensor(items)),
        "pair": Point(tuple(items), np.array(items)),
        "n": 1,
    }
    naive = naive_shares(items, parts, padding)
    for got, want in zip(shares(data, parts, padding), naive, strict=True):
        assert got["ids"] == want
        assert got["nested"]["x"].tolist() == want
        assert (got["pair"].x, got["pair"].y.tolist()) == (tuple(want), want)
        assert got["n"] == 1
        assert (type(got["nested"]), type(got["pair"])) == (OrderedDict, Point)


@pytest.mark.parametrize(
    "make",
    [dict, OrderedDict, UserDict, types.MappingProxyType, lambda d: defaultdict(list, d)],
    ids=["dict", "OrderedDict", "UserDict", "mappingproxy", "defaultdict"],
)
def test_mappings_keep_their_class(make):
    data = make({"a": [1, 2, 3]})
    got = shares(data, 2)
    assert [share["a"] for share in got] == [[1, 2], [3]]
    assert {type(share) for share in got} == {type(data)}


@pytest.mark.parametrize("data", [batch_encoding()])
def test_batch_encoding_is_split(data):
    got = split(data, 2, 1)
    assert (got["input_ids"].tolist(), got["words"]) == ([[2, 3]], ["b"])
    assert len(data["words"]) == 2


@pytest.mark.parametrize("data", [tensordict()])
def test_tensordict_is_split(data):
    got = split(data, 3, 2, apply_padding=True)
    assert (got["a"].tolist(), got["n", "b"].shape, got.batch_size) == ([3, 3], (2, 2), torch.Size([2]))


@pytest.mark.parametrize("padding", [False, True])
def test_a_dict_is_not_mutated(padding):
    data = {"a": [1, 2, 3], "b": {"c": torch.arange(3)}, "d": "text"}
    before = copy.deepcopy(data)
    inner = data["b"]
    shares(data, 2, padding)
    assert_same(data, before)
    assert data["b"] is inner


def test_a_tuple_can_be_padded():
    assert shares((1, 2, 3), 2, padding=True) == [(1, 2), (3, 3)]
    assert shares(("a",), 3, padding=True) == [("a",), ("a",), ("a",)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_keeps_dtype_and_bits(dtype):
    value = torch.tensor([0, 1, 1]).to(dtype)
    assert_same(shares(value, 2, padding=True), [value[:2], torch.cat([value[2:], value[2:]])])


def test_padding_keeps_masks():
    parts = shares(np.ma.array([1, 2, 3], mask=[True, False, True]), 2, padding=True)
    assert [part.tolist() for part in parts] == [[None, 2], [None, None]]


@pytest.mark.parametrize("value", [7, "text", None, torch.tensor(3), np.float32(1)], ids=repr)
def test_what_cannot_be_cut_goes_to_everybody(value):
    assert all(share is value for share in shares(value, 3, padding=True))


def test_a_dataclass_goes_to_everybody():
    data = Batch([1, 2])
    assert split(data, 2, 0) is data


def test_a_world_of_one_gets_everything():
    data = {"a": [1, 2], "b": torch.arange(2)}
    assert_same(split(data, 1, 0), data)
    assert_same(split(data, 1, 0, apply_padding=True), data)


def test_without_padding_a_share_of_a_tensor_is_a_view():
    value = torch.arange(4)
    assert split(value, 2, 1).data_ptr() == value[2:].data_ptr()


class Dataset:
    """Has what ``datasets.Dataset`` has: a length, ``select`` and ``column_names``."""

    column_names = ("row",)

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, indices):
        return Dataset([self.rows[i] for i in indices])


@PROPERTY
@given(length=lengths, parts=parts_of, padding=st.booleans())
def test_a_dataset_is_cut_by_select(length, parts, padding):
    got = shares(Dataset(list(range(length))), parts, padding)
    assert [share.rows for share in got] == naive_shares(range(length), parts, padding)


class Stream(IterableDataset):
    """A dataset without a length and indices."""

    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (DataLoader([1, 2]), "a DataLoader cannot be split between processes; pass its dataset"),
        (Stream(), r"a stream \(Stream\) cannot be split between processes; pass a list of its values"),
        (iter([1, 2]), r"an iterator \(list_iterator\) cannot be split between processes; pass a list of its values"),
    ],
    ids=["loader", "stream", "iterator"],
)
def test_what_every_process_would_read_whole_is_refused(data, text):
    with pytest.raises(TypeError, match=f"^{text}$"):
        split(data, 2, 0)


def test_a_torch_dataset_is_cut_beside_other_values():
    got = split({"data": TensorDataset(torch.arange(3)), "ids": ["a", "b", "c"]}, 2, 1, apply_padding=True)
    assert (list(got["data"]), got["ids"]) == ([(2,), (2,)], ["c", "c"])


@pytest.mark.parametrize(
    ("data", "listed"),
    [
        ({"a": [1, 2], "b": torch.ones(3)}, "['a']: 2, ['b']: 3"),
        ({"a": [1], "b": {"c": (1, 2), "d": np.ones(1)}}, "['a']: 1, ['b']['c']: 2, ['b']['d']: 1"),
        (Point([1], [1, 2]), ".x: 1, .y: 2"),
    ],
    ids=["dict", "nested", "namedtuple"],
)
def test_values_of_different_lengths_are_an_error_that_lists_them(data, listed):
    text = f"all values must have the same length to be split between processes, got {listed}"
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        split(data, 2, 0)


# --- the arithmetic


@PROPERTY
@given(st.integers(0, 50), st.integers(1, 9))
def test_split_sizes_are_those_of_torch_tensor_split(length, parts):
    assert split_sizes(length, parts) == [len(part) for part in torch.arange(length).tensor_split(parts)]


@PROPERTY
@given(st.integers(0, 50), st.integers(1, 9))
def test_split_bounds_follow_one_another_and_fit_the_sizes(length, parts):
    bounds = [split_bounds(length, parts, part) for part in range(parts)]
    edges = [0, *np.cumsum(split_sizes(length, parts)).tolist()]
    assert bounds == list(itertools.pairwise(edges))
    assert edges[-1] == length
