"""Hostile pickles, which restricted decoding refuses."""

import builtins
import codecs
import copyreg
import fractions
import functools
import importlib
import io
import operator
import os
import pathlib
import pickle
import subprocess
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from pickles import Calls, made, message, named, refused, tensor_call, tensor_with
from trees import Batch, Point

import easydist
from easydist import WireError
from easydist.format import codec
from easydist.format.unpickler import Unpickler

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
        assert "EXT1 is not allowed" in refused(b"\x80\x05\x82\x4d)R.")
    finally:
        copyreg.remove_extension("posix", "getpid", 77)


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


@pytest.mark.parametrize("buffers", [[b"x"], [b"x", b"y"]])
def test_a_buffer_that_no_object_takes_is_an_error(buffers):
    data = pickle.dumps({"a": 1}, 5)
    assert Unpickler(memoryview(data)).load() == {"a": 1}
    with pytest.raises(WireError, match="it is not complete, or data is left over"):
        Unpickler(memoryview(data), buffers).load()
