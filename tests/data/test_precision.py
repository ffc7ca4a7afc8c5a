"""Laws of conversion to float32."""

import functools
import pickle

import launching
import pytest
import torch
from hypothesis import given, settings
from trees import CONTAINERS, DTYPES, OUTSIDERS, Batch, assert_same, nested, tensors

from easydist import convert_outputs_to_fp32, convert_to_fp32

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_half_precision_changes(dtype):
    value = torch.tensor([0, 1]).to(dtype)
    got = convert_to_fp32(value)
    if dtype in HALF:
        assert_same(got, torch.tensor([0.0, 1.0]))
    else:
        assert got is value


@settings(max_examples=launching.examples(40), deadline=None)
@given(nested(tensors(dtypes=(torch.float16, torch.bfloat16), max_dims=1)))
def test_no_half_precision_is_left(data):
    seen = []
    got = convert_to_fp32(data)
    convert_to_fp32(got)  # a tree still
    _collect(got, seen)
    assert all(t.dtype is torch.float32 for t in seen)


def _collect(value, seen):
    if isinstance(value, torch.Tensor):
        seen.append(value)
    elif isinstance(value, list | tuple):
        for child in value:
            _collect(child, seen)
    elif hasattr(value, "values") and callable(value.values):
        for child in value.values():
            _collect(child, seen)


@pytest.mark.parametrize("name", [*CONTAINERS, *OUTSIDERS])
def test_a_tree_without_half_precision_stays_as_it_is(name):
    data = (CONTAINERS | OUTSIDERS)[name]()
    assert_same(convert_to_fp32(data), data, identity=True)


def test_values_survive_in_any_container():
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    got = convert_to_fp32({"a": [half, Batch((half, 1))], "b": half.int()})
    assert_same(got, {"a": [half.float(), Batch((half.float(), 1))], "b": half.int()})


def test_gradients_flow_through_the_conversion():
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    convert_to_fp32([half])[0].sum().backward()
    assert half.grad.tolist() == [1, 1]


def forward(x, *, scale=1):
    """Doubles."""
    return {"loss": x * 2 * scale, "n": 1}


def test_outputs_are_converted_and_arguments_passed_on():
    got = convert_outputs_to_fp32(forward)(torch.ones(1, dtype=torch.float16), scale=3)
    assert_same(got, {"loss": torch.tensor([6.0]), "n": 1})


def test_name_doc_and_wrapped_are_kept():
    wrapped = convert_outputs_to_fp32(forward)
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Doubles.")
    innermost = wrapped
    while hasattr(innermost, "__wrapped__"):
        innermost = innermost.__wrapped__
    assert innermost is forward


def test_it_decorates_methods():
    class Model:
        @convert_outputs_to_fp32
        def forward(self, x):
            return x

    assert Model().forward(torch.ones(1, dtype=torch.float16)).dtype is torch.float32


def test_a_wrapped_function_is_a_function_that_can_be_bound():
    class Model:
        pass

    model = Model()
    model.forward = convert_outputs_to_fp32(lambda x: x).__get__(torch.ones(1, dtype=torch.float16))
    assert model.forward().dtype is torch.float32


def test_it_can_be_wrapped_twice():
    twice = convert_outputs_to_fp32(convert_outputs_to_fp32(forward))
    assert twice(torch.ones(1, dtype=torch.float16))["loss"].dtype is torch.float32


class Callable_:  # noqa: N801
    """A callable object with attributes of its own."""

    def __init__(self):
        self._forward = "mine"

    def __call__(self):
        return torch.ones(1, dtype=torch.float16)


@pytest.mark.parametrize("make", [Callable_, lambda: functools.partial(forward, torch.ones(1, dtype=torch.float16))])
def test_any_callable_can_be_wrapped(make):
    got = convert_outputs_to_fp32(make())()
    assert (got["loss"] if isinstance(got, dict) else got).dtype is torch.float32


def test_pickling_is_refused_with_the_way_out():
    wrapped = convert_outputs_to_fp32(forward)
    with pytest.raises(pickle.PicklingError, match="convert_outputs_to_fp32 cannot be pickled: unwrap it first"):
        pickle.dumps(wrapped.__wrapped__)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(wrapped)


def test_what_cannot_be_called_is_converted_at_once():
    half = torch.tensor([1.5], dtype=torch.bfloat16)
    for got in (convert_outputs_to_fp32({"a": [half], "n": 1}), convert_outputs_to_fp32(data={"a": [half], "n": 1})):
        assert_same(got, {"a": [half.float()], "n": 1})
    assert_same(convert_outputs_to_fp32(half), half.float())
    assert_same(convert_outputs_to_fp32(data=lambda: half)(), half.float())
    with pytest.raises(TypeError, match="model_forward= and data= are the same argument; pass one of them"):
        convert_outputs_to_fp32(half, data=half)
