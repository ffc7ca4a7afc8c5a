"""Laws of questions to nested data and of its changes."""

import inspect
import re
from collections import UserDict

import accelerate
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from launching import examples
from trees import (
    ARRAYS,
    TENSORS,
    THING,
    Batch,
    Items,
    Pair,
    Point,
    assert_same,
    batch_encoding,
    model_output,
    tensordict,
    tensors,
    tied,
    trees,
)

import easydist
from easydist import TensorInformation

PROPERTY = settings(max_examples=examples(40), deadline=None)


# --- honor_type, recursively_apply, listify


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), Point(1, 2), Items([1, 2]), Pair((1, 2)), torch.Size([1, 2])], ids=repr
)
def test_honor_type_makes_the_container_of_the_same_type(value):
    got = easydist.honor_type(value, (x * 10 for x in value))
    assert_same(got, type(value)(*[10, 20]) if type(value) is Point else type(value)([10, 20]))


def test_honor_type_of_a_return_type():
    value = torch.ones(2, 3).max(dim=1)
    assert type(easydist.honor_type(value, (x + 1 for x in value))) is type(value)


@PROPERTY
@given(trees())
def test_recursively_apply_of_the_identity_is_the_identity(data):
    assert_same(easydist.recursively_apply(lambda t: t, data), data, identity=True)


def test_recursively_apply_passes_arguments_on_and_touches_tensors_only():
    data = {"a": torch.ones(2), "b": [1, "s", np.ones(1)], "c": Point(torch.zeros(1), None)}
    got = easydist.recursively_apply(lambda t, k, *, add: t * k + add, data, 3, add=1)
    want = {"a": torch.full((2,), 4.0), "b": data["b"], "c": Point(torch.ones(1), None)}
    assert_same(got, want)


def test_recursively_apply_opens_containers_before_it_asks_test_type_as_accelerate_does():
    data = {"a": (1, [2.5]), "b": UserDict(c=Point("x", None)), "d": Items([3])}
    every = []
    for apply in (accelerate.utils.recursively_apply, easydist.recursively_apply):
        asked = []
        got = apply(str, data, test_type=lambda value, asked=asked: asked.append(value) or True)
        every.append((got, asked))
    assert_same(*[got for got, _ in every])
    assert every[0][1] == every[1][1] == [1, 2.5, "x", None, 3]


def test_recursively_apply_asks_about_other_containers_first():
    data = [Batch(torch.ones(1)), TensorInformation(torch.Size([2]), torch.int8)]
    got = easydist.recursively_apply(easydist.initialize_tensors, data, test_type=easydist.is_tensor_information)
    assert (type(got[0]), got[1].shape, got[1].dtype) == (Batch, (2,), torch.int8)


def test_recursively_apply_names_what_it_refuses():
    def double(t):
        return t * 2

    text = "double: ['a'][1] is a str; pass only values that satisfy is_torch_tensor, and containers of them"
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        easydist.recursively_apply(double, {"a": [torch.ones(1), "s"]}, error_on_other_type=True)
    with pytest.raises(TypeError, match=r"^double: the value is an int; pass only"):
        easydist.recursively_apply(double, 1, error_on_other_type=True)


def test_listify_makes_lists_of_tensors_and_arrays():
    data = {
        "t": torch.tensor([[1, 2]], dtype=torch.uint16),
        "b": torch.ones(1).bfloat16(),
        "s": "x",
        "n": np.float32(0.5),
    }
    assert easydist.listify(data | {"a": np.array(["q"]), "0": torch.tensor(True)}) == (
        {"t": [[1, 2]], "b": [1.0], "s": "x", "n": 0.5, "a": ["q"], "0": True}
    )
    assert easydist.listify(Point(torch.ones(1), (torch.zeros(0),))) == Point([1.0], ([],))


# --- find_*, is_*


@pytest.mark.parametrize(
    ("data", "size"),
    [
        ({"a": "str", "b": torch.zeros(4, 2)}, 4),
        ([None, 7, torch.tensor(1), torch.zeros(3), torch.zeros(5)], 3),
        ({"x": {"y": (np.zeros((2, 9)),)}}, 2),
        (Batch(torch.zeros(6, 1)), 6),
        (UserDict(a=torch.zeros(0, 3)), 0),
        ([], None),
        ({"a": "s", "b": [1, 2.0, torch.tensor(1)]}, None),
        (torch.zeros(2, 3), 2),
        (batch_encoding(), 2),
        (model_output(), 2),
        (tensordict(), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_find_batch_size_is_that_of_the_first_tensor_that_has_one(data, size):
    assert easydist.find_batch_size(data) == size


def test_find_device_is_that_of_the_first_tensor():
    assert (
        easydist.find_device({"a": "s", "b": [np.ones(1), torch.ones(1, device="meta"), torch.ones(1)]}).type == "meta"
    )
    assert easydist.find_device([1, "s", np.ones(1)]) is None


def test_find_device_takes_several_trees():
    meta = torch.ones(1, device="meta")
    assert easydist.find_device("text", [np.ones(1)], {"a": meta}, torch.ones(1)) == torch.device("meta")
    assert easydist.find_device() is None
    assert easydist.find_device(data=meta) == torch.device("meta")
    with pytest.raises(TypeError, match=r"^find_device: args= and data= are the same argument; pass one of them$"):
        easydist.find_device(meta, data=meta)


SECOND_NAMES = {
    "is_torch_tensor": ("tensor", torch.ones(1)),
    "is_tensor_information": ("tensor_info", TensorInformation(torch.Size([]), torch.int8)),
}


@pytest.mark.parametrize("name", SECOND_NAMES)
def test_the_argument_has_the_name_of_the_published_page_as_well(name):
    function, (first, value) = getattr(easydist, name), SECOND_NAMES[name]
    assert function(value) is function(data=value) is function(**{first: value}) is True
    assert function(None) is function(data=None) is False
    with pytest.raises(TypeError, match=f"^{name}: {first}= and data= are the same argument; pass one of them$"):
        function(value, data=value)
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{first}'"):
        function()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        function(date=value)
    assert str(inspect.signature(function)) == f"({first}: 'object') -> 'bool'"


def test_is_functions():
    info = easydist.get_data_structure(torch.ones(1))
    assert (easydist.is_torch_tensor(torch.ones(1)), easydist.is_torch_tensor(np.ones(1))) == (True, False)
    assert (easydist.is_tensor_information(info), easydist.is_tensor_information(torch.ones(1))) == (True, False)


# --- get_data_structure, initialize_tensors


@pytest.mark.parametrize("name", TENSORS)
def test_the_structure_of_a_tensor_is_shape_dtype_and_device(name):
    value = TENSORS[name]()
    assert easydist.get_data_structure(value) == TensorInformation(value.shape, value.dtype, "cpu", False)


@pytest.mark.parametrize("name", ARRAYS)
def test_initialize_tensors_makes_arrays_like_the_arrays_described(name):
    value = ARRAYS[name]()
    made = easydist.initialize_tensors(easydist.get_data_structure({"x": value}))["x"]
    assert type(made) is np.ndarray
    assert (made.shape, made.dtype) == (value.shape, value.dtype.newbyteorder("="))


@PROPERTY
@given(tensors())
def test_initialize_tensors_is_the_inverse_of_get_data_structure_but_for_values(value):
    info = easydist.get_data_structure([value, {"a": "text"}])
    for hollow in (False, True):
        made = easydist.initialize_tensors(info, hollow=hollow)
        assert (made[0].shape, made[0].dtype, made[1]) == (value.shape, value.dtype, {"a": "text"})


def test_structure_keeps_ties():
    info = easydist.get_data_structure(tied())
    assert info["encoder"] is info["decoder"][0]
    made = easydist.initialize_tensors(info, tied=True)
    assert made["encoder"] is made["decoder"][0]
    assert made["other"] is not made["encoder"]


@pytest.mark.parametrize("hollow", [False, True])
def test_each_place_gets_a_tensor_of_its_own(hollow):
    info = easydist.get_data_structure(torch.ones(3))
    first, second = easydist.initialize_tensors([info, info], hollow=hollow)
    assert first is not second
    assert first.data_ptr() != second.data_ptr()


def test_structure_leaves_everything_else_as_it_is():
    data = {"n": 1, "s": None, "o": THING, "strings": np.array(["a"])}
    assert_same(easydist.get_data_structure(data), data, identity=True)


@pytest.mark.parametrize("make", [batch_encoding, model_output], ids=lambda make: make.__name__)
def test_structure_of_other_libraries_containers(make):
    made = easydist.initialize_tensors(easydist.get_data_structure(make()))
    assert type(made) is type(make())
    assert easydist.find_batch_size(made) == 2


# --- slice_tensors, concatenate, pad_input_tensors, unpad


@PROPERTY
@given(tensors(max_dims=2), st.slices(4))
def test_slice_tensors_slices_every_tensor_and_array(value, cut):
    if value.ndim and (cut.step is None or cut.step > 0):
        array = np.arange(5)
        got = easydist.slice_tensors({"a": value, "b": (array, 1, "s")}, cut)
        assert_same(got, {"a": value[cut], "b": (array[cut], 1, "s")})


@PROPERTY
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_concatenate_is_torch_cat_leaf_by_leaf(lengths):
    items = [
        {"x": torch.full((n, 2), float(i)), "p": Point([np.full(n, i)], "s"), "b": torch.ones(n).bool()}
        for i, n in enumerate(lengths)
    ]
    want = {
        "x": torch.cat([item["x"] for item in items]),
        "p": Point([np.concatenate([item["p"].x[0] for item in items])], "s"),
        "b": torch.ones(sum(lengths)).bool(),
    }
    assert_same(easydist.concatenate(items), want)


def test_concatenate_along_another_dim():
    assert easydist.concatenate([[torch.ones(2, 1)], [torch.ones(2, 3)]], dim=1)[0].shape == (2, 4)
    assert easydist.concatenate((torch.ones(1), torch.ones(2))).shape == (3,)


def test_concatenate_matches_by_key_not_by_order():
    one, other = {"a": torch.tensor([1]), "b": torch.tensor([2])}, {"b": torch.tensor([20]), "a": torch.tensor([10])}
    assert_same(easydist.concatenate([one, other]), {"a": torch.tensor([1, 10]), "b": torch.tensor([2, 20])})


DIFFERING = {
    "another key later": (
        [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}],
        "item 1 and item 0 differ in ['b']",
    ),
    "a key missing later": ([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 2}], "item 2 and item 0 differ in ['a']"),
    "another length": ([[torch.ones(1)], [torch.ones(1), torch.ones(1)]], "item 1 and item 0 differ in [1]"),
    "a leaf, a dict": ([torch.ones(1), {"a": torch.ones(1)}], "item 1 and item 0 differ in the root, ['a']"),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_concatenate_of_items_with_different_leaves_is_an_error_with_the_paths(name):
    items, text = DIFFERING[name]
    with pytest.raises(ValueError, match="^" + re.escape(f"concatenate: {text}") + "$"):
        easydist.concatenate(items)


@pytest.mark.parametrize("other", [np.array([1, 2]), None])
def test_concatenate_would_lose_a_mask(other):
    masked = np.ma.array([1, 2], mask=[False, True])
    with pytest.raises(
        TypeError, match=r"^leaf \['a'\] is a masked array, whose mask would be lost; send .data and .mask$"
    ):
        easydist.concatenate([{"a": masked if other is None else other}, {"a": masked}])


def test_concatenate_keeps_what_is_one_object_in_all_items():
    nan = float("nan")  # not equal to itself
    assert easydist.concatenate([[nan], [nan]])[0] is nan


def test_concatenate_of_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"^concatenate needs at least one item$"):
        easydist.concatenate([])


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([{"s": "a"}, {"s": "b"}], "['s']: can only concatenate tensors and arrays, got str that differ"),
        ([1, 2], "the items: can only concatenate tensors and arrays, got int that differ"),
        (
            [[torch.ones(1)], [np.ones(1)]],
            "[0]: can only concatenate tensors and arrays, got Tensor, ndarray that differ",
        ),
    ],
    ids=["strings", "numbers", "tensor and array"],
)
def test_concatenate_of_what_cannot_be_is_an_error_with_its_path(items, text):
    with pytest.raises(TypeError, match="^" + re.escape(f"concatenate: {text}") + "$"):
        easydist.concatenate(items)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, easydist.ShapeError])
@pytest.mark.parametrize("other", [torch.ones(1), torch.ones(1, 3)], ids=["dims", "sizes"])
def test_concatenate_of_shapes_that_do_not_fit_names_the_path(other, kind):
    text = f"concatenate: ['x']: shapes (1, 2), {tuple(other.shape)} do not fit along dim 0"
    with pytest.raises(kind, match="^" + re.escape(text) + "$"):
        easydist.concatenate([{"x": torch.ones(1, 2)}, {"x": other}])


SINGLE = {
    "tensor": (torch.ones(2), "Tensor of shape (2,)"),
    "array": (np.ones((1, 3)), "ndarray of shape (1, 3)"),
    "dict": ({"a": torch.ones(1)}, "dict"),
    "text": ("ab", "str"),
    "number": (1.0, "float"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_concatenate_takes_a_list_of_trees(name):
    data, what = SINGLE[name]
    text = f"concatenate: takes a list of trees, got a single {what}; pass [first, second, …]"
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        easydist.concatenate(data)


def test_concatenate_takes_what_can_be_iterated_over():
    assert easydist.concatenate(torch.ones(1) for _ in range(3)).shape == (3,)


def test_concatenate_never_loses_a_leaf_to_keys_that_print_alike():
    class Key:
        def __repr__(self):
            return "key"

    one, two = Key(), Key()
    item = {one: torch.zeros(1), two: torch.ones(1)}
    assert_same(easydist.concatenate([item, item]), {one: torch.zeros(2), two: torch.ones(2)})


@PROPERTY
@given(st.integers(0, 7), st.integers(1, 4), st.sampled_from([torch.bool, torch.int16, torch.bfloat16]))
def test_pad_input_tensors_appends_zeros_until_the_shares_are_equal(size, parts, dtype):
    value = torch.ones(size, 2).to(dtype)
    got = easydist.pad_input_tensors([value], size, parts)[0]
    assert len(got) == -(-size // parts) * parts
    assert_same(got, torch.cat([value, torch.zeros(len(got) - size, 2, dtype=dtype)]))


def test_pad_input_tensors_along_another_dim():
    assert easydist.pad_input_tensors(torch.ones(2, 3), 3, 2, dim=1).tolist() == [[1, 1, 1, 0]] * 2


@PROPERTY
@given(st.integers(0, 4), st.integers(0, 3), st.booleans(), st.sampled_from([0, 1, -1, -2]))
def test_unpad_takes_off_what_padding_put_on(size, extra, pad_first, dim):
    value = torch.arange(2.0 * size).view((2, size) if dim in (1, -1) else (size, 2))
    filling = torch.full((2, extra) if dim in (1, -1) else (extra, 2), -1.0)
    padded = torch.cat([filling, value] if pad_first else [value, filling], dim=dim)
    for like in (value, easydist.get_data_structure(value), size):
        assert_same(easydist.unpad(padded, like, dim, pad_first), value)


def test_unpad_returns_what_padding_leaves_unchanged():
    data = {"loss": torch.tensor(1.0), "rows": torch.ones(2, 3), "n": 3}
    padded = data | {"rows": torch.ones(2, 5)}
    for like in (data, easydist.get_data_structure(data)):
        assert_same(easydist.unpad(padded, like, dim=1), data)


UNPAD_ERRORS = {
    "other leaves": (({"a": torch.ones(2)}, {"b": torch.ones(1)}), "unpad: the trees differ in ['a'], ['b']"),
    "too long": (([torch.ones(2)], 3), "unpad: [0] of shape (2,) has no 3 elements along dim 0"),
    "no such dim": ((torch.ones(2), 1, 1), "unpad: the tensor of shape (2,) has no 1 elements along dim 1"),
    "like has no such dim": ((torch.ones(2, 2), torch.ones(2), 1), "unpad: the tensor of like has no dim 1"),
    "only like has such a dim": (
        (torch.ones(2), torch.ones(2, 2), 1),
        "unpad: the tensor of shape (2,) has no 2 elements",
    ),
}


@pytest.mark.parametrize("name", UNPAD_ERRORS)
def test_unpad_errors_name_the_leaf(name):
    arguments, text = UNPAD_ERRORS[name]
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        easydist.unpad(*arguments)
