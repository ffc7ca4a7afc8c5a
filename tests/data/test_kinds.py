"""The kind of tensors is what looking at them says, also where tensors of another kind were seen before."""

import itertools
import warnings

import pytest
import torch
from leaf_kinds import KINDS

from easydist.data.kinds import kind_of
from easydist.data.leaves import Leaves

PLAIN = torch.arange(24.0).view(6, 4)
OTHERS = {
    "shape": PLAIN.view(4, 6),
    "a dimension less": PLAIN.view(24),
    "dtype": PLAIN.double(),
    "strides": PLAIN.view(4, 6).t(),
    "a later start": torch.arange(28.0)[4:].view(6, 4),
    "requires grad": PLAIN.clone().requires_grad_(),
    "parameter": torch.nn.Parameter(PLAIN.clone()),
    "a number": 1.5,
    "an array": PLAIN.numpy(),
}
numbers = itertools.count()


def kinds(*others):
    """Return what is found for each list of tensors, at paths where plain ones were seen often enough to be known."""
    name = next(numbers)
    paths = (f"{name}.x", f"{name}.y")
    for _ in range(3):
        assert kind_of([PLAIN, PLAIN.clone()], paths) == ((torch.float32,) * 2, (PLAIN.shape,) * 2, True, True)
    return [kind_of(tensors, paths) for tensors in others]


def unknown(tensors):
    """Return the kind of tensors at paths where nothing was seen."""
    name = next(numbers)
    return kind_of(tensors, tuple(f"{name}.{i}" for i in range(len(tensors))))


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_of_any_property_is_noticed(name):
    tensors = [PLAIN, OTHERS[name]]
    (found,) = kinds(tensors)
    assert found == unknown(tensors)
    assert found == kinds(tensors, tensors, tensors, tensors)[-1]


@pytest.mark.parametrize("name", [name for name in KINDS if name != "sharded"])  # a DTensor needs a group
def test_every_kind_of_leaf_is_found_among_known_ones(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [PLAIN.clone(), KINDS[name](PLAIN.clone())[0]]
    assert kinds(tensors) == [unknown(tensors)]


def test_a_nested_tensor_that_left_vmap_is_found():
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first of a process warns that they are in prototype stage
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    torch.vmap(lambda x: seen.append(x) or x)(nested)
    assert kinds([PLAIN, seen[0]], [PLAIN, nested]) == [None, None]


def test_plain_tensors_are_known_again_after_others():
    plain, other = [PLAIN, PLAIN.clone()], [PLAIN, PLAIN.t()]
    first, second, third = kinds(other, plain, other)
    assert (first, second) == (third, unknown(plain))
    assert not first.is_contiguous


def test_a_known_tensor_whose_memory_was_freed_is_refused():
    leaf = torch.ones(6, 4)
    for _ in range(3):
        Leaves({"freed": leaf})
    leaf.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="has lost its memory"):
        Leaves({"freed": leaf})


def test_modes_do_not_change_what_is_found():
    tensors = [PLAIN, PLAIN.clone()]
    with torch.inference_mode():
        inside = kinds(tensors)
    with torch.autocast("cpu"):
        assert kinds(tensors) == inside == [unknown(tensors)]
