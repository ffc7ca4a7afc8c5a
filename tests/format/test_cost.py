"""Decoding takes time and memory in proportion to the message."""

import decimal
import fractions
import pathlib
import struct
import uuid

import numpy as np
import pytest
from pickles import (
    ALLOWANCE,
    BIG,
    MODULUS,
    PER_BYTE,
    TIMES,
    bomb,
    called,
    get,
    integer,
    kept,
    named,
    peak_nbytes,
    refused,
    round_trip,
    text,
)

from easydist import UnsafeObjectError


def test_a_key_that_would_hash_for_ever_is_refused():
    assert "far more work" in refused(b"\x80\x05})" + bomb(60))
    wide = b"(" + b"N" * 20_000 + b"t\x94"
    assert "far more work" in refused(b"\x80\x05}" + wide + b"0(" + b"h\x00" * 20_000 + b"tNs.")


def test_a_key_too_deep_to_hash_is_refused():
    assert "nested deeper" in refused(b"\x80\x05})" + b"\x85" * 20_000 + b"Ns.")
    assert "nested deeper" in refused(b"\x80\x05\x8f()" + b"\x85" * 20_000 + b"\x90.")
    assert "nested deeper" in refused(b"\x80\x05()" + b"\x85" * 20_000 + b"\x91.")


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
        [pathlib.PurePosixPath(f"/home/user/some/dataset/with/many/parts/{i:09}.parquet") for i in range(5000)],
        [np.zeros(1, "i4,f8,u1,U3")[0] for _ in range(500)],
        [fractions.Fraction(2**4000 + i, 3**2000) for i in range(100)],
    ]
    assert round_trip(data, weights_only=True) == data
