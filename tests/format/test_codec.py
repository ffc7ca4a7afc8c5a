"""Laws of the codec, and what restricted decoding refuses: hostile pickles, random bytes, mutated messages."""

import builtins
import codecs
import contextlib
import copyreg
import datetime
import decimal
import fractions
import functools
import importlib
import io
import operator
import os
import pathlib
import pickle
import random
import struct
import subprocess
import tracemalloc
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from types import NoneType

import launching
import numpy as np
import pytest
import torch
import trees
from hypothesis import given, settings, strategies as st
from trees import CASES, LEAVES, Batch, Box, Color, Items, Point, assert_same, tensors

import easydist
from easydist import UnsafeObjectError, WireError
from easydist.format import codec
from easydist.format.allowlist import CALLABLES
from easydist.format.parts import MAKERS

PROPERTY = settings(max_examples=launching.examples(60), deadline=None)
UNPICKLABLE = {"object", "statics", "namedtuple with its own __new__", "mapping proxy", "BatchEncoding"}
PLAIN = {
    **{name: make for name, make in CASES.items() if name in LEAVES},
    **{name: CASES[name] for name in ("None", "str", "bytes", "dtype", "device", "set", "nest of empties", "odd keys")},
    **{name: CASES[name] for name in ("return type", "size", "ordered dict", "default dict", "counter", "user dict")},
    **{name: CASES[name] for name in ("deque", "tied", "empty UserDict", "empty deque")},
    "frozenset": lambda: {frozenset({1, (2, "a")}), ()},
    "bytearray": lambda: [bytearray(b"abc"), bytearray(100_000)],
    "slices and ranges": lambda: [slice(1, None, 2), range(0, 9, 3), ..., NotImplemented],
    "dates": lambda: [
        datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")),
        datetime.date(1, 1, 1),
        datetime.time(23, 59),
        datetime.timedelta(days=-1, microseconds=5),
        datetime.timezone.utc,
    ],
    "numbers": lambda: [decimal.Decimal("-1.50"), fractions.Fraction(1, 3), 2**1000, -(2**1000), uuid.UUID(int=7)],
    "paths": lambda: [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/x"), pathlib.Path("c")],
    "factories": lambda: [defaultdict(f, {1: f()}) for f in (list, dict, set, int, float, str, Counter, OrderedDict)],
    "big text": lambda: ["ä" * 100_000, b"\0" * 100_000, "\ud800"],
    "many": lambda: [str(i) for i in range(1000)] + [tuple(range(300))],
    "lists of strings": lambda: ["a", "bc", "", "ä€\ud800😀"] * 10_000,
    "few strings": lambda: ["a"] * 31,
    "strings and one that looks so": lambda: ["a"] * 100 + [np.str_("b")],
    "strings with NUL": lambda: ["a\0b"] * 100,
    "records": lambda: np.array([(1, [2.5, 3], "ab")], dtype=[("a", "i1"), ("b", ">f4", (2,)), ("c", "U3")]),
    "times": lambda: np.array(["2024-01-01", "NaT"], "M8[ns]"),
    "strings": lambda: [np.array(["a", "bcd"]), np.array([b"a"]), np.str_("x"), np.empty(2, "U0")],
    "objects": lambda: [np.array([None, "a", [1]], object), np.empty((2, 0), object)],
    "scalars": lambda: [np.float64(1), np.datetime64("2024"), np.bool_(True), np.zeros(1, "i4,f8")[0]],
    "dtypes": lambda: [np.dtype("f4"), np.dtype(">i2"), np.dtype([("a", "u1")]), torch.bfloat16],
    "large": lambda: [torch.arange(5000.0), np.arange(5000), torch.ones(3000, dtype=torch.bfloat16)],
    "large and odd": lambda: [torch.arange(6000).view(2, 3000).t(), np.asfortranarray(np.ones((900, 9)))[::-1]],
}


def round_trip(value, weights_only=None):
    return codec.decode(codec.encode(value), weights_only=weights_only)


# --- laws


@pytest.mark.parametrize("name", CASES.keys() - UNPICKLABLE)
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


# --- permissions


def test_the_error_names_the_global_and_says_how_to_allow_it():
    with pytest.raises(UnsafeObjectError) as caught:
        round_trip({"c": Color.RED}, weights_only=True)
    assert str(caught.value) == (
        "the message asks for trees.Color, which is not allow-listed. If you trust its sender, allow the class with "
        "easydist.allow_globals([...]) on every rank, or decode with weights_only=False"
    )


@pytest.mark.parametrize(
    "name", ["namedtuple", "dataclass", "frozen dataclass with slots", "list subclass", "dict subclass", "enum", "deep"]
)
def test_registered_classes_are_decoded(name):
    allowed = [Point, Batch, trees.FrozenSlotted, Items, trees.Registry, Color]
    with torch.serialization.safe_globals(allowed):
        assert_same(round_trip(CASES[name](), weights_only=True), CASES[name]())
    with torch.serialization.safe_globals([(Point, "trees.Point"), Batch]):
        assert_same(round_trip(CASES["deep"](), weights_only=True), CASES["deep"]())


@pytest.fixture
def allowed(monkeypatch):
    """What a test allows, it allows for itself alone."""
    monkeypatch.setattr(easydist.format.allowlist, "_allowed", {})


@pytest.mark.usefixtures("allowed")
def test_allowed_classes_and_functions_are_decoded():
    easydist.allow_globals([Point, Color, (os.getpid, "somewhere.pid")])
    data = [Point(torch.ones(2), 1), Color.RED]
    assert_same(round_trip(data, weights_only=True), data)
    call = b"\x80\x05" + named("somewhere", "pid") + b")R."
    assert codec.decode(message(call), weights_only=True) == os.getpid()
    easydist.allow_globals(iter([torch.Generator]))
    assert "torch._C.Generator" in easydist.format.allowlist.registered()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("wrong", [3, "trees.Color", (Color, 3), (Color, "a", "b")])
def test_what_is_no_class_or_function_cannot_be_allowed(wrong):
    with pytest.raises(TypeError, match=r"allow_globals: .* is neither a class or function nor a pair of one and its"):
        easydist.allow_globals([Color, wrong])
    with pytest.raises(UnsafeObjectError):
        round_trip(Color.RED, weights_only=True)


@pytest.mark.slow
def test_what_torch_registers_with_itself_is_not_allowed_by_it():
    import torch.distributed.tensor  # registers DeviceMesh, which connects to other processes when it is made

    entries = torch.serialization.get_safe_globals()
    assert torch.distributed.device_mesh.DeviceMesh in entries
    for entry in entries:
        if isinstance(entry, type) and entry.__module__.startswith("torch.distributed"):
            asked = b"\x80\x05" + named(entry.__module__, entry.__qualname__)
            assert "easydist.allow_globals([...])" in refused(asked + b".")
            assert "not allow-listed" in refused(asked + b")R.")
    with torch.serialization.safe_globals([torch.Generator, (torch.Generator, "trees.Generator")]):
        assert "trees.Generator" in refused(b"\x80\x05" + named("trees", "Generator") + b")R.")


@pytest.fixture
def denied():
    easydist.allow_pickle(False)
    yield
    easydist.allow_pickle(True)


@pytest.mark.usefixtures("denied")
def test_the_switch_denies_pickle_everywhere():
    message = codec.encode(Color.RED)
    with pytest.raises(UnsafeObjectError, match=r"trees\.Color"):
        codec.decode(message)
    with pytest.raises(UnsafeObjectError, match=r"pickle is denied in this process .* pass weights_only=True"):
        codec.decode(message, weights_only=False)
    for call in (
        lambda: easydist.gather_object(1),
        lambda: easydist.broadcast_object_list([1]),
        lambda: easydist.scatter_object_list([None], [1]),
    ):
        with pytest.raises(UnsafeObjectError, match="pickle is denied"):
            call()
    assert easydist.gather_object({"a": 1}, weights_only=True) == [{"a": 1}]


@pytest.mark.slow
def test_the_environment_denies_pickle():
    code = "import easydist.format.codec; print(easydist.format.codec.is_pickle_allowed())"
    assert launching.python("-c", code, EASYDIST_PICKLE=0)[0] == "False\n"

    assert codec.is_pickle_allowed()


# --- hostile pickles


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


def message(skeleton, *buffers):
    """A message around any bytes."""
    head = struct.pack(f"<{2 + len(buffers)}Q", len(buffers), len(skeleton), *map(len, buffers))
    data = head + skeleton
    for buffer in buffers:
        data += bytes(-len(data) % 64) + buffer
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def named(module, name):
    """The bytes that push a global."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


def refused(skeleton, *buffers):
    with pytest.raises((UnsafeObjectError, WireError)) as caught:
        codec.decode(message(skeleton, *buffers), weights_only=True)
    return str(caught.value)


SENTINEL = "easydist_was_here"
CODE = f"import builtins; builtins.{SENTINEL} = True"
CALLS = {
    "os.system": lambda: Calls(os.system, f"touch {SENTINEL}"),
    "posix.remove": lambda: Calls(os.remove, "x"),
    "subprocess": lambda: Calls(subprocess.Popen, ["touch", SENTINEL]),
    "check_output": lambda: Calls(subprocess.check_output, ["touch", SENTINEL]),
    "eval": lambda: Calls(eval, "1"),
    "exec": lambda: Calls(exec, CODE),
    "compile": lambda: Calls(compile, CODE, "x", "exec"),
    "getattr": lambda: Calls(getattr, {}, "keys"),
    "setattr": lambda: Calls(setattr, {}, "x", 1),
    "import": lambda: Calls(__import__, "os"),
    "open": lambda: Calls(open, SENTINEL, "w"),
    "print": lambda: Calls(print, "x"),
    "input": lambda: Calls(input),
    "import_module": lambda: Calls(importlib.import_module, "os"),
    "attrgetter": lambda: Calls(operator.attrgetter("system"), os.path),
    "attrgetter alone": lambda: operator.attrgetter("__class__"),
    "methodcaller": lambda: operator.methodcaller("clear"),
    "itemgetter": lambda: operator.itemgetter(0),
    "partial": lambda: functools.partial(exec, CODE),
    "call of a partial": lambda: Calls(functools.partial(exec, CODE)),
    "reduce": lambda: Calls(functools.reduce, operator.add, [1]),
    "map": lambda: Calls(map, eval, ["1"]),
    "codecs.encode": lambda: Calls(codecs.encode, "x", "rot13"),
    "codecs.decode": lambda: Calls(codecs.decode, b"x", "zip"),
    "reconstructor": lambda: Calls(copyreg._reconstructor, Batch, object, None),
    "add_extension": lambda: Calls(copyreg.add_extension, "os", "system", 77),
    "bytes": lambda: Calls(bytes, 10**12),
    "bytearray": lambda: Calls(bytearray, 10**12),
    "list of a range": lambda: Calls(list, range(10**12)),
    "set of a range": lambda: Calls(set, range(10**12)),
    "deque of a range": lambda: Calls(deque, range(10**12)),
    "counter of a range": lambda: Calls(Counter, range(10**12)),
    "fraction of text": lambda: Calls(fractions.Fraction, "1e999999999"),
    "type": lambda: Calls(type, "X", (), {}),
    "type of none": lambda: type(None),
    "object": lambda: object(),
    "path reads": lambda: Calls(pathlib.Path.read_text, pathlib.Path("/etc/hostname")),
    "bound method": lambda: pathlib.Path("x").unlink,
    "torch.load": lambda: Calls(torch.load, SENTINEL),
    "torch.hub": lambda: Calls(torch.hub.load, "x", "y"),
    "load_from_bytes": lambda: Calls(torch.storage._load_from_bytes, b""),
    "rebuild": lambda: Calls(torch._utils._rebuild_tensor_v2, 1, 2, 3, 4, 5, 6),
    "jit": lambda: Calls(torch.jit.load, SENTINEL),
    "cpp_extension": lambda: Calls(torch.utils._pytree.tree_map, eval, ["1"]),
    "torch.compile": lambda: Calls(torch.zeros, 10**12),
    "storage": lambda: torch.ones(2).untyped_storage(),
    "module": lambda: torch.nn.Linear(1, 1),
    "generator": lambda: Calls(torch.Generator),
    "numpy reconstruct": lambda: Calls(np._core.multiarray._reconstruct, np.ndarray, (10**12,), b"b"),
    "numpy load": lambda: Calls(np.load, SENTINEL, None, True),
    "numpy fromfile": lambda: Calls(np.fromfile, "/etc/hostname"),
    "numpy structured objects": lambda: np.zeros(1, [("a", object)]),
    "memmap": lambda: Calls(np.memmap, SENTINEL, "u1", "w+", 0, 4),
    "namedtuple": lambda: Calls(Point, 1, 2),
    "nested": lambda: [{"a": (1, {"b": deque([Calls(exec, CODE)])})}],
    "as a key": lambda: {Calls(exec, CODE): 1},
    "as a factory": lambda: Calls(defaultdict, eval),
    "chain": lambda: Calls(Calls(Calls(getattr, os, "system"), "true"), "x"),
    "state": lambda: Calls(OrderedDict, state={"keys": 1}),
    "state of a set": lambda: Calls(Counter, state={"update": 1}),
    "pickle itself": lambda: Calls(pickle.loads, pickle.dumps(1)),
    "unpickler": lambda: Calls(pickle.Unpickler, io.BytesIO()),
    "our own codec": lambda: Calls(codec.decode, 1),
    "our switch": lambda: Calls(codec.allow_pickle, True),
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", CALLS)
def test_hostile_pickles_are_refused_and_run_nothing(name, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        skeleton = pickle.dumps(CALLS[name](), protocol)
    except (TypeError, pickle.PicklingError):  # cannot be written: nothing to refuse
        return
    refused(skeleton)
    assert not list(tmp_path.iterdir())
    assert not hasattr(builtins, SENTINEL)


def test_the_list_of_hostile_pickles_would_run_without_restriction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("os.system", "exec", "nested"):
        codec.decode(message(pickle.dumps(CALLS[name](), 5)), weights_only=False)
    assert hasattr(builtins, SENTINEL)
    assert (tmp_path / SENTINEL).exists()
    delattr(builtins, SENTINEL)


ORDERED, UUID_, TENSOR = named("collections", "OrderedDict"), named("uuid", "UUID"), named("torch", "Tensor")
BYTES = {
    "persistent id": b"\x80\x05PX\n.",
    "binary persistent id": b"\x80\x05K\x01Q.",
    "nested persistent id": b"\x80\x05K\x01QQ.",
    "persistent id of a list": b"\x80\x05]Q.",
    "persistent id far out": b"\x80\x05\x8a\x05\xff\xff\xff\xff\x7fQ.",
    "extension 1": b"\x80\x05\x82\x4d.",
    "extension 2": b"\x80\x05\x83\x4d\x00.",
    "extension 4": b"\x80\x05\x84\x4d\x00\x00\x00.",
    "instance": b"(S'x'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'x'\no.",
    "global by text": b"ccollections\nOrderedDict\n.",
    "dotted global": b"\x80\x05" + named("collections", "OrderedDict.fromkeys") + b".",
    "dunder global": b"\x80\x05" + named("collections", "__builtins__") + b".",
    "attribute of a function": b"\x80\x05" + named("easydist.format.parts", "make_tensor.__globals__") + b".",
    "module as a name": b"\x80\x05" + named("easydist", "codec") + b".",
    "name that is no text": b"\x80\x05K\x01K\x02\x93.",
    "put far out": b"\x80\x05]r\xff\xff\xff\x7f.",
    "put": b"\x80\x05]q\x00.",
    "text put": b"\x80\x05]p99999999999\n.",
    "get far out": b"\x80\x05j\xff\xff\xff\x7f.",
    "huge bytes": b"\x80\x05\x8e" + b"\xff" * 7 + b"\x7f.",
    "huge text": b"\x80\x05\x8d" + b"\xff" * 7 + b"\x7f.",
    "huge bytearray": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.",
    "huge long": b"\x80\x05\x8b\xff\xff\xff\x7f.",
    "negative long": b"\x80\x05\x8b\xff\xff\xff\xff.",
    "huge frame": b"\x80\x05\x95" + b"\xff" * 8,
    "no stop": b"\x80\x05N",
    "two values": b"\x80\x05NN.",
    "open mark": b"\x80\x05(N.",
    "something after the end": b"\x80\x05N.N",
    "empty": b"",
    "pop of nothing": b"\x80\x050.",
    "call of a number": b"\x80\x05K\x01)R.",
    "call with a list": b"\x80\x05" + ORDERED + b"]R.",
    "call of a tuple": b"\x80\x05))R.",
    "call of an allowed value": b"\x80\x05" + named("builtins", "list") + b")R.",
    "making of a class": b"\x80\x05" + ORDERED + b")\x81.",
    "making with keywords": b"\x80\x05" + ORDERED + b")}\x92.",
    "making of a tensor": b"\x80\x05" + named("torch.nn.parameter", "Parameter") + b")\x81.",
    "state of a class": b"\x80\x05" + UUID_ + b"N}\x8c\x01xK\x01s\x86b.",
    "state of a class by dict": b"\x80\x05" + UUID_ + b"}\x8c\x01xK\x01sb.",
    "state of a function": b"\x80\x05" + named("easydist.format.parts", "make_tensor") + b"}\x8c\x01xK\x01sb.",
    "state of a list": b"\x80\x05]}b.",
    "append to a dict": b"\x80\x05}K\x01a.",
    "append to a number": b"\x80\x05K\x01K\x01a.",
    "item of a list": b"\x80\x05]K\x00K\x01s.",
    "item of a class": b"\x80\x05" + ORDERED + b"K\x00K\x01s.",
    "odd number of items": b"\x80\x05}(K\x00u.",
    "add to a list": b"\x80\x05](K\x00\x90.",
    "list as a key": b"\x80\x05}]K\x01s.",
    "no such buffer": b"\x80\x05\x97.",
    "read-only number": b"\x80\x05K\x01\x98.",
    "unknown opcode": b"\x80\x05\xff.",
    "bad utf-8": b"\x80\x05\x8c\x01\xff.",
    "tensor class": b"\x80\x05" + TENSOR + b")R.",
}


@pytest.mark.parametrize("name", BYTES)
def test_hostile_bytes_are_refused(name):
    refused(BYTES[name])


def test_extensions_are_refused_even_where_pickle_has_cached_them():
    copyreg.add_extension("posix", "getpid", 77)
    try:
        assert pickle.loads(b"\x80\x05\x82\x4d)R.") == os.getpid()
        assert "EXT1 has no place" in refused(b"\x80\x05\x82\x4d)R.")
    finally:
        copyreg.remove_extension("posix", "getpid", 77)


def made(function, *args):
    """The pickle of a call of one of the functions that make tensors and arrays."""
    return pickle.dumps(Calls(getattr(easydist.format.parts, function), *args), 5)


@pytest.mark.parametrize(
    "call",
    [
        ("make_tensor", bytearray(b"1234"), torch.float32, (2,), "cpu", False),
        ("make_tensor", bytearray(b"1234"), torch.float32, (10**12,), "cpu", False),
        ("make_tensor", bytearray(b""), torch.float32, (10**12,), "cpu", False),
        ("make_tensor", bytearray(b"123"), torch.float32, (1,), "cpu", False),
        ("make_tensor", bytearray(b"1234"), torch.int32, (1,), "cpu", True),
        ("make_tensor", bytearray(b"1234"), "float32", (1,), "cpu", False),
        ("make_tensor", bytearray(b"1234"), torch.float32, "x", "cpu", False),
        ("make_tensor", bytearray(b"1234"), torch.float32, (1,), "nowhere", False),
        ("make_tensor", b"1234", torch.float32, (1,), "cpu", False),
        ("make_tensor", 1000, torch.float32, (1,), "cpu", False),
        ("make_tensor", [1], torch.uint8, (1,), "cpu", False),
        ("make_parameter", bytearray(b"1234"), torch.int32, (1,), "cpu", True),
        ("make_array", b"12345678", "|O8", (1,), "C"),
        ("make_array", b"12345678", "O", (1,), "C"),
        ("make_array", b"12345678", [["a", "|O8"]], (1,), "C"),
        ("make_array", b"12345678", "<f4", (10**12,), "C"),
        ("make_array", b"12345678", "<f4", (-2,), "C"),
        ("make_array", b"12345678", "<f4", (1,), "C"),
        ("make_array", b"12345678", "f4,f4", (1,), "C"),
        ("make_array", b"12345678", "<f4", (2,), "X"),
        ("make_array", b"12345678", {"names": ["a"], "formats": ["O"], "offsets": [0]}, (1,), "C"),
        ("make_array", b"12345678", functools.reduce(lambda inner, _: [["a", inner]], range(50), "<f8"), (1,), "C"),
        ("make_dtype", "|O"),
        ("make_dtype", range(10**12)),
        ("make_dtype", [range(10**12)]),
        ("make_dtype", [["a", "<f8", range(10**12)]]),
        ("make_dtype", [["a", range(10**12)]]),
        ("make_array", b"12345678", "<f8", range(10**12), "C"),
        ("make_tensor", bytearray(8), torch.uint8, range(10**12), "cpu", False),
        ("make_object_array", range(10**12), (1,)),
        ("make_object_array", [1], range(10**12)),
        ("make_dtype", "M8[" + "1" * 100 + "s]"),
        ("make_dtype", None),
        ("make_scalar", b"12345678", "|O8"),
        ("make_scalar", b"1", "<f8"),
        ("make_object_array", [1, 2], (3,)),
        ("make_object_array", 10**12, (3,)),
    ],
    ids=lambda call: f"{call[0]} {call[1:]!r:.60}",
)
def test_makers_check_what_they_get(call):
    refused(made(*call))


def test_attributes_of_tensors_cannot_hide_methods():
    tensor = torch.ones(2)
    tensor.numpy = "not me"
    assert "attribute numpy of a Tensor" in refused(pickle.dumps(tensor_with(vars(tensor)), 5))
    memory = {"__array_interface__": {"data": (4096, False), "shape": (8,), "typestr": "<u1", "version": 3}}
    assert "attribute __array_interface__ of a Tensor" in refused(pickle.dumps(tensor_with(memory), 5))
    assert "attributes of a list" in refused(pickle.dumps(Calls(easydist.format.parts.set_attributes, [], {"x": 1}), 5))
    assert "the state of a Tensor" in refused(pickle.dumps(Calls(*tensor_call(), state={"x": 1}), 5))


def tensor_with(attributes):
    return Calls(easydist.format.parts.set_attributes, Calls(*tensor_call()), attributes)


def tensor_call():
    return easydist.format.parts.make_tensor, bytearray(8), torch.float32, (2,), "cpu", False


# --- bounded work


def test_a_key_that_would_hash_for_ever_is_refused():
    assert "far more work" in refused(b"\x80\x05})" + bomb(60))
    wide = b"(" + b"N" * 20_000 + b"t\x94"
    assert "far more work" in refused(b"\x80\x05}" + wide + b"0(" + b"h\x00" * 20_000 + b"tNs.")


def bomb(levels):
    """Steps that make a tuple of a tuple of … with 2 ** levels ends, and use it as a key."""
    steps = b"".join(b"\x94" + (b"h" + bytes([i])) + b"\x86" for i in range(levels))
    return steps + b"Ns."


def test_a_key_too_deep_to_hash_is_refused():
    assert "nested deeper" in refused(b"\x80\x05})" + b"\x85" * 20_000 + b"Ns.")
    assert "nested deeper" in refused(b"\x80\x05\x8f()" + b"\x85" * 20_000 + b"\x90.")
    assert "nested deeper" in refused(b"\x80\x05()" + b"\x85" * 20_000 + b"\x91.")


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


@pytest.mark.parametrize("source", ["array", "view"])
def test_strings_of_other_buffers_are_refused(source):
    """An array that the message made before, and a view whose length is not that of its bytes."""
    calls = b"".join(b"h\x01h\x00\x85R" for _ in range(200))
    if source == "array":
        array = named("easydist.format.parts", "make_array") + b"(\x97\x8c\x03|u1K\x01M\x10\x27\x86\x8c\x01CtR\x94"
        program = array + b"0" + named("easydist.format.parts", "make_strings") + b"\x940](" + calls + b"e."
        program = b"\x80\x05" + program
    else:
        program = b"\x80\x05\x97\x98\x940" + named("easydist.format.parts", "make_strings") + b"\x940](" + calls + b"e."
    refused(program, b"a\0" * 5_000)


def test_cutting_one_text_again_and_again_is_refused():
    calls = b"".join(b"h\x01h\x00\x85R" for _ in range(5000))
    text = b"\x97\x94" + named("easydist.format.parts", "make_strings") + b"\x940"
    assert "far more work" in refused(b"\x80\x05" + text + b"0](" + calls + b"e.", b"a\0" * 20_000)


def test_copying_one_thing_again_and_again_is_refused():
    size = 20_000
    copies = b"".join(b"h\x01h\x00\x85R" for _ in range(5000))
    big = b"(" + b"K\x01" * size + b"t\x94" + named("torch", "Size") + b"\x940"
    assert "far more work" in refused(b"\x80\x05" + big + b"0]" + b"(" + copies + b"e.")


def kept(steps):
    """The steps, whose value goes into the memo and off the stack."""
    return steps + b"\x940"


def get(index):
    return b"h" + bytes([index])


def integer(value):
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def called(module, name, *args):
    return named(module, name) + b"(" + b"".join(args) + b"tR"


TIMES, BIG, MODULUS = 20_000, (1 << 800_000) + 12345, 2**61 - 1
PARTS, NUMBER = "easydist.format.parts", hash(decimal.Decimal("123.456"))


def again(*definitions, step):
    """A list of what a step makes of the definitions, many times."""
    return b"\x80\x05" + b"".join(map(kept, definitions)) + b"](" + step * TIMES + b"e."


def keys(*definitions, steps):
    """A dict with a key of each step."""
    return b"\x80\x05" + b"".join(map(kept, definitions)) + b"}" + b"".join(step + b"Ns" for step in steps) + b"."


def shared_spec(levels, width):
    """A record of records: ``width ** levels`` fields in a few lists."""
    steps = kept(text("<f8"))
    for level in range(levels):
        steps += kept(b"](" + b"".join(b"](" + text(f"f{i}") + get(level) + b"e" for i in range(width)) + b"e")
    return b"\x80\x05" + steps + named(PARTS, "make_dtype") + get(levels) + b"\x85R."


def equal_frozensets(levels):
    """Two sets that are equal, of equal sets …: comparing them takes ``2 ** levels`` steps."""
    steps, last = b"", []
    for side in range(2):
        steps += kept(b"(K\x01K\x02\x91")
        for level in range(levels):
            at = get(side * (levels + 1) + level)
            steps += kept(b"(" + at + b"K\x00\x86" + at + b"K\x01\x86\x91")
        last.append(get(side * (levels + 1) + levels))
    return b"\x80\x05" + steps + b"\x8f(" + last[0] + last[1] + b"\x90."


BOMBS = {
    "lengths of ranges": again(named("builtins", "range"), integer(BIG), step=get(0) + get(1) + b"\x85R"),
    "one fraction": b"\x80\x05" + called("fractions", "Fraction", integer(BIG), integer(BIG * 2 // 3)) + b".",
    "fractions": again(
        *(named("fractions", "Fraction"), integer(3**5000), integer(5**3500)),
        step=get(0) + get(1) + get(2) + b"\x86R",
    ),
    "time of a big number": b"\x80\x05" + called("datetime", "timedelta", b"K\x00", integer(BIG)) + b".",
    "slice of big numbers": b"\x80\x05" + called("builtins", "slice", integer(BIG)) + b".",
    "arguments without length": again(
        *(named("pathlib", "PurePosixPath"), b"(" + text("") * 20_000 + b"t"), step=get(0) + get(1) + b"R"
    ),
    "parts of a path": again(named("pathlib", "PurePosixPath"), text("ab/" * 30_000), step=get(0) + get(1) + b"\x85R"),
    "sizes": again(named("torch", "Size"), b"(" + b"K\x01" * 50_000 + b"t", step=get(0) + get(1) + b"\x85R"),
    "shared fields": shared_spec(8, 8),
    "fields again and again": again(
        named(PARTS, "make_dtype"),
        b"](" + b"".join(b"](" + text(f"f{i}") + text("<f8") + b"e" for i in range(900)) + b"e",
        b"](](" + text("x") + get(1) + b"ee",
        step=get(0) + get(2) + b"\x85R",
    ),
    "equal sets": equal_frozensets(60),
    "integers of one hash": keys(steps=(integer(5 + 8 * MODULUS * i) for i in range(10_000))),
    "tuples of one hash": keys(steps=(integer(5 + 8 * MODULUS * i) + b"\x85" for i in range(10_000))),
    "UUIDs of one hash": keys(
        named("uuid", "UUID"), steps=(get(0) + text(f"{5 + MODULUS * i:032x}") + b"\x85R" for i in range(5000))
    ),
    "small integer of the hash of many": keys(
        steps=[*(integer(5 + 8 * MODULUS * i) for i in range(50)), *[b"K\x05"] * 100_000]
    ),
    "number like a Decimal": keys(
        integer(NUMBER + (MODULUS << 8000)),
        called("decimal", "Decimal", text("123.456")),
        steps=[get(1), *[get(0)] * TIMES],
    ),
    "big integer as a key": keys(integer(BIG), steps=[get(0)] * TIMES),
    "floats like Decimals": keys(
        called("decimal", "Decimal", text(str(decimal.Decimal.from_float(5e-324)))),
        b"(" + get(0) * 900 + b"t",
        b"G" + struct.pack(">d", 5e-324),
        b"(" + get(2) * 900 + b"t",
        steps=[get(1), *[get(3)] * TIMES],
    ),
    "equal texts": keys(text("a" * 200_000), text("a" * 200_000), steps=[get(0), *[get(1)] * TIMES]),
    "ranges as keys": keys(called("builtins", "range", b"K\x00", integer(3**5000), b"K\x07"), steps=[get(0)] * TIMES),
    "fractions in a key": keys(
        *(called("fractions", "Fraction", b"K\x01", b"K\x03"), b"(" + get(0) * 50_000 + b"t"), steps=[get(1)] * TIMES
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_time_or_memory_out_of_proportion_is_refused(name):
    what = refused(BOMBS[name])
    assert "far more work" in what or "an integer of" in what
    assert peak_nbytes(BOMBS[name]) < ALLOWANCE + PER_BYTE * len(BOMBS[name])


ALLOWANCE, PER_BYTE = 16_000_000, 400


def peak_nbytes(skeleton):
    """What decoding allocates at most at a time."""
    data = message(skeleton)
    tracemalloc.start()
    try:
        with contextlib.suppress(UnsafeObjectError, WireError):
            codec.decode(data, weights_only=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_records_as_keys_are_refused():
    record = np.frombuffer(b"12345678", "<i4,<f4")[0]
    with pytest.raises(UnsafeObjectError, match="a NumPy record as a key"):
        round_trip({record: 1}, weights_only=True)
    assert round_trip({record: 1}) == {record: 1}


@pytest.mark.slow
def test_keys_that_a_program_has_are_no_fault():
    grid = [(x, y, z) for x in range(-20, 20) for y in range(-20, 20) for z in range(-20, 20)]  # hash(-1) == hash(-2)
    config = ("adam", 0.1, (1, 2, 3), frozenset({"a", "b"}))
    data = [
        *(dict.fromkeys(grid, 0), set(grid), [{config: i} for i in range(5000)], {"n" * 100: 1, b"n" * 100: 2}),
        {**dict.fromkeys(range(-5000, 5000), 0), 0.5: 1, None: 2, 2**61: 3, 2**1000: 4},
        {decimal.Decimal(i) / 7 for i in range(2000)} | {fractions.Fraction(i, 7) for i in range(2000)},
        {uuid.UUID(int=i << 64) for i in range(2000)} | {pathlib.PurePosixPath(f"/data/{i}") for i in range(2000)},
        [pathlib.PurePosixPath(f"/home/user/some/data set/with/many/parts/{i:09}.parquet") for i in range(5000)],
        [np.zeros(1, "i4,f8,u1,U3")[0] for _ in range(500)],
        [fractions.Fraction(2**4000 + i, 3**2000) for i in range(100)],
    ]
    assert round_trip(data, weights_only=True) == data


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


# --- fuzz


def try_to_decode(data):
    with contextlib.suppress(UnsafeObjectError, WireError):
        codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), weights_only=True)


@settings(max_examples=launching.examples(300), deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_are_decoded_or_refused(data):
    try_to_decode(data)
    try_to_decode(bytes(message(b"\x80\x05" + data + b".").numpy()))


@pytest.mark.slow
@settings(max_examples=launching.examples(150), deadline=None)
@given(
    st.lists(
        st.sampled_from(sorted(easydist.format.unpickler.OPCODES)).map(lambda c: bytes([c])) | st.binary(max_size=3)
    )
)
def test_random_programs_are_decoded_or_refused(steps):
    program = b"".join(steps)
    for prefix in (b"", named("collections", "OrderedDict") + b")R", made("make_tensor", *tensor_call()[1:])[2:-1]):
        try_to_decode(bytes(message(prefix + program + b".", b"12345678").numpy()))


class Programs:
    """Random programs of every opcode and every callable that is allow-listed, in which a few steps come many times.

    Args:
        seed: Of a program; the same seed is the same program.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.steps, self.kinds = b"\x80\x05", []
        for kind, steps in self.atoms():
            self.keep(kind, steps)
        self.callables = []
        makers = dict.fromkeys(MAKERS.values(), (object,))
        others = {function: kinds for function, kinds in CALLABLES.items() if "return_types" not in function.__module__}
        for function, kinds in self.draw.sample([*others.items(), *makers.items(), *CALLABLES.items()], 16):
            self.callables.append((get(len(self.kinds)), kinds))
            self.keep(type, named(function.__module__, function.__qualname__))

    def keep(self, kind, steps):
        self.steps += kept(steps)
        self.kinds.append(kind)

    def atoms(self):
        draw = self.draw
        for number in draw.sample([0, 3, -1, 1 << 40, 1 << 4000, 3**5000, BIG, BIG // 3], 4):
            yield int, integer(number)
        for value in draw.sample(["", "a", "cpu", "1.5", "a/b" * 5000, "x\\" * 3000, "7" * 9000, "f" * 32], 4):
            yield str, text(value)
        for length in draw.sample([0, 4, 8, 9000], 2):
            yield bytes, b"B" + struct.pack("<I", length) + draw.randbytes(length)
            yield bytearray, b"\x96" + struct.pack("<Q", length) + draw.randbytes(length)
        yield float, b"G" + draw.randbytes(8)
        yield from ((NoneType, b"N"), (dict, b"}"), (list, b"]"), (str, text("<f8")), (type, named("torch", "float32")))
        for _ in range(3):
            items = b"".join(self.some() for _ in range(draw.randrange(3)))
            yield tuple, b"(" + items * draw.choice([1, 1, 3000]) + b"t"
        yield list, b"](" + self.some() * draw.choice([1, 2000]) + b"e"

    def some(self, *kinds):
        """A value that was kept: of these types, where there is one."""
        fitting = [i for i, kind in enumerate(self.kinds) if issubclass(kind, kinds or object)]
        return get(self.draw.choice(fitting or range(len(self.kinds))))

    def step(self):
        """A few opcodes that push something."""
        draw = self.draw
        kind = draw.randrange(9)
        if kind < 5:
            function, kinds = draw.choice(self.callables)
            args = b"".join(self.some(*kinds) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4])))
            return function + (self.some(tuple) if draw.random() < 0.1 else b"(" + args + b"t") + b"R"
        if kind == 5:
            return b"}(" + b"".join(self.some() + b"N" for _ in range(draw.randrange(4))) + b"u"
        if kind == 6:
            return b"(" + b"".join(self.some() for _ in range(draw.randrange(4))) + draw.choice([b"t", b"\x91"])
        if kind == 7:
            return self.some() + draw.choice([b"\x85", b"\x94", b"\x98", b"\x94" + self.some() + b"\x86"])
        return bytes([draw.choice(sorted(easydist.format.unpickler.OPCODES))]) + draw.randbytes(draw.randrange(3))

    def made(self):
        """A program: many times those two of its steps that allocate most."""
        chosen = {}
        for _ in range(40):
            step = self.step()
            if is_decoded(self.steps + b"](" + step + b"e."):
                chosen[step] = peak_nbytes(self.steps + b"](" + step * 50 + b"e.")
                if self.draw.random() < 0.2 and is_decoded(self.steps + kept(step) + b"N."):
                    self.keep(object, step)
        block = b"".join(sorted(chosen, key=chosen.get)[-2:]) or b"N"
        start, end = self.draw.choice([(b"](", b"e."), (b"](", b"e."), (b"\x8f(", b"\x90.")])
        return self.steps + start + block * (40_000 // len(block)) + end


def is_decoded(skeleton):
    try:
        codec.decode(message(skeleton), weights_only=True)
    except (UnsafeObjectError, WireError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_allocate_in_proportion_to_their_length(seed):
    program = Programs(seed).made()
    assert peak_nbytes(program) < ALLOWANCE + PER_BYTE * len(program), seed


VALID = [bytes(codec.encode(make()).numpy()) for name, make in PLAIN.items() if name not in ("bytearray", "big text")]


@pytest.mark.slow
@settings(max_examples=launching.examples(300), deadline=None)
@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_messages_are_decoded_or_refused(valid, changes):
    data = bytearray(valid)
    for at, byte in changes:
        data[at % len(data)] = byte
    try_to_decode(data)


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
