"""Values beside leaves are never lost silently: they are equal on all ranks, or all ranks raise."""

import datetime
import enum
import pathlib
from collections import deque

import pytest
import torch

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed

VERBS = {
    "gather": easydist.gather,
    "reduce": easydist.reduce,
    "broadcast": easydist.broadcast,
    "all_to_all": easydist.all_to_all,
    "pad_across_processes": easydist.pad_across_processes,
}
X = torch.arange(4.0)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Bag:
    """Holds tensors where a verb does not look, as a PyG ``Data`` or a pydantic object does."""

    def __init__(self, *held):
        self.store = {"held": [held]}


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Heir(Slotted):
    """Has nothing of its own."""

    __slots__ = ()


class Private:
    __slots__ = ("__x",)

    def __init__(self, x):
        self.__x = x


class Tokenizer:
    """An object without data."""

    name = "bert"


EQUAL = ["a", b"b", None, Color.RED, datetime.date(2026, 1, 2), pathlib.PurePath("x"), torch.float32, ..., Tokenizer()]
OTHER = [("a", "b"), (None, "None"), (Color.RED, Color.BLUE), (b"a", b"b"), (torch.half, torch.float)]
OTHER += [(datetime.date(2026, 1, 2), datetime.date(2026, 1, 3))]


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=(1, 2, 3))
def test_equal_values_pass_through(rank, verb):
    got = VERBS[verb]({"x": X.clone(), "rest": EQUAL, "none": [], "more": {"deep": ((), "text")}})
    assert (got["rest"], got["none"], got["more"]) == (EQUAL, [], {"deep": ((), "text")})


@distributed(world_size=2)
def test_objects_with_their_address_in_the_repr_are_equal(rank):
    mine = [object() for _ in range(rank + 1)]  # at different addresses on the two ranks
    data = {"x": X.clone(), "object": mine[-1], "generator": torch.Generator(), "method": Tokenizer().__init__}
    assert easydist.gather(data)["object"] is mine[-1]


@distributed(world_size=2)
def test_values_that_differ_under_keys_that_print_alike(rank):
    keys = [type("Key", (), {"__repr__": lambda self: "key"})() for _ in range(2)]
    with pytest.raises(DisagreementError, match=r"on 1 of 3 leaves\n  \[key\]  rank 0: 'a'   rank 1: 'b'\n"):
        easydist.gather({"x": X, keys[0]: "ab"[rank], keys[1]: "z"})


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=(2, 3))
def test_values_that_differ_are_an_error_on_all_ranks(rank, verb):
    for first, other in OTHER:
        with pytest.raises(DisagreementError) as caught:
            VERBS[verb]({"x": X.clone(), "label": other if rank == 1 else first})
        lines = str(caught.value).splitlines()
        assert lines[0] == f"{verb}: ranks disagree on 1 of 2 leaves"
        assert lines[1].startswith("  ['label']  rank 0: ")
        assert "gather_object" in lines[-1]
        assert "gather_for_metrics" in lines[-1]
    assert easydist.gather(rank).tolist() == list(range(torch.distributed.get_world_size()))


@distributed(world_size=2)
def test_long_texts_that_differ_at_their_end_are_told_apart(rank):
    with pytest.raises(DisagreementError, match=r"rank 0: 'aaa.*… \(1003 characters, "):
        easydist.gather([X, "a" * 1000 + str(rank)])


@pytest.mark.parametrize(
    "hides", ["bag", "deque", "keys", "slots", "heir", "private", "set", "values", "cache", "iterator"]
)
@distributed(world_size=(1, 2))
def test_an_object_that_holds_tensors_is_refused_by_name(rank, hides):
    def cache():
        from transformers import DynamicCache

        cache = DynamicCache()
        cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
        return cache

    make, text = {
        "bag": (lambda: Bag(X), "is a test_trees.Bag that holds tensors.*easydist.tree.register"),
        "deque": (lambda: Bag(deque([X])), "is a test_trees.Bag that holds tensors"),
        "keys": (lambda: Bag({X: "x"}), "is a test_trees.Bag that holds tensors"),
        "slots": (lambda: Slotted([X.numpy()]), "is a test_trees.Slotted that holds tensors"),
        "heir": (lambda: Heir(X), "is a test_trees.Heir that holds tensors"),
        "private": (lambda: Private(X), "is a test_trees.Private that holds tensors"),
        "set": (lambda: {X}, "is a set that holds tensors without an order"),
        "values": (lambda: {"a": X}.values(), "is a dict_values that holds tensors"),
        "cache": (cache, "DynamicCache that holds tensors"),
        "iterator": (lambda: iter([X]), "is an iterator"),
    }[hides]
    for verb in VERBS.values():
        with pytest.raises(TypeError, match=text):
            verb({"x": X.clone(), "hidden": make()})
    assert easydist.gather(0).shape == (
        torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    )


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=(1, 2))
def test_plain_values_alone_are_refused_and_empty_containers_are_not(rank, verb):
    for data in ("text", ["a", None], {"a": Color.RED}):
        with pytest.raises(TypeError, match=f"^{verb}: the tree holds no tensor, array or number .*use .*object"):
            VERBS[verb](data)
    for empty in ((), [], {}, {"a": [(), {}]}):
        assert VERBS[verb](empty) == empty


@distributed(world_size=2)
def test_keys_that_print_alike_are_refused_on_all_ranks(rank):
    keys = [type("Key", (), {"__repr__": lambda self: "key"})() for _ in range(2)]
    data = {keys[rank]: torch.zeros(1), keys[1 - rank]: torch.ones(1)}
    for verb, call in VERBS.items():
        with pytest.raises(ValueError, match=rf"^{verb}: \[key\] is the path of several leaves"):
            call(data)
    with pytest.raises(RemoteError, match="rank 1: ValueError: gather"):
        easydist.gather(data if rank else {keys[0]: torch.zeros(1)})
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_sets_beside_tensors_are_equal_on_all_ranks_in_any_order(rank):
    inner = frozenset([0, 8] if rank else [8, 0])  # two numbers of one hash, which keep the order in which they came
    for same in (set(inner), {"text", (1, inner)}, frozenset(), {object()}):
        assert easydist.gather({"x": torch.ones(1), "s": same})["s"] is same
    for other in ({rank}, {(1, frozenset([rank]))}, {rank} | inner):
        with pytest.raises(DisagreementError, match=r"ranks disagree on 1 of 2 leaves\n  \['s'\]  rank 0: set\("):
            easydist.gather({"x": torch.ones(1), "s": other})


@distributed(world_size=(1, 2))
def test_many_python_numbers_are_right_and_worth_a_warning(rank, world_size):
    numbers = [[i + rank, float(i), bool(i % 2), complex(i, rank)] for i in range(300)]
    with pytest.warns(UserWarning, match="^gather: the tree holds 1200 Python numbers, each a leaf of its own: pass"):
        got = easydist.gather(numbers)
    assert [leaf.dtype for leaf in got[0]] == [torch.int64, torch.float64, torch.bool, torch.complex128]
    for i, row in enumerate(got):
        want = [[i + r for r in range(world_size)], [float(i)] * world_size, [bool(i % 2)] * world_size]
        assert [leaf.tolist() for leaf in row] == [*want, [complex(i, r) for r in range(world_size)]]
    assert easydist.reduce([numbers[:20], "text"], "sum")[0][7][0] == sum(7 + r for r in range(world_size))
    assert easydist.broadcast(numbers[:100])[99][1:] == [99.0, True, complex(99, 0)]


@distributed(world_size=2)
def test_one_number_of_many_that_does_not_fit_is_named(rank):
    with pytest.raises(ValueError, match=r"leaf \[17\] is an int that does not fit 64 bits"):
        easydist.gather([*range(17), 2**70, *range(20)])
