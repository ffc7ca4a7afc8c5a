"""Laws of the codec."""

import pickle
import struct
import weakref

import launching
import numpy as np
import pytest
import torch
import trees
from hypothesis import given, settings, strategies as st
from pickles import PLAIN, VALID, message, round_trip
from trees import CASES, Batch, Box, Items, Point, assert_same, tensors

from easydist import UnsafeObjectError, WireError
from easydist.format import codec

PROPERTY = settings(max_examples=launching.examples(60), deadline=None)

UNPICKLABLE = {"object", "statics", "namedtuple with its own __new__", "mapping proxy", "BatchEncoding"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNPICKLABLE])
def test_decode_is_the_inverse_of_encode(name):
    assert_same(round_trip(CASES[name]()), CASES[name]())


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_needs_no_permission(name, weights_only):
    assert_same(round_trip(PLAIN[name](), weights_only), PLAIN[name]())


@pytest.mark.slow
@PROPERTY
@given(trees.nested(tensors() | trees.arrays() | trees.numbers() | st.text(max_size=3)))
def test_any_tree_round_trips(data):
    assert_same(round_trip(data), data)
    with torch.serialization.safe_globals(
        [Point, Batch, Items, trees.Pair, trees.FrozenMapping, Box, trees.FrozenSlotted]
    ):
        assert_same(round_trip(data, weights_only=True), data)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("odd", ["a\0b", "", "\0", "\ud800", "ü", "x" * 20_000])
def test_long_lists_of_different_strings_arrive_whatever_is_in_them(odd, weights_only):
    for at in (0, 7, 40):
        strings = [f"sample {i}" for i in range(41)]
        strings[at] = odd
        assert round_trip(strings, weights_only) == strings


@pytest.mark.parametrize("weights_only", [False, True])
def test_one_object_stays_one_object_and_views_part(weights_only):
    base, array = torch.arange(4000), np.arange(4000)
    data = [base, base, base[:3000], array, array, {"deep": base}]
    same, again, view, *_, arrays, deep = *(got := round_trip(data, weights_only))[:3], got[3], got[5]
    assert same is again is deep["deep"]
    assert got[3] is got[4] is arrays
    view.zero_()
    assert same.tolist() == list(range(4000))


@pytest.mark.parametrize("weights_only", [False, True])
def test_parameters_flags_and_attributes_arrive_and_the_graph_does_not(weights_only):
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    weight = torch.nn.Parameter(torch.ones(2000))
    weight.sum().backward()
    weight.tag = {"layer": 1}
    got = round_trip([frozen, weight, weight * 2, weight.detach()], weights_only)
    assert [type(t).__name__ for t in got] == ["Parameter", "Parameter", "Tensor", "Tensor"]
    assert [t.requires_grad for t in got] == [False, True, True, False]
    assert all(t.is_leaf and t.grad is None for t in got)
    assert got[1].tag == {"layer": 1}


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_list_that_holds_itself(weights_only):
    data = [1]
    data += [data, (data, {"again": data})]
    got = round_trip(data, weights_only)
    assert got[1] is got[2][0] is got[2][1]["again"] is got


@pytest.mark.parametrize("weights_only", [False, True])
def test_large_data_shares_the_message_aligned_and_writable(weights_only):
    message = codec.encode([torch.ones(5001, dtype=torch.uint8), np.ones(5001, np.int8), torch.ones(5001)])
    assert message.numel() < 3 * 5001 * 2 + 1000
    start, stop = message.data_ptr(), message.data_ptr() + message.numel()
    first, array, last = codec.decode(message, weights_only=weights_only)
    for place in (first.data_ptr(), array.ctypes.data, last.data_ptr()):
        assert start < place < stop
        assert (place - start) % 64 == 0
    first.zero_()
    array[:] = 0
    assert last.sum() == 5001
    assert last.untyped_storage().nbytes() == last.nbytes  # torch.save writes no more than that


def test_small_data_does_not_keep_the_message():
    message = codec.encode([torch.ones(3), torch.ones(5000)])
    small, _ = codec.decode(message)
    message.zero_()
    assert small.tolist() == [1, 1, 1]


def test_a_read_only_array_stays_read_only():
    for size in (3, 5000):
        array = np.arange(size)
        array.flags.writeable = False
        assert not round_trip(array, weights_only=True).flags.writeable


class Blob:
    """Writes its bytes out of band."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Blob, (pickle.PickleBuffer(self.data),)


@pytest.mark.parametrize("size", [10, 10_000])
def test_buffers_of_other_classes_travel_out_of_band(size):
    assert bytes(round_trip(Blob(bytearray(b"x" * size))).data) == b"x" * size
    assert bytes(round_trip(Blob(b"x" * size)).data) == b"x" * size
    with torch.serialization.safe_globals([Blob]):
        assert bytes(round_trip(Blob(b"x" * size), weights_only=True).data) == b"x" * size


def test_what_torch_pickles_its_own_way_needs_trust():
    sparse = torch.eye(3).to_sparse()
    assert round_trip(sparse).to_dense().equal(torch.eye(3))
    with pytest.raises(UnsafeObjectError, match="torch"):
        round_trip(sparse, weights_only=True)


def test_a_sparse_tensor_lives_no_longer_than_its_user():
    seen = weakref.ref(round_trip(torch.eye(3).to_sparse()))
    assert seen() is None  # torch's list of what torch.load has to check would keep it


@pytest.mark.slow
def test_depth_alone_is_no_fault():
    depth, got = 0, codec.decode(message(b"\x80\x05" + b"]" * 100_000 + b"a" * 99_999 + b"."), weights_only=True)
    while got:
        got, depth = got[0], depth + 1
    assert depth == 99_999


def test_a_list_of_strings_travels_as_one_text():
    values = [f"prediction {i}" for i in range(10_000)]
    assert len(codec.encode(values)) < sum(map(len, values)) + len(values) + 300
    assert len(codec.encode({"values": values})) > sum(map(len, values)) + 2 * len(values)


@pytest.mark.parametrize(
    "values", [["x" * 100_000] * 2000, ["no", "yes"] * 5000, ["y" * 300 + str(i) for i in range(99)]]
)
def test_strings_that_occur_again_or_are_long_stay_with_pickle(values):
    encoded = codec.encode(values)
    assert len(encoded) < 2 * len(pickle.dumps(values, 5))
    assert len(set(map(id, codec.decode(encoded)))) == len(set(values))


@pytest.mark.parametrize(
    "head", [(0, 0), (1, 2**63), (2**61, 1), (2**64 - 1, 2**64 - 1), (1, 1, 2**64 - 1), (3, 1, 0, 0), (0, 5)]
)
def test_a_header_that_lies_is_refused(head):
    data = struct.pack(f"<{len(head)}Q", *head) + b"N."
    for weights_only in (False, True):
        with pytest.raises(WireError, match="an object message of"):
            codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), weights_only=weights_only)
    with pytest.raises(WireError, match="an object message of 0 bytes is truncated"):
        codec.decode(torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("value", [["a", "b"], [torch.arange(5000)]], ids=["text", "buffers"])
def test_a_message_may_be_padded(value):
    message = codec.EncodedObject(value)
    padded = message.joined(message.nbytes + 100)
    assert padded.tolist() == message.joined().tolist() + [0] * 100
    with pytest.raises(WireError, match=r"declares \d+ bytes"):
        codec.decode(padded)
    assert_same(codec.decode(padded, is_padded=True), value)
    with pytest.raises(WireError, match=r"declares \d+ buffers and|declares \d+ bytes"):
        codec.decode(padded[: message.nbytes - 1], is_padded=True)


@settings(max_examples=launching.examples(100), deadline=None)
@given(st.sampled_from(VALID), st.integers(0, 2**16), st.binary(max_size=4))
def test_truncated_and_extended_messages_are_refused(valid, at, more):
    cut = valid[: at % len(valid)]
    with pytest.raises(WireError):
        codec.decode(torch.frombuffer(bytearray(cut or b"\0"), dtype=torch.uint8), weights_only=True)
    if more:
        with pytest.raises(WireError):
            codec.decode(torch.frombuffer(bytearray(valid + more), dtype=torch.uint8), weights_only=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_device_arrive_on_the_current_one():
    got = round_trip([torch.arange(3000, device="cuda"), torch.ones(2, device="cuda")], weights_only=True)
    assert [t.device for t in got] == [torch.device("cuda", torch.cuda.current_device())] * 2
    assert got[0].tolist() == list(range(3000))


def test_messages_do_not_depend_on_those_before_them():
    """Small values are pickled by one pickler, in turns."""
    values = [{"a": "text"}, ["text", np.arange(3000)], {"a": "text", "b": "b" * 5000}, ("text",), [1] * 3000, {"a": 1}]
    alone = [bytes(codec.encode(value).numpy()) for value in values]
    kept = [codec.EncodedObject(value) for value in values]
    with pytest.raises(TypeError, match="cannot be pickled"):
        codec.encode([{"a": "text"}, lambda: None])
    assert [b"".join(message.parts()) for message in kept] == alone
    assert [bytes(codec.encode(value).numpy()) for value in reversed(values)] == alone[::-1]
    assert len(codec._idle) >= 1


def test_a_value_whose_pickling_encodes_another_one():
    assert codec.decode(codec.encode(["before", Encoding(), "after"])) == ["before", "inner", "after"]


class Encoding:
    def __reduce__(self):
        return codec.decode, (codec.encode("inner"),)
