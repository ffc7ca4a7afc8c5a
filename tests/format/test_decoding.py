"""Fuzz of restricted decoding: random bytes, random programs, mutated messages."""

import contextlib
import io
import pickle
import random
import struct
from types import NoneType

import launching
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from pickles import (
    ALLOWANCE,
    BIG,
    PER_BYTE,
    VALID,
    get,
    integer,
    is_decoded,
    kept,
    made,
    message,
    named,
    peak_nbytes,
    tensor_call,
    text,
)

import easydist
from easydist import UnsafeObjectError, WireError
from easydist.format import codec
from easydist.format.allowlist import CALLABLES
from easydist.format.parts import MAKERS
from easydist.format.plain import listed
from easydist.format.unpickler import Unpickler, load


def try_to_decode(data):
    with contextlib.suppress(UnsafeObjectError, WireError):
        codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), weights_only=True)


@settings(max_examples=launching.examples(300), deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_are_decoded_or_refused(data):
    try_to_decode(data)
    try_to_decode(bytes(message(b"\x80\x05" + data + b".").numpy()))


class Strict(pickle.Unpickler):
    """Pickle's own reader, which fails the test if it needs a global."""

    def find_class(self, module, name):
        pytest.fail(f"{module}.{name}")

    persistent_load = None


PLAIN_STEPS = [
    b"N",
    b"\x88",
    b"K\x07",
    b"M\x07\x01",
    b"J\xff\xff\xff\xff",
    b"G" + bytes(8),
    b"\x8c\x01a",
    b"C\x01b",
    b"]",
]
PLAIN_STEPS += [b"}", b")", b"(", b"\x94", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86", b"\x87", b"h\x00", b"h\x01"]
PLAIN_STEPS += [
    b"\x8a\x05" + bytes(5),
    b"\x93",
    b"R",
    b"\x81",
    b"b",
    b"\x8c\x02os",
    b"\x8c\x06system",
    b"cos\nsystem\n",
    b"Vx\n",
    b"X\x01\0\0\0.",
    b"B\x02\0\0\0R.",
    b"\x8c\x80" + b"a" * 127 + b".",
    b"C\x81" + b"\x93" * 129,
    b"X\x02\x01\0\0" + b"a" * 258,
]


@settings(max_examples=launching.examples(1000), deadline=None)
@given(st.lists(st.sampled_from(PLAIN_STEPS), max_size=30), st.binary(max_size=2))
@example([b"\x8c\x02os", b"\x8c\x06system", b"\x93"], b"")
@example([b"cos\nsystem\n"], b"")
def test_what_is_left_to_pickle_is_plain_and_the_restricted_decoder_agrees(steps, odd):
    data = b"\x80\x05" + b"".join(steps) + odd + b"."
    if (pickled := listed(memoryview(data))) is None:
        return
    try:
        (value,) = Strict(io.BytesIO(pickled)).load()
    except Exception:
        with pytest.raises(WireError):
            load(memoryview(data))
        with pytest.raises(WireError):
            Unpickler(memoryview(data)).load()
        return
    assert repr(load(memoryview(data))) == repr(value)
    with contextlib.suppress(WireError):  # it puts items into a dict where pickle sets those of a list
        assert repr(Unpickler(memoryview(data)).load()) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [2.5, None]},
        [{"k": 1}, {"k": 2}],
        ("do", (1, -2), {"x": b"y"}),
        2**40,
        {"text": "x" * 1000},
        [b"." * n for n in (127, 128, 255, 256, 60000)],
        ["é" * n for n in (63, 64, 127, 128, 20000)],
    ],
)
def test_usual_values_are_plain(value):
    assert pickle.loads(listed(memoryview(pickle.dumps(value, 5)))) == [value]


@pytest.mark.parametrize("value", [[1] * 600, ["x" * 1000] * 2 + [2] * 600, "x" * (1 << 16)])
def test_what_may_take_long_is_left_to_the_restricted_decoder(value):
    assert listed(memoryview(pickle.dumps(value, 5))) is None


@pytest.mark.parametrize("before", [b"", b"X\xc8\0\0\0" + 200 * b"a"], ids=["first row", "behind long text"])
def test_rows_are_plain_up_to_a_length(before):
    """Wherever in an opcode the limit is."""
    text = b"\x8c\x7f" + 127 * b"t"
    for nbytes in range(850, 1100):
        row = nbytes * b"N" + text
        assert (listed(memoryview(b"\x80\x05" + before + row + b".")) is not None) == (len(row) <= 1024)


@pytest.mark.parametrize(
    "many", [b"N", b"K\x07", b"(", b"\x8c\x01a", b"N\x85", b"h\x00", b"C\x00", b"K.", b".", b"X\0\0\0\0"]
)
def test_what_is_not_plain_is_found_out_at_all(many):
    """A pattern that matches in several ways would try all of them: two to the number of opcodes."""
    for end in (b"", b"R.", b"\xff.", b"\x8c\x7f.", b"h", b"X.", b"X\xff\xff\xff\xff."):
        assert listed(memoryview(b"\x80\x05" + many * (1000 // len(many)) + end)) is None


@pytest.mark.parametrize("before", [b"", b"X\xc8\0\0\0" + 200 * b"a"], ids=["first row", "behind long text"])
def test_tuples_in_several_places_are_weighed(before):
    data = b"\x80\x05](" + before + b"N\x85\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(40)) + b"}h(Nse."
    assert listed(memoryview(data)) is None
    with pytest.raises(WireError, match="more work than its length"):
        load(memoryview(data))


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", launching.sampled(range(40), 4))
def test_random_programs_allocate_in_proportion_to_their_length(seed):
    program = Programs(seed).made()
    assert peak_nbytes(program) < ALLOWANCE + PER_BYTE * len(program), seed


@pytest.mark.slow
@settings(max_examples=launching.examples(300), deadline=None)
@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_messages_are_decoded_or_refused(valid, changes):
    data = bytearray(valid)
    for at, byte in changes:
        data[at % len(data)] = byte
    try_to_decode(data)
