"""Messages with handwritten pickles, and the effects of decoding them."""

import contextlib
import datetime
import decimal
import fractions
import pathlib
import pickle
import struct
import tracemalloc
import uuid
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from trees import CASES, LEAVES

import easydist
from easydist import UnsafeObjectError, WireError
from easydist.format import codec

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


class Calls:
    """An object that is pickled as a call."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


def message(skeleton, *buffers):
    """Return a message with any bytes."""
    head = struct.pack(f"<{2 + len(buffers)}Q", len(buffers), len(skeleton), *map(len, buffers))
    data = head + skeleton
    for buffer in buffers:
        data += bytes(-len(data) % 64) + buffer
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def named(module, name):
    """Return the bytes that push a global."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


def refused(skeleton, *buffers):
    with pytest.raises((UnsafeObjectError, WireError)) as caught:
        codec.decode(message(skeleton, *buffers), weights_only=True)
    return str(caught.value)


def made(function, *args):
    """Return the pickle of a call of one of the functions that make tensors and arrays."""
    return pickle.dumps(Calls(getattr(easydist.format.parts, function), *args), 5)


def tensor_with(attributes):
    return Calls(easydist.format.parts.set_attributes, Calls(*tensor_call()), attributes)


def tensor_call():
    return easydist.format.parts.make_tensor, bytearray(8), torch.float32, (2,), "cpu", False


def bomb(levels):
    """Return steps that nest tuples with 2 ** levels ends, and use the result as a key."""
    steps = b"".join(b"\x94" + (b"h" + bytes([i])) + b"\x86" for i in range(levels))
    return steps + b"Ns."


def kept(steps):
    """Return the steps, whose value moves from the stack to the memo."""
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

ALLOWANCE, PER_BYTE = 16_000_000, 400


def peak_nbytes(skeleton):
    """Return the peak of the memory that decoding allocates."""
    data = message(skeleton)
    tracemalloc.start()
    try:
        with contextlib.suppress(UnsafeObjectError, WireError):
            codec.decode(data, weights_only=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def is_decoded(skeleton):
    try:
        codec.decode(message(skeleton), weights_only=True)
    except (UnsafeObjectError, WireError):
        return False
    return True


VALID = [bytes(codec.encode(make()).numpy()) for name, make in PLAIN.items() if name not in ("bytearray", "big text")]
