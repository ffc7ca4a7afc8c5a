"""Laws of the safetensors header; what is wrong with it is found before a byte of data is touched."""

import contextlib
import gc
import json
import struct
import tracemalloc

import launching
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given, settings, strategies as st
from trees import DTYPES, assert_same, bits, tensors

import easydist
from easydist.errors import WireError
from easydist.format import header

PROPERTY = settings(max_examples=launching.examples(80), deadline=None)
ONLY_HERE = [torch.complex128]
# safetensors 0.8 writes these, and load_file reads them; load, from bytes, has no name for them.
ONLY_FILES = [getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(lambda name: name != "__metadata__")


def message(tensors, metadata=None):
    return bytearray(b"".join(header.chunks(tensors, metadata)))


def read(buffer):
    return header.decode(buffer).tensors(buffer)


def raw(head, data=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return bytearray(struct.pack("<Q", len(text)) + text + data)


def entry(shape, offsets, dtype="U8", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


named = st.dictionaries(NAMES, tensors(), max_size=5)
foreign = st.dictionaries(
    NAMES, tensors(dtypes=[d for d in DTYPES if d not in ONLY_HERE + ONLY_FILES]).map(torch.Tensor.contiguous)
)


# --- round trips


def test_a_tensor_without_elements_may_start_where_another_one_does():
    buffer = raw({"a": entry([2], [0, 2]), "none": entry([0], [0, 0]), "b": entry([1], [2, 3])}, b"\1\2\3")
    assert_same(read(buffer), {"none": torch.empty(0, dtype=torch.uint8), "a": bytes_of(1, 2), "b": bytes_of(3)})


def bytes_of(*values):
    return torch.tensor(values, dtype=torch.uint8)


@PROPERTY
@given(named, st.dictionaries(NAMES, NAMES, max_size=3))
def test_decode_is_the_inverse_of_chunks_bit_for_bit(values, metadata):
    buffer = message(values, metadata)
    assert_same(dict(sorted(read(buffer).items())), {name: values[name].detach() for name in sorted(values)})
    assert header.decode(buffer).metadata == metadata


@PROPERTY
@given(named)
def test_data_begins_at_64_and_every_tensor_at_a_multiple_of_its_item_size(values):
    head = header.decode(message(values))
    assert head.nbytes % 64 == 0
    assert all(item.start % item.dtype.itemsize == 0 for item in head.entries)
    assert [item.start for item in head.entries[1:]] == [item.stop for item in head.entries[:-1]]


@pytest.mark.slow
@PROPERTY
@given(foreign)
def test_safetensors_loads_what_is_written_here(values):
    got = safetensors.torch.load(bytes(message(values, {"a": "b"})))
    assert_same(dict(sorted(got.items())), dict(sorted(values.items())))


@PROPERTY
@given(foreign)
def test_what_safetensors_writes_is_read_here(values):
    distinct = {name: value.clone() for name, value in values.items()}
    buffer = bytearray(safetensors.torch.save(distinct, {"a": "b"}))
    assert_same(dict(sorted(read(buffer).items())), dict(sorted(values.items())))
    assert header.decode(buffer).metadata == {"a": "b"}


@pytest.mark.parametrize("dtype", ONLY_FILES, ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (0,), (3, 1)], ids=str)
def test_dtypes_that_safetensors_reads_from_files_only_go_both_ways(dtype, shape, tmp_path):
    plain = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).view(shape)
    value = plain.view(dtype)
    safetensors.torch.save_file({"a": value}, tmp_path / "theirs")
    (tmp_path / "ours").write_bytes(message({"a": value}))
    for got in (read(bytearray((tmp_path / "theirs").read_bytes())), safetensors.torch.load_file(tmp_path / "ours")):
        assert (got["a"].dtype, got["a"].shape) == (dtype, value.shape)
        assert torch.equal(got["a"].view(torch.uint8), plain)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 1)], ids=str)
def test_complex128_is_pairs_of_float64_to_safetensors_and_complex128_here(shape):
    pairs = torch.arange(2.0 * torch.Size(shape).numel(), dtype=torch.float64).view(*shape, 2)
    buffer = message({"z": torch.view_as_complex(pairs), "x": torch.ones(1)})
    assert_same(read(buffer)["z"], torch.view_as_complex(pairs))
    assert_same(safetensors.torch.load(bytes(buffer))["z"], pairs)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_nan_payloads_and_negative_zeros_survive_both_libraries(dtype):
    raw_bits = torch.arange(4 * dtype.itemsize, dtype=torch.uint8).bitwise_or(0x7F)
    value = torch.cat([raw_bits.view(dtype), torch.tensor([-0.0]).to(dtype)])
    assert bits(read(message({"a": value}))["a"]) == bits(value)
    assert bits(safetensors.torch.load(bytes(message({"a": value})))["a"]) == bits(value)
    assert bits(read(bytearray(safetensors.torch.save({"a": value})))["a"]) == bits(value)


def test_what_is_read_shares_memory_with_the_buffer_and_nothing_else():
    buffer = message({"a": torch.zeros(2), "b": torch.zeros(2)})
    a, b = read(buffer).values()
    buffer[-1] = 64
    assert (a.tolist(), b.tolist()) == ([0, 0], [0, 2])
    loss = (a.requires_grad_() ** 2).sum()
    b.add_(1)  # views of one tensor would make this an error in backward
    loss.backward()


def test_unaligned_tensors_are_copied():
    buffer = raw({"a": entry([1], [0, 1]), "b": entry([2], [1, 9], "F32")}, b"\1" + struct.pack("<ff", 1.5, -2))
    assert read(buffer)["b"].tolist() == [1.5, -2]
    assert all(value.data_ptr() % value.dtype.itemsize == 0 for value in read(buffer).values())


# --- what cannot be written


@pytest.mark.parametrize(
    ("values", "metadata", "error", "text"),
    [
        ({"q": torch.empty(1, dtype=torch.bits8)}, {}, TypeError, "q is bits8, which"),
        ({"a": torch.ones([1] * 65)}, {}, ValueError, "a has 65 dimensions, but a message has at most 64"),
        ({"__metadata__": torch.ones(1)}, {}, ValueError, "none of them named '__metadata__'"),
        ({"\ud800": torch.ones(1)}, {}, ValueError, "surrogates not allowed"),
        ({}, {"a": 1}, TypeError, "metadata has to be a dict of str to str, got {'a': 1}"),
    ],
)
def test_what_no_message_can_hold_is_refused_when_it_is_written(values, metadata, error, text):
    with pytest.raises(error, match=text):
        message(values, metadata)


# --- what is wrong

GOOD = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
WRONG = {
    "nothing": (b"", "0 bytes are too few"),
    "short": (b"\0" * 7, "7 bytes are too few"),
    "no header": (b"\0" * 8, "does not begin with '{'"),
    "longer than the buffer": (struct.pack("<Q", 3) + b"{}", "should have 3 bytes, but there are 2"),
    "huge": (struct.pack("<Q", 2**63) + b"{}", "should have 9223372036854775808 bytes, but there are 2"),
    "a list": (raw([]), "does not begin with '{'"),
    "leading space": (raw(b" {}"), "does not begin with '{'"),
    "no utf-8": (raw(b'{"\xff":1}'), "not JSON: \"'utf-8' codec can't decode"),
    "no JSON": (raw(b"{]"), "the header is not JSON"),
    "text behind": (raw(b"{}{}"), "the header is not JSON"),
    "zeros behind": (raw(b"{}\0"), "the header is not JSON"),
    "control character": (raw(GOOD.replace(b"a", b"\n"), b"0"), "Invalid control character"),
    "half a surrogate pair": (raw(GOOD.replace(b"a", rb"\ud800"), b"0"), "half of a surrogate pair"),
    "depth": (raw(b'{"a":' + b"[" * 99_999), "nested too deeply"),
    "depth in a shape": (
        raw(GOOD.replace(b"[1]", b"[" * 500 + b"]" * 500), b"0"),
        r"entry 'a': bad shape \[\[\[\[\[\[\[",
    ),
    "entry twice": (raw(b'{"a":1,"a":2}'), "the key 'a' appears twice"),
    "key twice": (raw(GOOD.replace(b"dtype", b"shape"), b"0"), "the key 'shape' appears twice"),
    "metadata twice": (raw(b'{"__metadata__":{"a":"1","a":"2"}}'), "the key 'a' appears twice"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
    "metadata null": (raw({"__metadata__": None}), "__metadata__ is not an object of strings"),
    "entry is a list": (
        raw({"a": ["U8", [1], [0, 1]]}, b"0"),
        "entry 'a': needs exactly dtype, shape and data_offsets",
    ),
    "key missing": (raw({"a": {"dtype": "U8", "shape": [1]}}, b"0"), "entry 'a': needs exactly"),
    "further key": (raw({"a": entry([1], [0, 1], x=1)}, b"0"), "entry 'a': needs exactly"),
    "unknown dtype": (raw({"a": entry([1], [0, 1], "F7")}, b"0"), "entry 'a': unknown dtype 'F7'"),
    "dtype torch lacks": (raw({"a": entry([4], [0, 3], "F6_E2M3")}, b"000"), "entry 'a': unknown dtype 'F6_E2M3'"),
    "dtype is a list": (raw({"a": entry([1], [0, 1], [])}, b"0"), r"entry 'a': unknown dtype \[\]"),
    **{
        f"shape {shape}": (raw(GOOD.replace(b"[1]", shape.encode()), b"0"), "entry 'a': bad shape")
        for shape in (
            *("1", "null", "[-1]", "[-0]", "[1.0]", "[1e0]", "[true]", '["1"]', "[NaN]", "[Infinity]", "[[1]]"),
            *(f"[{2**63}]", f"[{2**64}, 0]", f"[0, {2**62}, {2**62}]", f"[{'9' * 5000}]", str([1] * 65)),
        )
    },
    **{
        f"offsets {offsets}": (raw(GOOD.replace(b"[0,1]", offsets.encode()), b"0"), "entry 'a': bad data_offsets")
        for offsets in ("[1,0]", "[-1,0]", "[0]", "[0,1,1]", "[0.0,1.0]", "[false,true]", "{}", f"[0,{2**63}]")
    },
    "too few bytes for the shape": (
        raw({"a": entry([2], [0, 4], "F32")}, b"0000"),
        r"entry 'a': float32 \(2,\) needs 8 bytes, but data_offsets \[0, 4\] hold 4",
    ),
    "half an item": (raw({"a": entry([1], [0, 1], "F4")}, b"0"), "entry 'a': F4 needs an even last dimension"),
    "hole in front": (raw({"a": entry([1], [1, 2])}, b"00"), "entry 'a': begins at 1, not at 0: it leaves a hole"),
    "overlap": (
        raw({"a": entry([2], [0, 2]), "b": entry([2], [1, 3])}, b"000"),
        "entry 'b': begins at 1, not at 2: it ov",
    ),
    "the same bytes": (
        raw({"a": entry([1], [0, 1]), "b": entry([1], [0, 1])}, b"0"),
        "entry 'b': begins at 0, not at 1",
    ),
    "empty in the middle": (raw({"a": entry([2], [0, 2]), "b": entry([0], [1, 1])}, b"00"), "entry 'b': begins at 1"),
    "behind the end": (raw({"a": entry([2], [0, 2])}, b"0"), "the entries need 2 bytes of data, but there are 1"),
    "bytes behind": (raw(GOOD, b"00"), "the entries need 1 bytes of data, but there are 2"),
    "huge tensor": (
        raw({"a": entry([2**50], [0, 2**50])}, b"0"),
        "need 1125899906842624 bytes of data, but there are 1",
    ),
    "note of no entry": (
        raw({"__metadata__": {header.DTYPES: '{"a": "complex128"}'}}),
        "names 'a', which is not an entry",
    ),
    "note without pairs": (
        raw({"__metadata__": {header.DTYPES: '{"a": "complex128"}'}, "a": entry([1], [0, 8], "F64")}, b"0" * 8),
        r"entry 'a': F64 \[1\] cannot hold 'complex128'",
    ),
    "note of another dtype": (
        raw({"__metadata__": {header.DTYPES: '{"a": "int8"}'}, "a": entry([2], [0, 2])}, b"00"),
        "entry 'a': U8 .* cannot hold 'int8'",
    ),
    "note that is no JSON": (raw({"__metadata__": {header.DTYPES: "["}}), "the header is not JSON"),
}
OURS_ALONE = (
    *("leading space", "entry twice", "metadata twice", "metadata null", "entry is a list", "further key"),
    *("dtype torch lacks", "note of no entry", "note without pairs", "note of another dtype", "note that is no JSON"),
    *(f"shape [0, {2**62}, {2**62}]", f"shape {[1] * 65}"),
)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_header_is_named(name):
    buffer, text = WRONG[name]
    with pytest.raises(WireError, match=text):
        header.decode(buffer)


@pytest.mark.parametrize("name", [name for name in WRONG if name not in OURS_ALONE])
def test_safetensors_rejects_it_too(name):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(bytes(WRONG[name][0]))


def test_the_longest_name_makes_a_short_message():
    with pytest.raises(WireError) as caught:
        header.decode(raw({"n" * 10**6: entry(["x" * 10**6], [0, 1])}, b"0"))
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_100_000_entries_are_fine_and_one_more_is_not():
    none = json.dumps(entry([0], [0, 0]))
    entries = ",".join(f'"{i}":{none}' for i in range(100_000)).encode()
    assert len(header.decode(raw(b"{%b}" % entries)).entries) == 100_000
    with pytest.raises(WireError, match="the header has 100001 entries, more than 100000"):
        header.decode(raw(b'{%b,"more":%b}' % (entries, none.encode())))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_after_a_header_as_before_it_and_never_within(is_enabled):
    good, bad = raw({f"{i}": entry([0], [0, 0]) for i in range(5000)}), raw({"a": 1})
    before, began = gc.isenabled(), []
    (gc.enable if is_enabled else gc.disable)()
    gc.collect()
    gc.callbacks.append(count := lambda phase, info: began.append(phase))
    try:
        header.decode(good)
        assert len(began) <= 2, "begin and end of one collection, for all objects that were made"
        assert gc.isenabled() == is_enabled
        with pytest.raises(WireError):
            header.decode(bad)
        assert gc.isenabled() == is_enabled
    finally:
        gc.callbacks.remove(count)
        (gc.enable if before else gc.disable)()


@pytest.mark.slow
def test_numbers_that_are_too_many_for_a_header_are_named_as_the_reason():
    text = "header of 8000074 bytes with 8000010 brackets, .* with 8000000 of these; put many numbers into a tensor"
    with pytest.raises(ValueError, match=text):
        easydist.header({"list": "," * 8_000_000})


@pytest.mark.slow
@pytest.mark.parametrize("piece", [b"[],", b"9999,", b"{},"])
def test_reading_takes_at_most_64_bytes_for_each_mark(piece):
    buffer = raw(b'{"a":[' + piece * 200_000 + b"1]}")
    marks = sum(map(buffer.count, b"[{,:"))
    tracemalloc.start()
    with pytest.raises(WireError, match="entry 'a': needs exactly"):
        header.decode(buffer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(buffer) + 64 * marks


def test_a_header_that_would_parse_to_gigabytes_is_refused_unread():
    with pytest.raises(WireError, match="more than 8000000 brackets, braces, commas and colons"):
        header.decode(raw(b'{"a":[' + b"[]," * 4_000_001))


def test_a_header_beyond_the_limit_is_refused_unread():
    with pytest.raises(WireError, match="the header has 100000001 bytes, more than 100000000"):
        header.decode(struct.pack("<Q", 100_000_001) + bytes(100_000_001))


# --- fuzz


def agrees(buffer):
    """A WireError, or what safetensors makes of the same bytes; ``read_header`` reads the same headers, and no others.

    It takes a header without data, too.
    """
    try:
        got = read(buffer)
    except WireError:
        with contextlib.suppress(WireError):
            assert easydist.read_header(buffer).nbytes == len(buffer)
        return
    assert easydist.read_header(buffer) == header.decode(buffer)
    assert repr(easydist.read_header(memoryview(buffer))).startswith("name")
    theirs = dict(safetensors.deserialize(bytes(buffer)))
    assert {name: bits(value) for name, value in got.items()} == {n: bytes(t["data"]) for n, t in theirs.items()}


@settings(max_examples=launching.examples(200))
@given(st.binary(max_size=40))
@example(b"")
def test_random_bytes_are_refused_or_right(data):
    agrees(bytearray(data))
    agrees(raw(data))
    agrees(raw(b"{" + data))


@pytest.mark.slow
@settings(max_examples=launching.examples(300))
@given(st.data())
def test_mutations_of_a_message_are_refused_or_right(data):
    values = {"a": torch.arange(3.0), "b": torch.tensor([[1, 2]]), "c": torch.empty(0, 2), "z": torch.ones(2) * 1j}
    buffer = message(values, {"key": "text"})
    for _ in range(data.draw(st.integers(1, 3))):
        i, j = data.draw(st.integers(0, len(buffer))), data.draw(st.integers(0, len(buffer)))
        match data.draw(st.sampled_from(["truncate", "byte", "cut", "copy"])):
            case "truncate":
                del buffer[i:]
            case "byte":
                buffer[i : i + 1] = data.draw(st.sampled_from(list(b'0123456789-.eE{}[],:"\\ aU\xff\0'))).to_bytes(
                    1, "big"
                )
            case "cut":
                del buffer[i:j]
            case "copy":
                buffer[i:i] = buffer[i:j]
    agrees(buffer)


sizes = st.sampled_from([0, 1, 2, 3, 8, -1, 2**31, 2**62, 2**63, 2**64, 1.0, True, None, "1"])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F64", "C64", "BOOL", "F4", "X", 1, None]),
        "shape": st.lists(sizes, max_size=3) | sizes,
        "data_offsets": st.lists(sizes, max_size=3) | st.tuples(st.integers(0, 16), st.integers(0, 16)),
    },
    optional={"x": sizes},
)


@pytest.mark.slow
@settings(max_examples=launching.examples(300))
@given(st.dictionaries(st.sampled_from("abc"), ENTRIES | sizes), st.integers(0, 24))
def test_headers_of_odd_values_are_refused_or_right(head, nbytes):
    agrees(raw(head, bytes(nbytes)))
