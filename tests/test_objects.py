"""gather_object, broadcast_object_list, scatter_object_list."""

import threading
from collections import namedtuple

import pytest
import torch

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed

ALL = (1, 2, 3, 4)
Pair = namedtuple("Pair", "left right")


@distributed(world_size=ALL)
def test_lists_are_concatenated(rank, world_size):
    assert easydist.gather_object([rank]) == list(range(world_size))
    assert easydist.gather_object([f"{rank}.{i}" for i in range(rank)]) == [
        f"{r}.{i}" for r in range(world_size) for i in range(r)
    ]


@distributed(world_size=ALL)
@pytest.mark.parametrize("make", ["dict", "str", "int", "tuple", "none", "namedtuple"])
def test_anything_else_is_one_item_per_rank(rank, world_size, make):
    values = {
        "dict": lambda r: {"a": r},
        "str": lambda r: "ab"[: r + 1],
        "int": lambda r: 7 + r,
        "tuple": lambda r: ([r] * r, ["ref"]),
        "none": lambda r: None,
        "namedtuple": lambda r: Pair(r, {r}),
    }[make]
    assert easydist.gather_object(values(rank)) == [values(r) for r in range(world_size)]


@distributed(world_size=2)
def test_tensors_inside_objects_and_sizes_that_differ_much(rank):
    got = easydist.gather_object({"t": torch.full((10 ** (1 + 4 * rank),), rank), "s": "x" * rank})
    assert [item["t"].numel() for item in got] == [10, 100_000]
    assert got[1]["t"].unique().tolist() == [1]


@distributed(world_size=2)
def test_some_lists_and_some_not_is_an_error(rank):
    with pytest.raises(DisagreementError, match=r"rank 0: gather_object\(is_list=True\)"):
        easydist.gather_object([1] if rank == 0 else (1,))


@distributed(world_size=2)
def test_what_cannot_be_pickled_on_one_rank_is_an_error_for_all(rank):
    with pytest.raises(
        RemoteError, match=r"gather_object: rank 1 failed .*\n  rank 1: TypeError: lock cannot be pickled"
    ):
        easydist.gather_object(threading.Lock() if rank else 1)
    with pytest.raises(RemoteError, match="rank 0: TypeError: list cannot be pickled"):
        easydist.broadcast_object_list([threading.Lock() if rank == 0 else None])
    assert easydist.gather_object(rank) == [0, 1]


@distributed(world_size=ALL)
def test_broadcast_works_in_place_from_any_source(rank, world_size):
    for source in range(world_size):
        objects = [{"rank": rank}, Pair(rank, "x"), None if rank == source else 1]
        assert easydist.broadcast_object_list(objects, source) is objects
        assert objects == [{"rank": source}, Pair(source, "x"), None]


@distributed(world_size=ALL)
def test_broadcast_of_an_empty_list_does_nothing(rank):
    objects = []
    assert easydist.broadcast_object_list(objects) is objects
    assert objects == []


@distributed(world_size=2)
def test_lists_of_other_lengths_are_an_error_and_stay(rank):
    objects = [rank] * (1 + rank)
    with pytest.raises(DisagreementError, match="length=2"):
        easydist.broadcast_object_list(objects)
    assert objects == [rank] * (1 + rank)
    with pytest.raises(TypeError, match="broadcast_object_list: object_list has to be a list, got dict"):
        easydist.broadcast_object_list({})


@distributed(world_size=ALL)
def test_scatter_gives_each_rank_its_own(rank, world_size):
    for source in range(world_size):
        output = [None, "kept"]
        easydist.scatter_object_list(
            output, [{r: "x" * r} for r in range(world_size)] if rank == source else None, source
        )
        assert output == [{rank: "x" * rank}, "kept"]


@distributed(world_size=2)
def test_scatter_refuses_wrong_lists_on_all_ranks(rank):
    with pytest.raises(RemoteError, match="needs one object per rank, 2, got 1"):
        easydist.scatter_object_list([None], ["one"] if rank == 0 else None)
    with pytest.raises(
        RemoteError, match=r"rank 1: ValueError: .*scatter_object_output_list needs at least one element"
    ):
        easydist.scatter_object_list([None] if rank == 0 else [], ["a", "b"] if rank == 0 else None)
    output = [None]
    easydist.scatter_object_list(output, ["a", "b"] if rank == 0 else None)
    assert output == ["ab"[rank]]
