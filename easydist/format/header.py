"""The safetensors header: names, dtypes and shapes before the bytes.

A message is a ``u64`` header length, little endian; JSON ``{name: {"dtype", "shape", "data_offsets"}, "__metadata__":
{str: str}}``, padded with spaces so that the data begins at a multiple of 64 bytes; then the bytes, without holes.
Tensors are sorted by descending item size, so each starts at a multiple of its own.

safetensors has no code for complex128. It is written as F64 with a last dimension of 2, and ``__metadata__`` has JSON
``{name: "complex128"}`` under ``easydist.dtypes``. Other readers see the real and imaginary parts.

Source: https://huggingface.co/docs/safetensors/index#format. This module rejects everything that safetensors rejects,
and also duplicate keys, further keys, and messages that exceed the limits below.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from easydist.base import html
from easydist.base.garbage import uncollected
from easydist.data.packing import as_bytes, dtype_name, nbytes, sort_key
from easydist.errors import WireError

MAX_NBYTES = 100_000_000
"""The longest header, as in safetensors."""

MAX_ENTRIES = 100_000
"""The most tensors in one message."""

MAX_MARKS = 8_000_000
"""The most brackets, braces, commas and colons in a header; the parsed header needs about 64 bytes for each."""

MAX_DIMS = 64
"""The most dimensions, as in NumPy and most of torch."""

ALIGNMENT = 64
DTYPES = "easydist.dtypes"

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
# Some of them exist only in newer versions of torch.
_TORCH: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _TORCH.items()}
_PARTS = {torch.complex128: "F64"}
_TOO_LARGE = 2**59
"""The product of the sizes other than 0 from which a shape is refused."""
_INTEGERS = frozenset([int])  # without bool

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_short = _repr.repr


class Entry(NamedTuple):
    """A tensor in a message: its name, its type, and the range of its bytes in the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The names, dtypes, shapes and offsets of the tensors in a file or message; printed as a table.

    Attributes:
        entries: One entry for each tensor, in the order of their bytes, with ``name``, ``dtype``, ``shape``, and the
            offsets ``start`` and ``stop`` of its bytes in the data.
        metadata: The further texts; ``easydist.tree`` is the structure of the tree.
        nbytes: The length of the header, and so the offset of the data.

    Example:
        >>> Header((Entry("weight", torch.float32, (2, 3), 0, 24),), {"format": "pt"}, 128)
        name    dtype    shape   start  stop
        weight  float32  (2, 3)      0    24
        format: pt
    """

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    nbytes: int

    def __repr__(self) -> str:
        rows = [_TITLES, *map(_cells, self.entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join([*(_line(row, widths) for row in rows), *self._further()])

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        more = len(self.entries) - _SHOWN
        rows = html.table(_TITLES, map(_cells, self.entries[:_SHOWN]), _TITLES[:_TEXTS])
        texts = [*([f"… and {more} more"] if more > 0 else []), *self._further()]
        return rows + html.text("\n".join(texts)) if texts else rows

    def _further(self) -> list[str]:
        return [f"{_shown(key)}: {_shown(text)}" for key, text in self.metadata.items()]

    def tensors(self, buffer: bytearray | memoryview | Any) -> dict[str, torch.Tensor]:
        """Return the tensors by name. They share the memory of the writable ``buffer``, except for unaligned ones.

        Args:
            buffer: All bytes of the file or message.
        """
        return {entry.name: _tensor(buffer, entry, self.nbytes + entry.start) for entry in self.entries}


_TITLES = "name", "dtype", "shape", "start", "stop"
_TEXTS = 3
"""The columns with text."""
_SHOWN, _WIDTH = 100, 120
"""The rows that a notebook shows, and the characters of a name or a text."""


def _shown(text: str) -> str:
    """Return a text of a file for a line of a table."""
    text = text[: _WIDTH - 1] + "…" if len(text) > _WIDTH else text
    return text if text.isprintable() else repr(text)


def _cells(entry: Entry) -> tuple[str, ...]:
    return _shown(entry.name), dtype_name(entry.dtype), str(entry.shape), str(entry.start), str(entry.stop)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, strict=True)
    return "  ".join([cell.ljust(n) if i < _TEXTS else cell.rjust(n) for i, (cell, n) in enumerate(cells)])


def _tensor(buffer: Any, entry: Entry, offset: int) -> torch.Tensor:
    if entry.start == entry.stop:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    # Separate tensors, not views of one: views would share a version counter and mislead autograd.
    count = (entry.stop - entry.start) // entry.dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=entry.dtype, count=count, offset=offset)
    if flat.data_ptr() % entry.dtype.itemsize:
        flat = torch.frombuffer(bytearray(memoryview(buffer)[offset:][: nbytes(flat)]), dtype=entry.dtype)
    return flat.view(entry.shape)


def chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Yield a message as byte strings and memoryviews: the header, then each tensor.

    Law: ``decode(buffer := bytearray(b"".join(chunks(ts)))).tensors(buffer)`` equals ``ts`` bit for bit.

    Example:
        >>> message = bytearray(b"".join(chunks({"a": torch.tensor([1, 256], dtype=torch.int16)})))
        >>> len(message), message[8:64].decode()
        (68, '{"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}  ')
        >>> decode(message).tensors(message)
        {'a': tensor([  1, 256], dtype=torch.int16)}

    Args:
        tensors: Dense tensors, with any strides, on any device.
        metadata: Further texts.

    Raises:
        TypeError: safetensors has no code for a dtype, or the metadata is not text.
        ValueError: A limit of this module is exceeded, or a text is not Unicode.

    Cost: a tensor that is not contiguous or not on the CPU is copied just before it is yielded.
    """
    yield encode(tensors, metadata)
    for name in order(tensors):
        if tensors[name].numel():
            yield as_bytes(tensors[name].cpu().contiguous()).numpy().data


def order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names in the order of the data."""
    return sorted(tensors, key=lambda name: (sort_key(tensors[name].dtype), name))


def encode(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a message, for data that is sent separately; arguments and errors as in ``chunks``."""
    header: dict[str, Any] = {}
    metadata = metadata or {}
    stop = 0
    for name in order(tensors):
        tensor = tensors[name]
        start, stop = stop, stop + nbytes(tensor)
        header[name] = {**_coded(name, tensor), "data_offsets": [start, stop]}
    notes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items() if tensor.dtype in _PARTS}
    metadata = {**metadata, **({DTYPES: json.dumps(notes)} if notes else {})}
    if wrong := [pair for pair in metadata.items() if any(type(text) is not str for text in pair)]:
        raise TypeError(f"metadata has to be a dict of str to str, got {_short(dict(wrong))}")
    text = json.dumps(
        {**({"__metadata__": metadata} if metadata else {}), **header}, ensure_ascii=False, separators=(",", ":")
    ).encode()
    marks = _marks(text)
    if "__metadata__" in header or len(header) > MAX_ENTRIES or len(text) > MAX_NBYTES or marks > MAX_MARKS:
        raise ValueError(
            f"{len(header)} tensors and the values beside them need a header of {len(text)} bytes with {marks} "
            f"brackets, braces, commas and colons; a message has at most {MAX_ENTRIES} tensors, none of them named "
            f"'__metadata__', and a header of at most {MAX_NBYTES} bytes with {MAX_MARKS} of these; put many numbers "
            "into a tensor"
        )
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _coded(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    code = _PARTS.get(tensor.dtype) or _CODES.get(tensor.dtype)
    if code is None or (code == "F4" and not tensor.ndim):
        raise TypeError(f"{name or 'the tensor'} is {dtype_name(tensor.dtype)}, which a safetensors file cannot hold")
    shape = [*tensor.shape, 2] if tensor.dtype in _PARTS else list(tensor.shape)
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{name or 'the tensor'} has {tensor.ndim} dimensions, but a message has at most {MAX_DIMS}")
    if code == "F4":
        shape[-1] *= 2
    if _is_too_large(shape):
        raise ValueError(
            f"{name or 'the tensor'} has the shape {tuple(tensor.shape)}, which is too large for a message"
        )
    return {"dtype": code, "shape": shape}


def _is_too_large(shape: Sequence[int]) -> bool:
    """True if torch may be unable to make a tensor of this shape, even if one of the sizes is 0."""
    return math.prod(filter(None, shape)) >= _TOO_LARGE


def decode(buffer: Any, apart: bool = False) -> Header:
    """Read and check the header of a message; the data is not accessed.

    Args:
        buffer: The whole message, as any bytes-like object.
        apart: True if the buffer is the header alone, and the data is sent separately.

    Raises:
        WireError: It is not a valid message. The text names the entry and the fault.

    Cost: 64 bytes for each bracket, brace, comma and colon in the header, of which there are at most ``MAX_MARKS``;
    time linear in the header.
    """
    view = memoryview(buffer).cast("B")
    begin = 8 + _length(view)
    with uncollected():
        entries, metadata = _entries(bytes(view[8:begin]))
    elsewhere = entries[-1].stop if apart and entries else 0
    _check_cover(entries, len(view) - begin + elsewhere)
    return Header(tuple(entries), metadata, begin)


def _entries(text: bytes) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries in the order of their data, and the metadata."""
    header = parse_json(text)  # an object, as it begins with "{"
    metadata = _texts(header.pop("__metadata__", {}), "__metadata__")
    if len(header) > MAX_ENTRIES:
        raise WireError(f"the header has {len(header)} entries, more than {MAX_ENTRIES}")
    notes = _texts(parse_json(metadata.pop(DTYPES, "{}").encode()), DTYPES)
    if unknown := notes.keys() - header.keys():
        raise WireError(f"{DTYPES} names {_short(min(unknown))}, which is not an entry")
    entries = [_entry(name, value, notes.get(name)) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    return entries, metadata


def _length(view: memoryview) -> int:
    if len(view) < 8:
        raise WireError(f"{len(view)} bytes are too few: the length of a safetensors header alone takes 8")
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        if bytes(view[:4]) == b"PK\x03\x04":
            raise WireError("this is a zip archive, as torch.save writes, not a safetensors file; use torch.load")
        if bytes(view[:8]) == b"version ":
            raise WireError("this is Git LFS's pointer to a file, not the file; fetch it with git lfs pull")
        if bytes(view[:8]).isascii() and bytes(view[:8]).decode().isprintable():
            raise WireError("this is text, not a safetensors file")
        raise WireError(f"the header should have {length} bytes, but there are {len(view) - 8}")
    if length > MAX_NBYTES:
        raise WireError(f"the header has {length} bytes, more than {MAX_NBYTES}")
    if bytes(view[8:9]) != b"{":
        raise WireError("the header does not begin with '{'")
    return length


def parse_json(text: bytes) -> Any:
    """Parse JSON without duplicate keys, in bounded memory.

    Raises:
        WireError: It is not JSON, or has a key twice, or more than ``MAX_MARKS`` brackets, braces, commas and colons.
    """
    if _marks(text) > MAX_MARKS:
        raise WireError(f"the header has more than {MAX_MARKS} brackets, braces, commas and colons")
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_int=_integer)
    except WireError:
        raise
    except RecursionError:
        raise WireError("the header is nested too deeply") from None
    except ValueError as error:  # ValueError also comes from the UTF-8 decoder
        raise WireError(f"the header is not JSON: {_short(str(error))}") from None


def _marks(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b",", b":")))


def _integer(digits: str) -> int | float:
    """Parse an integer; return a float for -0, which safetensors rejects as an integer, and for very long ones.

    Python refuses to read very long integers.
    """
    return float(digits) if digits == "-0" or len(digits) > 20 else int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise WireError(f"the key {_short(twice)} appears twice in one object")
    return data


def _texts(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise WireError(f"{what} is not an object of strings")
    for text in (text for pair in value.items() for text in pair):
        _check_text(text, what)
    return value


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WireError(f"{what} holds half of a surrogate pair") from None


def _entry(name: str, value: Any, note: str | None) -> Entry:
    try:
        _check_text(name, "the name")
        return Entry(name, *_described(value, note))
    except WireError as error:
        raise WireError(f"entry {_short(name)}: {error}") from None


def _described(value: Any, note: str | None) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"needs exactly dtype, shape and data_offsets, got {_short(value)}")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = _TORCH.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise WireError(f"unknown dtype {_short(code)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMS or _is_too_large(shape):
        raise WireError(f"bad shape {_short(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WireError(f"bad data_offsets {_short(offsets)}")
    dtype, shape = _torch_side(code, dtype, shape, note)
    start, stop = offsets
    if (needed := math.prod(shape) * dtype.itemsize) != stop - start:
        what = f"{dtype_name(dtype)} {_short(tuple(shape))}"
        raise WireError(f"{what} needs {needed} bytes, but data_offsets {offsets} hold {stop - start}")
    return dtype, tuple(shape), start, stop


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list) or not _INTEGERS.issuperset(map(type, value)):
        return False
    return not value or (min(value) >= 0 and max(value) < 2**63)


def _torch_side(code: str, dtype: torch.dtype, shape: list[int], note: str | None) -> tuple[torch.dtype, list[int]]:
    """Return dtype and shape in torch, where complex numbers are not pairs, and an item holds two 4-bit numbers."""
    if note is not None:
        whole = next((whole for whole, part in _PARTS.items() if (dtype_name(whole), part) == (note, code)), None)
        if whole is None or shape[-1:] != [2]:
            raise WireError(f"{code} {_short(shape)} cannot hold {_short(note)}")
        return whole, shape[:-1]
    if code != "F4":
        return dtype, shape
    if not shape or shape[-1] % 2:
        raise WireError(f"F4 needs an even last dimension, got {_short(shape)}")
    return dtype, [*shape[:-1], shape[-1] // 2]


def _check_cover(entries: list[Entry], data_nbytes: int) -> None:
    """Check that each entry begins where the previous one ends, and that the last one ends with the data."""
    end = 0
    for entry in entries:
        if entry.start != end:
            kind = "overlaps the entry before it" if entry.start < end else "leaves a hole before it"
            raise WireError(f"entry {_short(entry.name)}: begins at {entry.start}, not at {end}: it {kind}")
        end = entry.stop
    if end != data_nbytes:
        raise WireError(f"the entries need {end} bytes of data, but there are {data_nbytes}")
