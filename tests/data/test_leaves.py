"""Laws of leaves as tensors."""

import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from launching import examples
from trees import ARRAYS, LEAVES, SCALARS, TENSORS, Batch, assert_same, bits, read_only, tied, trees

from easydist import tree
from easydist.data.leaves import Leaves, as_array, as_tensor, as_value
from easydist.data.packing import Packed, as_bytes, sort_key

PROPERTY = settings(max_examples=examples(60), deadline=None)


def element_values(value):
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("name", LEAVES)
def test_as_tensor_keeps_values_shape_and_dtype(name):
    value = LEAVES[name]()
    tensor = as_tensor(value)
    assert tensor.layout is torch.strided
    assert not tensor.requires_grad
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    if isinstance(value, torch.Tensor):
        assert_same(tensor, value.detach().as_subclass(torch.Tensor))
    elif isinstance(value, np.ndarray | np.generic):
        assert_same(tensor.numpy(), np.asarray(value).astype(np.asarray(value).dtype.newbyteorder("=")))
    else:
        assert_same(tensor.item(), value)


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_takes_the_same_tensors_with_or_without_a_look_at_each(name):
    value = LEAVES[name]()
    (tensor,) = Leaves([value]).tensors
    assert not any([tensor.requires_grad, tensor.is_conj(), tensor.is_neg()])
    assert_same(tensor, as_tensor(value))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, torch.bool),
        (1, torch.int64),
        (1.0, torch.float64),
        (1j, torch.complex128),
        (np.float32(1), torch.float32),
    ],
)
def test_numbers_have_fixed_dtypes(value, dtype):
    assert as_tensor(value).dtype is dtype
    assert as_tensor(value).shape == ()


@pytest.mark.parametrize("name", ["0-dim", "empty inside", "transposed", "expanded", "requires grad", "bfloat16"])
def test_a_dense_tensor_shares_its_memory(name):
    value = TENSORS[name]()
    assert as_tensor(value).data_ptr() == value.data_ptr()
    assert as_tensor(value).stride() == value.stride()


def test_a_writable_array_shares_its_memory_and_a_read_only_one_does_not():
    array = np.zeros(2)
    as_tensor(array)[0] = 1
    assert array.tolist() == [1, 0]
    frozen = read_only()
    as_tensor(frozen)[0] = 7
    assert frozen.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", [*ARRAYS, *SCALARS])
def test_as_value_gives_back_what_as_tensor_took(name):
    value = (ARRAYS | SCALARS)[name]()
    back = as_value(as_tensor(value), value)
    native = value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value
    assert_same(back, native)


def test_as_value_of_a_tensor_is_the_tensor():
    tensor = torch.ones(2)
    assert as_value(tensor, torch.zeros(1)) is tensor


def test_as_array_makes_arrays_only_of_what_was_numpy():
    tensor = torch.ones(2)
    assert as_array(tensor, 1.0) is tensor
    assert as_array(tensor, tensor) is tensor
    assert type(as_array(tensor, np.zeros(1))) is np.ndarray
    assert type(as_array(tensor, np.float32(1))) is np.ndarray


NOT_DENSE = {
    "sparse": (
        lambda: torch.eye(2).to_sparse(),
        "is not a dense tensor (torch.sparse_coo on cpu); pass its dense parts",
    ),
    "meta": (
        lambda: torch.ones(2, device="meta"),
        "is a meta tensor, which has no data; pass a tensor with data",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "is not a dense tensor (nested); pass its dense parts",
    ),
    "strings": (
        lambda: np.array(["a", "b"]),
        "is a NumPy array of <U1, which no tensor can hold; use gather_object or broadcast_object_list",
    ),
    "objects": (
        lambda: np.array([None]),
        "is a NumPy array of object, which no tensor can hold; use gather_object or broadcast_object_list",
    ),
    "dates": (
        lambda: np.zeros(2, "M8[s]"),
        "is a NumPy array of datetime64[s], which no tensor can hold; use gather_object or broadcast_object_list",
    ),
    "records without fields": (
        lambda: np.zeros(2, []),
        "is a NumPy array of [], which no tensor can hold; use gather_object or broadcast_object_list",
    ),
    "time spans": (
        lambda: np.timedelta64(1, "s"),
        "is a NumPy array of timedelta64[s], which no tensor can hold; use gather_object or broadcast_object_list",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "jagged")) for n in NOT_DENSE])
def test_what_no_tensor_can_hold_is_a_type_error_with_its_path(name):
    make, text = NOT_DENSE[name]
    with pytest.raises(TypeError, match="^" + re.escape(f"leaf ['x'][0] {text}") + "$"):
        Leaves({"x": [make()]})
    with pytest.raises(TypeError, match="^" + re.escape(f"the value {text}") + "$"):
        as_tensor(make())


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**200])
def test_an_int_of_more_than_64_bits_is_a_value_error_with_its_path(value):
    text = "leaf ['n'] is an int that does not fit 64 bits; use gather_object for such numbers"
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        Leaves({"n": value})


def test_an_int_too_long_to_print_is_the_same_error():
    with pytest.raises(ValueError, match=r"^leaf \['n'\] is an int that does not fit 64 bits; use gather_object"):
        Leaves({"n": 10 ** (2 * sys.get_int_max_str_digits())})


@PROPERTY
@given(trees())
def test_leaves_are_sorted_by_item_size_dtype_and_path(data):
    leaves = Leaves(data)
    keys = [(sort_key(t.dtype), path) for t, path in zip(leaves.tensors, leaves.layout.paths, strict=True)]
    assert keys == sorted(keys)
    assert sorted(leaves.layout.paths) == sorted(tree.flatten(data)[1].paths)


@PROPERTY
@given(st.dictionaries(st.text(max_size=3), trees(), max_size=4), st.randoms(use_true_random=False))
def test_the_order_in_which_dicts_were_filled_does_not_matter(data, random):
    items = list(data.items())
    random.shuffle(items)
    one, other = Leaves(data), Leaves(dict(items))
    assert one.layout.paths == other.layout.paths
    assert [bits(t) for t in one.tensors] == [bits(t) for t in other.tensors]


@PROPERTY
@given(trees(), st.booleans())
def test_rebuild_with_the_own_values_is_the_identity(data, tied):
    leaves = Leaves(data)
    results = {i: leaves.values[i] for i in leaves.travelling(tied)}
    assert_same(leaves.rebuild(results, tied, lambda result, _: result), data, identity=True)


def test_rebuild_keeps_the_local_order_of_keys():
    leaves = Leaves({"b": 1, "a": torch.ones(1, dtype=torch.int8), "c": 2.0})
    results = {i: leaves.layout.paths[i] for i in leaves.travelling(False)}
    rebuilt = leaves.rebuild(results, False, lambda result, _: result)
    assert list(rebuilt.items()) == [("b", "['b']"), ("a", "['a']"), ("c", "['c']")]


def test_one_tensor_in_two_places_travels_once_and_arrives_as_one():
    leaves = Leaves(tied())
    assert [leaves.layout.paths[i] for i in leaves.travelling(True)] == ["['decoder'][0]", "['other']"]
    assert len(leaves.travelling(False)) == 3
    got = leaves.rebuild({i: torch.zeros(1) for i in leaves.travelling(True)}, True, lambda result, _: result)
    assert got["encoder"] is got["decoder"][0]
    assert got["encoder"] is not got["other"]


def test_one_array_in_two_places_travels_once_and_one_number_does_not():
    array = np.zeros(2)
    leaves = Leaves({"a": array, "b": [array], "m": 1, "n": 1})
    assert [leaves.layout.paths[i] for i in leaves.travelling(True)] == ["['a']", "['m']", "['n']"]
    got = leaves.rebuild({i: leaves.tensors[i] for i in leaves.travelling(True)}, True, as_value)
    assert got["a"] is got["b"][0]


def test_write_fills_tensors_and_arrays_in_place_and_makes_new_numbers():
    data = {
        "strided": torch.zeros(4)[::2],
        "conj": torch.zeros(2, dtype=torch.complex64).conj(),
        "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
        "grad": torch.zeros(2, requires_grad=True),
        "array": np.zeros(2),
        "big-endian": np.zeros(2, ">i4"),
        "backwards": np.arange(2.0)[::-1],
        "scalar": np.float32(0),
        "number": 0,
        "flag": True,
        "name": "a",
    }
    kept = dict(data)
    leaves = Leaves(data)
    new = {
        i: torch.ones_like(leaves.tensors[i]) * (0 if leaves.layout.paths[i] == "['flag']" else 1) for i in range(10)
    }
    got = leaves.write({i: value.to(leaves.tensors[i].dtype) for i, value in new.items()}, False)
    in_place = ["strided", "conj", "neg", "grad", "array", "big-endian", "backwards", "name"]
    assert all(got[key] is kept[key] for key in in_place)
    assert [kept[key].tolist() for key in in_place[:-1]] == [[1, 1]] * 7
    assert_same(
        {k: got[k] for k in ("scalar", "number", "flag")}, {"scalar": np.float32(1), "number": 1, "flag": False}
    )


def test_write_copies_nothing_onto_itself():
    data = {"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(2))}
    leaves = Leaves(data)
    before = [value._version for value in data.values()]
    leaves.write(dict(enumerate(leaves.tensors)), False)
    assert [value._version for value in data.values()] == before


def write_packed(leaves, values):
    row = torch.zeros(16, dtype=torch.uint8)
    row[: values.nbytes] = as_bytes(values)
    leaves.write_packed(Packed(row.view(1, 16), leaves.layout.packing), 0)


@pytest.mark.parametrize("packed", [False, True], ids=["tensors", "packed"])
def test_an_empty_leaf_is_not_changed_by_a_write(packed):
    base = torch.ones(3)
    leaves = Leaves({"empty": base[2:2], "other": torch.zeros(1)})
    before, new = base._version, torch.ones(1)
    write_packed(leaves, new) if packed else leaves.write({0: new[:0], 1: new}, False)
    assert (base._version, leaves.tensors[1].tolist()) == (before, [1])


@pytest.mark.parametrize("detach", [False, True], ids=["weight", "detached"])
@pytest.mark.parametrize("packed", [False, True], ids=["tensors", "packed"])
def test_a_write_is_seen_by_autograd(packed, detach):
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    leaves = Leaves(weight.detach() if detach else weight)
    write_packed(leaves, torch.zeros(2)) if packed else leaves.write({0: torch.zeros(2)}, False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


READ_ONLY = {
    "array": (read_only, "is a read-only array (pass a copy)"),
    "expanded": (TENSORS["expanded"], "is an expanded tensor whose elements share memory (pass .contiguous())"),
    "inference": (lambda: torch.inference_mode()(torch.ones)(2), "is an inference tensor (pass a clone)"),
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_what_cannot_be_written_is_a_value_error_with_its_path(name):
    make, reason = READ_ONLY[name]
    with pytest.raises(
        ValueError, match="^" + re.escape(f"leaf .ids {reason}, so it cannot be written in place") + "$"
    ):
        Leaves(Batch(make())).check_writable()


@pytest.mark.parametrize("name", [n for n in LEAVES if n not in ("read-only array", "broadcast array", "expanded")])
def test_everything_else_can_be_written(name):
    Leaves({"x": LEAVES[name]()}).check_writable()


def test_an_inference_tensor_can_be_written_in_inference_mode():
    with torch.inference_mode():
        Leaves(torch.ones(2)).check_writable()


def test_an_expanded_dimension_of_size_one_can_be_written():
    Leaves(torch.ones(3).expand(1, 3)).check_writable()
    Leaves(torch.ones(3, 2).t().expand(4, 2, 3)[:1]).check_writable()  # neither contiguous nor overlapping


def test_fingerprints_tell_paths_dtypes_and_shapes_apart():
    one, other = torch.ones(2, 3), torch.ones(3, 2)
    trees = [
        [one],
        [one, one.double()],
        {"a": one},
        {"a": one, "b": one},
        {"a": one, "b": other},
        {"a": other, "b": one},
    ]
    assert len({Leaves(data).layout.fingerprint for data in trees}) == len(trees)
    assert Leaves({"a": one, "b": other}).layout.fingerprint == Leaves({"b": other, "a": one}).layout.fingerprint


def test_a_free_dimension_is_left_out_of_the_fingerprint():
    def free(dim, *shapes):
        return Leaves([torch.ones(shape) for shape in shapes]).layout.free(dim)[1]

    assert free(0, (2, 3), (4,)) == free(0, (5, 3), (2,)) != free(0, (2, 4), (4,))
    assert free(-1, (2, 3), (2, 5)) == free(-1, (2, 1), (2, 9)) != free(0, (2, 3), (2, 5))
