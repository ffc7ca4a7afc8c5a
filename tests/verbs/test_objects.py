"""gather_object, broadcast_object_list, scatter_object_list."""

import inspect
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import resident
import torch
import trees

import easydist
from easydist import DisagreementError, RemoteError, UnsafeObjectError
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
    with pytest.raises(RemoteError, match="rank 0: TypeError: \\[0\\] of type lock cannot be pickled"):
        easydist.broadcast_object_list([threading.Lock() if rank == 0 else None])
    assert easydist.gather_object(rank) == [0, 1]


@distributed(world_size=ALL)
def test_broadcast_works_in_place_from_any_source(rank, world_size):
    for source in range(world_size):
        objects = [{"rank": rank}, Pair(rank, "x"), None if rank == source else 1]
        assert easydist.broadcast_object_list(objects, source) is objects
        assert objects == [{"rank": source}, Pair(source, "x"), None]


@distributed(world_size=1)
def test_alone_a_broadcast_leaves_the_list_as_it_is_and_pickles_nothing(rank):
    objects = [threading.Lock(), lambda: 1, (part for part in "ab")]
    before = list(objects)
    assert easydist.broadcast_object_list(objects) is objects
    assert all(one is other for one, other in zip(objects, before, strict=True))


@distributed(world_size=(1, 2, 3))
def test_the_arguments_have_the_names_of_the_published_page_as_well(rank, world_size):
    last = world_size - 1
    for given in ({"objects": [rank], "src": last}, {"object_list": [rank], "from_process": last}):
        assert easydist.broadcast_object_list(**given) == [last]
    assert easydist.broadcast_object_list([rank], src=last) == [last]
    assert easydist.broadcast_object_list(objects=[rank]) == [0]
    assert easydist.gather_object(obj=rank) == easydist.gather_object(object=rank) == list(range(world_size))
    same = "are the same argument; pass one of them$"
    with pytest.raises(TypeError, match=f"^broadcast_object_list: object_list= and objects= {same}"):
        easydist.broadcast_object_list([1], objects=[1])
    with pytest.raises(TypeError, match=f"^broadcast_object_list: from_process= and src= {same}"):
        easydist.broadcast_object_list([1], 0, src=0)
    with pytest.raises(TypeError, match=f"^gather_object: object= and obj= {same}"):
        easydist.gather_object(None, obj=None)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'object_list'"):
        easydist.broadcast_object_list()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'object'"):
        easydist.gather_object(dst=0)


def test_signatures_show_the_first_names():
    gathering, broadcasting = map(inspect.signature, (easydist.gather_object, easydist.broadcast_object_list))
    assert list(gathering.parameters) == ["object", "dst", "group_dst", "weights_only", "group", "check", "timeout"]
    torchs = ["object_list", "from_process", "group", "device", "group_src"]  # with torch's src as from_process
    assert list(broadcasting.parameters)[:5] == torchs
    assert not {"objects", "src"} & broadcasting.parameters.keys()
    assert broadcasting.parameters["object_list"].default is inspect.Parameter.empty
    assert broadcasting.parameters["from_process"].default == 0


@distributed(world_size=ALL)
@pytest.mark.parametrize("size", [10, 100_000])
def test_one_rank_alone_gets_the_objects(rank, world_size, size):
    for dst in range(world_size):
        got = easydist.gather_object({"t": torch.full((size + rank,), rank)}, dst=dst)
        lists = easydist.gather_object(["x" * size, rank], dst=dst)
        if rank == dst:
            assert [item["t"].unique().tolist() for item in got] == [[r] for r in range(world_size)]
            assert lists == [part for r in range(world_size) for part in ("x" * size, r)]
        else:
            assert got is lists is None


@distributed(world_size=2)
def test_a_dst_that_is_no_rank_or_not_the_same_is_an_error(rank):
    with pytest.raises(ValueError, match=r"dst=2 is not a rank of the group, which has 2 ranks \(0–1\)"):
        easydist.gather_object(1, dst=2)
    with pytest.raises(DisagreementError, match=r"rank 1: gather_object\(is_list=False, dst=1\)"):
        easydist.gather_object(1, dst=rank)


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
    for few_or_many in (["one"], ["one", "two", "three"]):
        with pytest.raises(RemoteError, match=f"needs one object per rank, 2, got {len(few_or_many)}"):
            easydist.scatter_object_list([None], few_or_many if rank == 0 else None)
    with pytest.raises(
        RemoteError, match=r"rank 1: ValueError: .*scatter_object_output_list needs at least one element"
    ):
        easydist.scatter_object_list([None] if rank == 0 else [], ["a", "b"] if rank == 0 else None)
    output = [None]
    easydist.scatter_object_list(output, ["a", "b"] if rank == 0 else None)
    assert output == ["ab"[rank]]


# --- tensors and arrays inside objects


@distributed(world_size=(1, 2, 3))
@pytest.mark.parametrize("weights_only", [False, True])
def test_tensors_and_arrays_inside_objects_arrive_bit_for_bit(rank, world_size, weights_only):
    def make(r):
        big = torch.arange(3000, dtype=torch.bfloat16) + r
        return {"tied": (big, big), "array": np.arange(5000.0)[::-1] * r, "of rank": r, "none": torch.empty(0, r)}

    want = [make(r) for r in range(world_size)]
    got = easydist.gather_object(make(rank), weights_only=weights_only)
    trees.assert_same(got, want)
    assert all(item["tied"][0] is item["tied"][1] for item in got)
    trees.assert_same(
        easydist.broadcast_object_list([make(rank)], world_size - 1, weights_only=weights_only), want[-1:]
    )
    output = [None]
    easydist.scatter_object_list(output, want if rank == 0 else None, weights_only=weights_only)
    trees.assert_same(output, [want[rank]])


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("weights_only", [False, True])
def test_what_arrives_is_the_callers_own(rank, weights_only):
    mine = {"t": torch.ones(5000), "a": np.ones(5000)}
    for item in easydist.gather_object(mine, weights_only=weights_only):
        item["t"].zero_()
        item["a"][:] = 0
    assert mine["t"].sum() == mine["a"].sum() == 5000


@distributed(world_size=2)
def test_what_has_arrived_stays_when_the_next_call_is_made(rank):
    """Small enough for the header exchange, and large enough to share the memory of the message."""

    def value(n):
        return {"t": torch.full((1000,), n), "a": np.full(1000, n)}

    gathered, objects = easydist.gather_object(value(rank)), [value(rank)]
    easydist.gather_object(value(7 + rank))
    trees.assert_same(gathered, [value(0), value(1)])
    easydist.broadcast_object_list(objects, 1)
    easydist.gather_object(value(7 + rank))
    trees.assert_same(objects, [value(1)])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be measured here")
@distributed(world_size=2)
@pytest.mark.parametrize("weights_only", [False, True])
def test_gathering_100_mb_inside_objects_peaks_below_1_2_times_the_result(rank, weights_only):
    nbytes = 50_000_000
    mine = {"tensors": [torch.full((nbytes // 40,), rank) for _ in range(4)], "array": np.full(nbytes // 40, rank)}
    easydist.gather_object(
        torch.ones(3_000_000), weights_only=weights_only
    )  # the group's shared memory is used from now on
    easydist.memory.release()
    resident.give_back()
    got, peak = resident.peak_above(lambda: easydist.gather_object(mine, weights_only=weights_only))
    assert [int(item["tensors"][3][-1]) + int(item["array"][-1]) for item in got] == [0, 2]
    assert 1.8 * nbytes < peak < 1.2 * 2 * nbytes  # some of it may be memory that was freed before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be measured here")
@distributed(world_size=3)
def test_large_objects_go_to_dst_only(rank):
    nbytes = 20_000_000
    mine = torch.full((nbytes // 8,), rank)
    easydist.gather_object(torch.ones(3_000_000))  # the group's shared memory is used from now on
    easydist.memory.release()
    resident.give_back()
    _, peak = resident.peak_above(lambda: easydist.gather_object(mine, dst=1))
    assert peak > 2.8 * nbytes if rank == 1 else peak < 1.8 * nbytes


# --- safety


@distributed(world_size=(1, 2, 3))
def test_what_is_not_allow_listed_is_refused_on_all_ranks_before_it_travels(rank, world_size):
    bad, error = trees.Color.RED, UnsafeObjectError if world_size == 1 else RemoteError
    last = rank == world_size - 1
    for call in (
        lambda: easydist.gather_object(bad if last else 1, weights_only=True),
        lambda: easydist.broadcast_object_list([bad if last else 1], world_size - 1, weights_only=True),
        lambda: easydist.scatter_object_list([None], [1] * rank + [bad], world_size - 1, weights_only=True),
    ):
        with pytest.raises(error, match=r"asks for trees\.Color, which is not allow-listed"):
            call()
    with torch.serialization.safe_globals([trees.Color]):
        assert easydist.gather_object(bad, weights_only=True) == [bad] * world_size
    assert easydist.gather_object(rank) == list(range(world_size))


@distributed(world_size=2)
def test_a_receiver_that_allows_less_raises_after_the_exchange_and_the_group_works_on(rank):
    allowed = [trees.Color] if rank == 0 else []
    with torch.serialization.safe_globals(allowed):
        output = ["kept"]
        if rank == 0:
            easydist.scatter_object_list(output, [1, trees.Color.RED], weights_only=True)
            easydist.broadcast_object_list([trees.Color.RED], weights_only=True)
        else:
            with pytest.raises(UnsafeObjectError, match=r"trees\.Color"):
                easydist.scatter_object_list(output, weights_only=True)
            with pytest.raises(UnsafeObjectError, match=r"trees\.Color"):
                easydist.broadcast_object_list(["kept"], weights_only=True)
            assert output == ["kept"]
    assert easydist.gather_object(rank) == [0, 1]


@distributed(world_size=2)
def test_ranks_have_to_agree_on_weights_only(rank):
    with pytest.raises(DisagreementError, match=r"rank 1: gather_object\(is_list=False, weights_only=True\)"):
        easydist.gather_object(1, weights_only=rank == 1)


def call_while_denied(call, allowed=False):
    easydist.allow_pickle(allowed)
    try:
        return call()
    finally:
        easydist.allow_pickle(True)


OBJECT_VERBS = {
    "gather_object": lambda **kwargs: easydist.gather_object(1, **kwargs),
    "broadcast_object_list": lambda **kwargs: easydist.broadcast_object_list([1], **kwargs),
    "scatter_object_list": lambda **kwargs: easydist.scatter_object_list([None], [1, 2], **kwargs),
}


@distributed(world_size=2)
@pytest.mark.parametrize("verb", OBJECT_VERBS)
def test_denied_pickle_is_an_error_on_all_ranks(rank, verb):
    call = OBJECT_VERBS[verb]
    with pytest.raises(UnsafeObjectError, match="pickle is denied in this process"):
        call_while_denied(call)
    with pytest.raises(RemoteError, match=rf"{verb}: rank 1 failed .*\n  rank 1: UnsafeObjectError: pickle is denied"):
        call_while_denied(call, allowed=rank == 0)
    call_while_denied(lambda: call(weights_only=True))
    call()


@distributed(world_size=2)
def test_structure_travels_where_pickle_is_denied(rank):
    data = {"a": torch.ones(2), "b": [np.arange(3), "text"]}
    got = call_while_denied(lambda: easydist.broadcast(data if rank == 0 else None))
    trees.assert_same(got, data)
    got = call_while_denied(lambda: easydist.scatter({"x": torch.arange(4)} if rank == 0 else None))
    assert got["x"].tolist() == [[0, 1], [2, 3]][rank]


@distributed(world_size=2)
def test_containers_of_ones_own_need_permission_where_pickle_is_denied(rank):
    data = trees.Point(torch.ones(2), "y")
    with pytest.raises(RemoteError, match=r"rank 1: UnsafeObjectError: .*trees\.Point"):
        call_while_denied(lambda: easydist.broadcast(data if rank == 0 else None))
    with torch.serialization.safe_globals([trees.Point]):
        trees.assert_same(call_while_denied(lambda: easydist.broadcast(data if rank == 0 else None)), data)
