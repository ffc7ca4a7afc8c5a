"""One exchange of frames before the data: do all ranks make the same call, and is every rank well?

A frame is eight 64-bit numbers, sizes, and a payload. The numbers: status; fingerprints of the call (operation and
arguments), of the structure that has to be equal (paths, dtypes, shapes without their free dimension) and of what may
differ (full shapes, which leaves are the same object); the bytes that this rank is going to send; when it came; how
many sizes and how many bytes of payload follow. The sizes are those along the free dimension. The payload is what the
rank sends, where it is small: then the frames are the only exchange of the call. A rank that fails sends the text of
its fault instead. Where fingerprints differ that must not, descriptions are exchanged. In both cases every rank raises
the same error before any target is written.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from easydist import wire
from easydist.calling import calling, listeners, note_arrivals, note_data
from easydist.comms import Communicators
from easydist.disagreement import SAME, calls_text, fault_text, trees_text
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.leaves import Layout, Leaves, Row
from easydist.plan import fingerprint

_WELL, _ABSENT, _FAULT = range(3)
_NUMBERS = struct.Struct("<8q")
_LATE = 50_000_000  # nanoseconds
CHECKED = os.environ.get("EASYDIST_CHECK", "1") != "0"
"""Whether calls are compared unless they say otherwise; the same on all ranks."""

_fingerprint = functools.lru_cache(maxsize=256)(fingerprint)


@dataclass(slots=True)
class Call:
    """What one rank is about to do.

    Attributes:
        arguments: Those that every rank has to give alike, by name.
        leaves: The data.
        dim: The dimension whose size may differ between ranks; None where there is no such dimension.
        nbytes: What this rank will send, where the others have to know.
        payload: What this rank will send, ``nbytes`` in all; it travels with the header if it is small.
        follows: Data follows in any case, which ``nbytes`` does not say.
        absent: This rank has no data of its own and takes what comes.
        advice: What to do where shapes differ; ``{dim}`` stands for the first dimension in which they do.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    leaves: Leaves | None = None
    dim: int | None = None
    nbytes: int = 0
    payload: Sequence[torch.Tensor] = ()
    follows: bool = False
    absent: bool = False
    advice: str = SAME

    def title(self, operation: str) -> str:
        """The call as it would be written: ``gather(dst=None, dim=0)``."""
        return f"{operation}({', '.join([f'{name}={value!r}' for name, value in self.arguments.items()])})"

    def rows(self, dim: int | None = None) -> list[Row]:
        """The leaves as (path, dtype, shape), with -1 for the size along ``dim``."""
        return self.leaves.layout.rows(dim) if self.leaves else []

    def structure(self) -> int:
        """The fingerprint of what has to be equal on all ranks."""
        if self.leaves is None:
            return 0
        layout = self.leaves.layout
        return layout.fingerprint if self.dim is None else layout.free(self.dim)[1]

    def variations(self) -> int:
        """The fingerprint of what may differ: all sizes, which leaves are the same object."""
        if self.leaves is None:
            return 0
        layout, ties = self.leaves.layout, self.leaves.ties
        return layout.fingerprint if ties is None else fingerprint((layout.fingerprint, ties))

    def sizes(self) -> bytes:
        """Of each leaf the size along the free dimension, as 64-bit numbers."""
        if self.leaves is None or self.dim is None:
            return b""
        return _sizes(self.leaves.layout, self.dim)


@functools.lru_cache(maxsize=256)
def _sizes(layout: Layout, dim: int) -> bytes:
    sizes = [shape[dim] for shape, dim in zip(layout.shapes, layout.free(dim)[0], strict=True)]
    return struct.pack(f"<{len(sizes)}q", *sizes)


class _Header(NamedTuple):
    status: int
    call: int
    structure: int
    variations: int
    nbytes: int
    came: int
    sizes: int
    payload: int


class Agreement:
    """What the ranks told each other; what arrived with it is there until the next agreement of the group.

    Attributes:
        uniform: All ranks that have data have the same shapes and the same leaves tied.
        has_payload: The data of all ranks came with the headers.
    """

    def __init__(self, headers: Sequence[_Header], rows: torch.Tensor | None = None) -> None:
        self.uniform = len({header.variations for header in headers if header.status == _WELL}) <= 1
        self.has_payload = rows is not None and all(header.nbytes == header.payload for header in headers)
        self._headers, self._rows = headers, rows

    @property
    def nbytes(self) -> list[int]:
        """What each rank will send."""
        return [header.nbytes for header in self._headers]

    @property
    def absent(self) -> list[int]:
        """The ranks that have no data of their own."""
        return [rank for rank, header in enumerate(self._headers) if header.status == _ABSENT]

    def payload(self, rank: int) -> torch.Tensor:
        """What a rank sent along, as bytes that start at a multiple of 16."""
        assert self._rows is not None
        start = _start(self._headers[rank].sizes)
        return self._rows[rank, start : start + self._headers[rank].payload]

    def payloads(self) -> torch.Tensor:
        """What all ranks sent along, one row each; all of one length."""
        assert self._rows is not None
        start = _start(self._headers[0].sizes)
        return self._rows[:, start : start + self._headers[0].payload]

    def sizes(self) -> list[list[int]] | None:
        """``[r][i]``: the size of rank r's leaf i along the free dimension; None where they did not come along."""
        if self._rows is None or not all(header.sizes for header in self._headers):
            return None
        return [
            row[_NUMBERS.size : _NUMBERS.size + 8 * header.sizes].view(torch.int64).tolist()
            for row, header in zip(self._rows, self._headers, strict=True)
        ]


def _start(sizes: int) -> int:
    """Where the payload begins: at a multiple of 16."""
    return _NUMBERS.size + 8 * (sizes + sizes % 2)


def agree(
    comms: Communicators, operation: str, prepare: Callable[[], Call], check: bool | None = None
) -> tuple[Call, Agreement]:
    """Make this rank's call known to all ranks, learn theirs, and compare.

    Args:
        comms: The group.
        operation: The verb's name.
        prepare: Makes the call; what it raises is made known too.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says.

    Returns:
        This rank's call, and what the ranks told each other.

    Raises:
        DisagreementError: The calls do not match; the same text on every rank.
        RemoteError: ``prepare`` raised on some ranks; the same text on every rank. Where it raised the same error on
            every rank, that error itself.

    Cost: one all-gather of 64 bytes per rank, sizes and small payloads included; nothing in a world of one.
    """
    if comms.size == 1:
        return alone(prepare)
    try:
        call = prepare()
        if listeners:
            _note(call)
        sizes = call.sizes()
        mine = _header(operation, call)
    except Exception as fault:
        _raise_together(comms, _exchange_faults(comms, operation, fault), fault)
    headers = _exchange_frames(comms, mine, sizes, call)
    if any(header[:3] != mine[:3] for header in headers):
        _compare(comms, operation, call, headers, check)
    agreement = Agreement(headers, comms.frames.rows)
    comms.watch.is_awaited = call.follows or not agreement.has_payload
    return call, agreement


def _compare(comms: Communicators, operation: str, call: Call, headers: Sequence[_Header], check: bool | None) -> None:
    """Raise on all ranks where a rank has failed, or where something differs that must not."""
    if any(header.status == _FAULT for header in headers):
        _raise_together(comms, _faults(comms, headers), None)
    is_same_call = len({header.call for header in headers}) == 1
    is_same_structure = len({header.structure for header in headers if header.status == _WELL}) <= 1
    if (CHECKED if check is None else check) and not (is_same_call and is_same_structure):
        _disagree(comms, operation, call)


def trust(comms: Communicators, prepare: Callable[[], Call], check: bool | None) -> tuple[Call, Agreement] | None:
    """What ``agree`` gives, without an exchange, where calls shall not be compared; else None."""
    if comms.size > 1 and (CHECKED if check is None else check):
        return None
    call, agreement = alone(prepare)
    if call.absent and comms.size > 1:
        raise ValueError("with check=False every rank has to pass its own tree, not None")
    return call, agreement


def alone(prepare: Callable[[], Call]) -> tuple[Call, Agreement]:
    """What ``agree`` gives where there is nobody to agree with."""
    call = prepare()
    if listeners:
        _note(call)
    return call, Agreement([_Header(_ABSENT if call.absent else _WELL, 0, 0, 0, call.nbytes, 0, 0, 0)])


def _note(call: Call) -> None:
    if call.leaves is not None or call.payload:
        note_data(call.nbytes if call.leaves is None else call.leaves.layout.packing.nbytes)


def report(comms: Communicators, operation: str, fault: BaseException | None = None) -> None:
    """Meet all ranks in ``operation``, and tell them of a fault where there is one.

    Raises:
        RemoteError: A rank reported a fault.
        DisagreementError: A rank called something else.
    """
    if isinstance(fault, EasydistError) and fault.raised_in is comms:
        raise fault  # the others have it already

    def prepare() -> Call:
        if fault is not None:
            raise _Reported(_text(fault)) from fault
        return Call()

    with calling(comms, operation):
        agree(comms, operation, prepare)


class _Reported(Exception):
    """Carries the text of an exception that is not an ``Exception`` (SystemExit, KeyboardInterrupt) to all ranks."""


def _header(operation: str, call: Call) -> _Header:
    status = _ABSENT if call.absent else _WELL
    title = _fingerprint(f"{operation}{call.arguments}")
    return _Header(status, title, call.structure(), call.variations(), call.nbytes, time.time_ns(), 0, 0)


def _exchange_frames(comms: Communicators, mine: _Header, sizes: bytes, call: Call) -> list[_Header]:
    frames = comms.frames
    at, room = comms.rank * frames.nbytes, frames.nbytes - _NUMBERS.size - 8
    count = len(sizes) // 8 if len(sizes) <= room else 0
    payload = call.nbytes if call.payload and call.nbytes <= frames.nbytes - _start(count) else 0
    _NUMBERS.pack_into(frames.view, at, *mine[:6], count, payload)
    if count:
        frames.view[at + _NUMBERS.size : at + _NUMBERS.size + len(sizes)] = sizes
    stop = _start(count) + payload
    if payload:
        _pack(call, frames.rows[comms.rank, _start(count) : stop])
    return _all_frames(comms, stop)


def _pack(call: Call, out: torch.Tensor) -> None:
    if call.leaves is not None and call.payload is call.leaves.tensors:
        call.leaves.layout.packing.pack(call.payload, out)
    else:
        wire.pack(call.payload, out=out)


def _all_frames(comms: Communicators, nbytes: int) -> list[_Header]:
    headers = comms.begin(lambda: _headers(comms, nbytes))
    comms.watch.is_awaited = comms.watch.is_fresh = False
    if listeners:
        note_arrivals([header.came for header in headers])
    return headers


def _headers(comms: Communicators, nbytes: int) -> list[_Header]:
    frames = comms.frames
    comms.control.all_gather_upto(frames.rows, nbytes, async_op=False)
    headers = [_Header(*_NUMBERS.unpack_from(frames.view, r * frames.nbytes)) for r in range(comms.size)]
    if time.time_ns() > min([header.came for header in headers]) + _LATE:
        comms.watch.hear()  # who came early may have given up: what it sent before that is not a call
    return headers


def _exchange_faults(comms: Communicators, operation: str, fault: Exception) -> dict[int, dict[str, Any]]:
    """Tell the others of a fault of this rank; gives the faults of all ranks."""
    frames = comms.frames
    in_body, site = isinstance(fault, _Reported), comms.watch.site
    room = frames.nbytes - _NUMBERS.size - len(json.dumps([operation, in_body, site, ""]))
    text = json.dumps([operation, in_body, site, _text(fault)[: room // 12]]).encode()  # a character has up to 12 bytes
    at = comms.rank * frames.nbytes
    _NUMBERS.pack_into(frames.view, at, _FAULT, 0, 0, 0, 0, time.time_ns(), 0, len(text))
    frames.view[at + _NUMBERS.size : at + _NUMBERS.size + len(text)] = text
    return _faults(comms, _all_frames(comms, _NUMBERS.size + len(text)))


def _faults(comms: Communicators, headers: Sequence[_Header]) -> dict[int, dict[str, Any]]:
    found = {}
    for rank, header in enumerate(headers):
        if header.status == _FAULT:
            start = rank * comms.frames.nbytes + _NUMBERS.size
            operation, in_body, site, text = json.loads(bytes(comms.frames.view[start : start + header.payload]))
            found[rank] = {"operation": operation, "in_body": in_body, "site": site, "text": text}
    return found


def _raise_together(comms: Communicators, faults: dict[int, dict[str, Any]], mine: Exception | None) -> NoReturn:
    """Raise the same error on every rank."""
    if mine is not None and len(faults) == comms.size and len({one["text"] for one in faults.values()}) == 1:
        raise mine
    error = RemoteError(fault_text(faults))
    error.raised_in = comms
    raise error from mine


def _disagree(comms: Communicators, operation: str, call: Call) -> NoReturn:
    """Exchange the descriptions and raise the same error on every rank."""
    mine = {
        "title": call.title(operation),
        "operation": operation,
        "site": comms.watch.site,
        "rows": call.rows(),
        "fixed": call.rows(call.dim),
        "absent": call.absent,
        "advice": call.advice,
    }
    every = _exchange_json(comms, mine)
    same_call = len({one["title"] for one in every}) == 1
    error = DisagreementError(trees_text(every) if same_call else calls_text(every))
    error.raised_in = comms
    raise error


def _exchange_json(comms: Communicators, value: dict[str, Any]) -> list[dict[str, Any]]:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.empty(comms.size, dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(sizes, torch.tensor([data.numel()], device="cpu"), async_op=False)
    outputs = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
    comms.control.all_gather_v(outputs, data, async_op=False)
    return [json.loads(bytes(output.numpy())) for output in outputs]


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # an error without a text must not keep this rank from the others
        text = ""
    if isinstance(error, _Reported):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
