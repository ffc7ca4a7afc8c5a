"""Tests of the laws of flatten, rebuild and map."""

import dataclasses
import functools
import re
import sys
from collections import OrderedDict, UserDict, defaultdict

import pytest
import tensordict
import torch
import transformers
from hypothesis import given, settings
from launching import examples
from trees import (
    CASES,
    CONTAINERS,
    LEAVES,
    ODD_KEYS,
    OUTSIDERS,
    STATICS,
    THING,
    Batch,
    Box,
    Color,
    Counted,
    Level,
    Point,
    assert_same,
    trees,
)

from easydist import tree

PROPERTY = settings(max_examples=examples(60), deadline=None)
TREES = {**CONTAINERS, **OUTSIDERS}


def mutable_parts(data):
    """Return lists and dicts at any depth, by identity."""
    children = data.values() if isinstance(data, dict | UserDict) else data if isinstance(data, list | tuple) else ()
    own = [data] if isinstance(data, dict | UserDict | list) else []
    return own + [part for child in children for part in mutable_parts(child)]


@pytest.mark.parametrize("name", CASES)
def test_rebuild_is_the_inverse_of_flatten(name):
    data = CASES[name]()
    leaves, spec = tree.flatten(data)
    rebuilt = spec.rebuild(leaves)
    assert_same(rebuilt, data, identity=True)
    assert all(a is b for a, b in zip(tree.leaves(rebuilt), leaves, strict=True))


@PROPERTY
@given(trees())
def test_round_trip_keeps_types_values_and_the_identity_of_what_is_no_leaf(data):
    leaves, spec = tree.flatten(data)
    assert len(spec.paths) == len(leaves)
    assert_same(spec.rebuild(leaves), data, identity=True)


@PROPERTY
@given(trees())
def test_a_path_is_how_python_writes_the_access(data):
    leaves, spec = tree.flatten(data)
    assert len(set(spec.paths)) == len(spec.paths)
    for leaf, path in zip(leaves, spec.paths, strict=True):
        assert eval(f"root{path}", {"root": data}) is leaf


@pytest.mark.parametrize("name", TREES)
def test_map_leaves_its_input_alone_and_shares_no_container_with_it(name):
    data = TREES[name]()
    result = tree.map(lambda leaf: leaf * 0 + 7, data)
    assert_same(data, TREES[name]())
    assert not {id(part) for part in mutable_parts(result)} & {id(part) for part in mutable_parts(data)}


@pytest.mark.parametrize("name", TREES)
def test_map_replaces_every_leaf(name):
    result = tree.map(lambda leaf: "leaf", TREES[name]()) if name != "TensorDict" else {}
    assert list(tree.leaves(result)) == []


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_alone_is_a_tree_with_an_empty_path(name):
    leaf = LEAVES[name]()
    leaves, spec = tree.flatten(leaf)
    assert tree.is_leaf(leaf)
    assert not tree.is_container(leaf)
    assert (len(leaves), spec.paths) == (1, [""])
    assert leaves[0] is leaf
    assert spec.rebuild([THING]) is THING


@pytest.mark.parametrize("name", STATICS)
def test_what_is_no_data_has_no_leaves_and_comes_back_itself(name):
    value = STATICS[name]()
    leaves, spec = tree.flatten({"a": value})
    assert (leaves, spec.paths) == ([], [])
    assert spec.rebuild([])["a"] is value
    assert not tree.is_leaf(value)


PATHS = [
    ({"batch": {"ids": [1]}}, ["['batch']['ids'][0]"]),
    (Point(1, (2, 3)), [".x", ".y[0]", ".y[1]"]),
    (Batch({"a": 1}), [".ids['a']"]),
    ([Batch([Point(1, 2)])], ["[0].ids[0].x", "[0].ids[0].y"]),
    (OrderedDict(b=1, a=2), ["['b']", "['a']"]),
    (torch.Size([2, 3]), ["[0]", "[1]"]),
    (Box({"a": 1}), ["[0]['a']"]),
    ({"b": 1, "a": "s", "c": None, "d": 2.0}, ["['b']", "['d']"]),
    (dict.fromkeys(ODD_KEYS, 0), [f"[{key!r}]" for key in ODD_KEYS]),
]


@pytest.mark.parametrize(("data", "paths"), PATHS, ids=[str(paths) for _, paths in PATHS])
def test_paths(data, paths):
    assert tree.flatten(data)[1].paths == paths


def test_paths_of_other_libraries_containers():
    assert tree.flatten(OUTSIDERS["BatchEncoding"]())[1].paths == ["['input_ids']"]
    assert tree.flatten(OUTSIDERS["ModelOutput"]())[1].paths == [
        "['logits']",
        "['hidden_states'][0]",
        "['hidden_states'][1]",
    ]
    assert tree.flatten(OUTSIDERS["TensorDict"]())[1].paths == ["['a']", "['n']['b']"]


def test_keys_that_print_alike_have_paths_of_their_own():
    class Key:
        def __repr__(self):
            return "key"

    paths = tree.flatten({Key(): 1, Key(): 2})[1].paths
    assert len(set(paths)) == 2


def test_sets_as_keys_have_one_path_whatever_the_order_of_their_items():
    """Their repr has the order of this process's hashes; those of 0 and 8 collide, so theirs is that of insertion."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert repr(one) != repr(other)
    for key, same in ((one, other), ((1, one), (1, other)), (frozenset([one]), frozenset([other]))):
        assert tree.flatten({key: 1})[1].paths == tree.flatten({same: 1})[1].paths
    assert tree.flatten({(one,): 1})[1].paths == ["[(frozenset({0, 8}),)]"]
    assert tree.flatten({frozenset(): 1})[1].paths == ["[frozenset()]"]


def test_equal_keys_of_other_types_keep_paths_of_their_own():
    for key in (1, True, 1.0, 0.0, -0.0, Level.LOW, (1,), (True,)):
        assert tree.flatten({key: 1, "a": 2})[1].paths == [f"[{key!r}]", "['a']"]


def test_paths_follow_a_container_that_changes():
    data = {"a": 1, "b": [2]}
    tree.flatten(data)[1].paths.append("not ours")
    data["c"] = data.pop("a")
    data["b"] += [3]
    assert tree.flatten(data)[1].paths == ["['b'][0]", "['b'][1]", "['c']"]


def test_a_flat_tree_of_any_length_is_rebuilt():
    for count in (0, 1, 4096, 4097):
        data = {"list": list(range(count)), **{f"key {i}": i for i in range(count)}}
        assert tree.map(lambda x: x, data) == data


def test_default_dict_keeps_its_factory():
    data = defaultdict(list, a=1)
    rebuilt = tree.map(lambda x: x, data)
    assert rebuilt["new"] == []
    assert "new" not in data


def test_batch_encoding_comes_back_as_one_that_is_its_own():
    data = OUTSIDERS["BatchEncoding"]()
    rebuilt = tree.map(lambda x: x + 1, data)
    assert type(rebuilt) is transformers.BatchEncoding
    assert rebuilt.input_ids.tolist() == [[1, 2], [3, 4]]
    assert data.input_ids.tolist() == [[0, 1], [2, 3]]


def test_model_output_keeps_attributes_and_absent_fields():
    rebuilt = tree.map(lambda x: x + 1, OUTSIDERS["ModelOutput"]())
    assert rebuilt.logits is rebuilt["logits"]
    assert rebuilt.loss is None
    assert "loss" not in rebuilt


def test_tensordict_keeps_batch_size_and_what_is_no_tensor():
    data = tensordict.TensorDict({"x": torch.zeros(2), "name": "train"}, batch_size=[2])
    rebuilt = tree.map(lambda x: x + 1, data)
    assert (rebuilt["x"].tolist(), rebuilt["name"], rebuilt.batch_size) == ([1, 1], "train", torch.Size([2]))


def test_dataclass_is_rebuilt_without_running_post_init_again():
    data = Counted(torch.ones(3))
    rebuilt = tree.map(lambda x: x * 2, data)
    assert rebuilt.runs == ["post_init"]
    assert (rebuilt.x.tolist(), rebuilt.total.item()) == ([2, 2, 2], 6)
    assert data.x.tolist() == [1, 1, 1]


def test_dataclass_with_an_unset_field_is_rebuilt_without_it():
    data = Batch(1)
    del data.ids
    assert not hasattr(tree.map(lambda x: x, data), "ids")


def test_size_with_other_leaves_than_ints_becomes_a_tuple():
    assert tree.map(float, torch.Size([2, 3])) == (2.0, 3.0)
    assert type(tree.map(float, torch.Size([2, 3]))) is tuple


def test_tied_leaves_stay_one_object():
    rebuilt = tree.map(lambda x: x, CONTAINERS["tied"]())
    assert rebuilt["encoder"] is rebuilt["decoder"][0]


def test_registered_class_is_a_container():
    class Wrapped:
        def __init__(self, x):
            self.x = x

    assert not tree.is_registered(Wrapped(1))
    tree.register(Wrapped, lambda w: ([w.x], None), lambda children, _: Wrapped(children[0]))
    assert tree.is_registered(Wrapped(1))
    assert tree.map(lambda x: x + 1, [Wrapped(1)])[0].x == 2
    with pytest.raises(ValueError, match="already registered"):
        tree.register(Wrapped, lambda w: ([w.x], None), lambda children, _: Wrapped(children[0]))


def test_enum_members_are_no_numbers():
    assert not tree.is_leaf(Level.LOW)
    assert tree.map(lambda x: x + 1, [Level.LOW, Color.RED, 1]) == [Level.LOW, Color.RED, 2]


def test_is_leaf_decides_before_containers_are_opened():
    leaves, spec = tree.flatten({"a": (1, 2), "b": [3]}, is_leaf=lambda value: isinstance(value, tuple))
    assert (leaves, spec.paths) == ([(1, 2)], ["['a']"])


def test_skip_leaves_a_step_to_the_structure_at_any_depth():
    data = {"a": 1, "keep": {"a": 2}, "list": [{"keep": 3, "b": 4}]}
    leaves, spec = tree.flatten(data, skip={"['keep']"})
    assert leaves == [1, 4]
    assert spec.rebuild([10, 40])["keep"] is data["keep"]


@pytest.mark.parametrize("given", [tuple, iter, dict.fromkeys], ids=["tuple", "iterator", "keys"])
def test_leaves_may_come_in_any_iterable(given):
    for data in ([1, 2], {"a": [1], "b": (2,)}, [[1, 2]]):
        assert_same(tree.flatten(data)[1].rebuild(given([1, 2])), data)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rebuild_refuses_another_number_of_leaves(count):
    _, spec = tree.flatten([1, 2])
    with pytest.raises(ValueError, match=f"^the tree has 2 leaves, got {count}$"):
        spec.rebuild([0] * count)


def cyclic_list():
    data = [1]
    data.append(data)
    return data


def cyclic_deep():
    inner = {"x": []}
    inner["x"].append((Point(1, inner),))
    return {"top": [inner]}


def cyclic_dataclass():
    data = Batch(None)
    data.ids = {"self": data}
    return data


CYCLES = {
    "list": (cyclic_list, "[1] is the root again"),
    "deep": (cyclic_deep, "['top'][0]['x'][0][0].y is ['top'][0] again"),
    "dataclass": (cyclic_dataclass, ".ids['self'] is the root again"),
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_is_an_error_that_says_where(name):
    make, text = CYCLES[name]
    with pytest.raises(ValueError, match="^the tree has a cycle: " + re.escape(text) + "$"):
        tree.flatten(make())


def nest(wrap, depth):
    data = 1
    for _ in range(depth):
        data = wrap(data)
    return data


WRAPS = {"list": lambda x: [x], "dict": lambda x: {"a": x}, "tuple": lambda x: (x,), "dataclass": Batch}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_nesting_too_deep_is_an_error_of_its_own(wrap):
    with pytest.raises(ValueError, match=r"^the tree is nested deeper than Python's recursion limit$"):
        tree.flatten(nest(wrap, 2 * sys.getrecursionlimit()))


def test_nesting_too_deep_is_no_cycle_where_children_are_made_on_opening():
    class Fresh:
        def __init__(self, x):
            self.x = x

    tree.register(Fresh, lambda fresh: ([[fresh.x]], None), lambda children, _: Fresh(children[0][0]))
    with pytest.raises(ValueError, match=r"^the tree is nested deeper than Python's recursion limit$"):
        tree.flatten(nest(Fresh, 2 * sys.getrecursionlimit()))


@pytest.mark.parametrize("depth", [100, sys.getrecursionlimit() * 3 // 5])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_what_can_be_flattened_can_be_rebuilt(wrap, depth):
    data = nest(wrap, depth)
    assert list(tree.leaves(tree.map(lambda x: x + 1, data))) == [2]


def test_one_object_in_two_places_is_no_cycle():
    shared = [1]
    assert tree.flatten({"a": shared, "b": (shared, shared)})[1].paths == ["['a'][0]", "['b'][0][0]", "['b'][1][0]"]


def test_is_namedtuple_knows_subclasses_and_no_plain_tuples():
    assert tree.is_namedtuple(Point(1, 2))
    assert tree.is_namedtuple(CONTAINERS["namedtuple with its own __new__"]())
    assert not tree.is_namedtuple((1, 2))
    assert not tree.is_namedtuple([1])
    assert not tree.is_namedtuple(Point)


class AttrDict(dict):
    """A dict whose keys and attributes are the same."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclasses.dataclass
class Square:
    side: int

    @functools.cached_property
    def area(self):
        return self.side**2


def test_a_dict_that_is_its_own_attributes_stays_so():
    got = tree.map(lambda x: x + 1, AttrDict(x=1))
    assert (type(got), got["x"], got.x) == (AttrDict, 2, 2)


def test_remembered_results_are_computed_anew():
    square = Square(1)
    assert square.area == 1
    assert tree.map(lambda x: x + 1, square).area == 4


def test_a_deep_tree_that_shares_its_nodes_is_refused_at_once():
    deep = [1]
    for _ in range(1200):
        deep = [deep, deep]
    with pytest.raises(ValueError, match="nested deeper than Python's recursion limit"):
        tree.flatten(deep)


class Frozen(dict):
    """A dict that cannot be changed, so that its copy is itself."""

    def __setitem__(self, key, value):
        raise TypeError("frozen")

    def __copy__(self):
        return self


class Closed(dict):
    """A dict that cannot be changed, like its copies."""

    __setitem__ = Frozen.__setitem__

    def __copy__(self):
        return Closed(self)


class FrozenList(list):
    """A list that is its own copy."""

    def __copy__(self):
        return self


class Uncopied(dict):
    """A dict that cannot be copied."""

    def __copy__(self):
        raise TypeError("'NoneType' object is not callable")


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A dataclass whose copy is itself."""

    x: int

    def __copy__(self):
        return self


def test_containers_without_a_copy_that_can_be_changed_are_made_anew():
    for data in (Frozen(x=1), Closed(x=1), Uncopied(x=1), FrozenList([1]), Fixed(1)):
        values, spec = tree.flatten(data)
        got = spec.rebuild([2])
        assert (values, type(got), tree.flatten(got)[0], tree.flatten(data)[0]) == ([1], type(data), [2], [1])


class Strict(dict):
    """A dict that is refused once it has other values than text, and cannot be copied."""

    def __init__(self, items):
        if not all(isinstance(value, str) for value in items.values()):
            raise RuntimeError("only text")
        super().__init__(items)

    def __copy__(self):
        raise TypeError("no copies")


class Pair(tuple):
    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


@pytest.mark.parametrize(("made", "reason"), [(Strict({"a": "1"}), "RuntimeError: only text"), (Pair(1, 2), "TypeErr")])
def test_a_container_that_cannot_be_made_again_names_its_class_and_the_remedy(made, reason):
    leaves, spec = tree.flatten(made, lambda value: isinstance(value, str | int))
    with pytest.raises(TypeError, match=rf"a {type(made).__name__} cannot be made again .*\({reason}.*tree\.register"):
        spec.rebuild([torch.tensor(0) for _ in leaves])
