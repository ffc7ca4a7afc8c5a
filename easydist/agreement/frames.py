"""The frame that each rank sends first in a call, and the agreement that results from all frames.

A frame is a header of eight 64-bit numbers, sizes, and a payload. The numbers are the status; the fingerprint of the
call (operation and arguments), of the structure that has to be equal (paths, dtypes, shapes without their free
dimension), and of the properties that may differ (full shapes, leaves that are the same object); the bytes that this
rank is going to send; the time of its arrival; the number of sizes and the number of payload bytes that follow. The
sizes are those along the free dimension. The payload is the rank's data if it is small: then the frames are the only
exchange of the call. A rank that has failed sends the text of its fault as the payload.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from easydist import memory
from easydist.agreement.call import Call
from easydist.agreement.notes import listeners, note_arrivals
from easydist.data import packing
from easydist.data.plan import fingerprint
from easydist.groups.communicators import Communicators
from easydist.liveness.rules import APART

WELL, ABSENT, FAULT = range(3)
"""The status of a rank: it has data, it has none and takes the others', or it has failed."""

_NUMBERS = struct.Struct("<8q")
_LATE = int(APART * 1e9)  # nanoseconds
_fingerprint = functools.lru_cache(maxsize=256)(fingerprint)


class Header(NamedTuple):
    """The numbers at the beginning of a frame."""

    status: int
    call: int = 0
    structure: int = 0
    variations: int = 0
    nbytes: int = 0
    came: int = 0
    sizes: int = 0
    payload: int = 0


def header_of(operation: str, call: Call) -> Header:
    """Return the header of a rank that has not failed; the counts of sizes and payload bytes are not set yet."""
    status = ABSENT if call.absent else WELL
    title = _fingerprint(f"{operation}{call.arguments}")
    return Header(status, title, call.structure(), call.variations(), call.nbytes, time.time_ns())


class Agreement:
    """The headers of all ranks, and the payloads, which stay valid until the next agreement of the group.

    Attributes:
        call: This rank's own call.
        absent: The ranks that have no data of their own.
        uniform: True if all ranks with data have the same shapes and the same leaves tied.
        has_payload: True if the data of all ranks came with the headers.
    """

    def __init__(self, call: Call, headers: Sequence[Header], rows: torch.Tensor | None = None) -> None:
        self.call = call
        self.absent = [rank for rank, header in enumerate(headers) if header.status == ABSENT]
        self.uniform = len({header.variations for header in headers if header.status == WELL}) <= 1
        self.has_payload = rows is not None and all(header.nbytes == header.payload for header in headers)
        self._headers, self._rows = headers, rows

    @property
    def nbytes(self) -> list[int]:
        """The bytes that each rank will send."""
        return [header.nbytes for header in self._headers]

    def tied_unlike(self, source: int) -> list[int]:
        """Return the ranks with leaves that share memory in another way than the source's; all have one structure."""
        if source >= len(self._headers):  # there was no exchange
            return []
        separate = {header.structure for header in self._headers if header.status == WELL}
        usual = {*separate, self._headers[source].variations}
        return [r for r, one in enumerate(self._headers) if one.status == WELL and one.variations not in usual]

    def payload(self, rank: int) -> torch.Tensor:
        """Return the payload of a rank; it starts at a multiple of 16."""
        assert self._rows is not None
        start = _start(self._headers[rank].sizes)
        return self._rows[rank, start : start + self._headers[rank].payload]

    def payloads(self) -> torch.Tensor:
        """Return the payloads of all ranks, one row each; all have the same length."""
        assert self._rows is not None
        start = _start(self._headers[0].sizes)
        return self._rows[:, start : start + self._headers[0].payload]

    def sizes(self) -> list[list[int]] | None:
        """Return ``[r][i]``, the size of rank r's leaf i along the free dimension; None if sizes did not come along."""
        if self._rows is None or not all(header.sizes for header in self._headers):
            return None
        return [
            row[_NUMBERS.size : _NUMBERS.size + 8 * header.sizes].view(torch.int64).tolist()
            for row, header in zip(self._rows, self._headers, strict=True)
        ]


def _start(sizes: int) -> int:
    """Return the offset of the payload, a multiple of 16."""
    return _NUMBERS.size + 8 * (sizes + sizes % 2)


def exchange(comms: Communicators, header: Header, sizes: bytes, call: Call) -> list[Header]:
    """Send this rank's frame, and return the headers of all ranks."""
    frames = comms.frames
    at, room = comms.rank * frames.nbytes, frames.nbytes - _NUMBERS.size - 8
    count = len(sizes) // 8 if len(sizes) <= room else 0
    payload = call.nbytes if call.payload and call.nbytes <= frames.nbytes - _start(count) else 0
    _NUMBERS.pack_into(frames.view, at, *header[:6], count, payload)
    if count:
        frames.view[at + _NUMBERS.size : at + _NUMBERS.size + len(sizes)] = sizes
    stop = _start(count) + payload
    if payload:
        _pack(call, frames.rows[comms.rank, _start(count) : stop])
    return _exchange(comms, stop)


def _pack(call: Call, out: torch.Tensor) -> None:
    first = call.payload[0]
    if len(call.payload) == 1 and first.dtype is torch.uint8 and first.is_cpu and first.is_contiguous():  # encoded
        memory.copy(out.data_ptr(), first.data_ptr(), first.numel())
    elif call.leaves is not None and call.payload is call.leaves.tensors:
        call.leaves.layout.packing.pack(call.payload, out)
    else:
        packing.pack(call.payload, out=out)


def room_for_fault(comms: Communicators) -> int:
    """Return the most bytes that a fault may have."""
    return comms.frames.nbytes - _NUMBERS.size


def exchange_fault(comms: Communicators, text: bytes) -> list[Header]:
    """Send the text of this rank's fault in place of data, and return the headers of all ranks."""
    frames, at = comms.frames, comms.rank * comms.frames.nbytes
    _NUMBERS.pack_into(frames.view, at, *Header(FAULT, came=time.time_ns(), payload=len(text)))
    frames.view[at + _NUMBERS.size : at + _NUMBERS.size + len(text)] = text
    return _exchange(comms, _NUMBERS.size + len(text))


def faults(comms: Communicators, headers: Sequence[Header]) -> dict[int, bytes]:
    """Return the fault texts of the ranks that have failed."""
    starts = {r: r * comms.frames.nbytes + _NUMBERS.size for r, one in enumerate(headers) if one.status == FAULT}
    return {r: bytes(comms.frames.view[start : start + headers[r].payload]) for r, start in starts.items()}


def _exchange(comms: Communicators, nbytes: int) -> list[Header]:
    headers = comms.begin(lambda: _headers(comms, nbytes))
    comms.monitor.is_fresh = False
    if listeners:
        note_arrivals([header.came for header in headers])
    return headers


def _headers(comms: Communicators, nbytes: int) -> list[Header]:
    frames = comms.frames
    comms.control.all_gather_upto(frames.rows, nbytes, async_op=False)
    headers = [Header(*_NUMBERS.unpack_from(frames.view, r * frames.nbytes)) for r in range(comms.size)]
    monitor, now = comms.monitor, time.monotonic()
    if (apart := monitor.exchanged(now)) > APART:
        seems_late = time.time_ns() > min([header.came for header in headers]) + _LATE
        # A rank that came early may have given up since: the frame that it sent before that does not count.
        monitor.check_reports(remote=monitor.listens_after(now, apart, seems_late))
    return headers
