"""The frame that each rank sends first in a call, and the agreement that results from all frames.

A frame is a header of eight 64-bit numbers, sizes, and a payload. The numbers are the status; the fingerprint of the
call (operation and arguments), of the structure that has to be equal (paths, dtypes, shapes without their free
dimension), and of the properties that may differ (full shapes, leaves that are the same object); the bytes that this
rank is going to send; the time of its arrival; the number of sizes and the number of payload bytes that follow. The
sizes are those along the free dimension, after the verb's own numbers if it sends any. The payload is the rank's data
if it is small: then the frames are the only exchange of the call. A rank that has failed sends the text of its fault as
the payload.

In a large group the ranks first compare the headers alone, by a reduction whose messages do not grow with the group.
Frames follow only if headers differ, or if something comes with them.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from easydist import memory
from easydist.agreement.call import Call
from easydist.agreement.notes import listeners, note_arrivals
from easydist.data import packing
from easydist.data.arithmetic import fingerprint
from easydist.data.packing import Packed
from easydist.groups.communicators import Communicators, Frames
from easydist.liveness.rules import APART
from easydist.transport.reduce_op import ReduceOp

WELL, ABSENT, FAULT = range(3)
"""The status of a rank: it has data, it has none and takes the others', or it has failed."""

FOLDED_FROM = 1000
"""The number of ranks from which headers are compared by a reduction first."""

_NUMBERS = struct.Struct("<8q")
_LATE = int(APART * 1e9)  # nanoseconds
_fingerprint = functools.lru_cache(maxsize=256)(fingerprint)


class CallHeader(NamedTuple):
    """The numbers at the beginning of a frame."""

    status: int
    call: int = 0
    structure: int = 0
    variations: int = 0
    nbytes: int = 0
    came: int = 0
    sizes: int = 0
    payload: int = 0


class Headers(NamedTuple):
    """The headers of all ranks, as one list of numbers for each field of ``CallHeader``."""

    status: list[int]
    call: list[int]
    structure: list[int]
    variations: list[int]
    nbytes: list[int]
    came: list[int]
    sizes: list[int]
    payload: list[int]

    def of_well(self, column: Iterable[int]) -> list[int]:
        """Return the numbers of the ranks that have data."""
        return [number for number, status in zip(column, self.status, strict=True) if status == WELL]

    def are_alike(self) -> bool:
        """True if all ranks have the same status, and make the same call with the same structure."""
        return len({*zip(self.status, self.call, self.structure, strict=True)}) == 1


def header_of(operation: str, call: Call) -> CallHeader:
    """Return the header of a rank that has not failed; the counts of sizes and payload bytes are not set yet."""
    status = ABSENT if call.absent else WELL
    title = _fingerprint(f"{operation}{call.arguments}")
    return CallHeader(status, title, call.structure(), call.variations(), call.nbytes, time.time_ns())


class Agreement:
    """The headers of all ranks, and the payloads, which stay valid until the next agreement of the group.

    Attributes:
        call: This rank's own call.
        nbytes: The bytes that each rank will send.
        absent: The ranks that have no data of their own.
        uniform: True if all ranks with data have the same shapes and the same leaves tied.
        has_payload: True if the data of all ranks came with the headers.
    """

    def __init__(self, call: Call, headers: Headers, frames: Frames | None = None) -> None:
        self.call, self.nbytes = call, headers.nbytes
        self._headers, self._frames = headers, frames
        self.absent: Sequence[int] = ()
        if ABSENT in headers.status:
            self.absent = [rank for rank, status in enumerate(headers.status) if status == ABSENT]
        self.uniform = len({*(headers.of_well(headers.variations) if self.absent else headers.variations)}) <= 1
        self.has_payload = frames is not None and headers.nbytes == headers.payload

    def are_tied_unlike(self, source: int) -> bool:
        """True if leaves of a rank may share memory that the source's do not share; they all have one structure."""
        if self.uniform:
            return False
        headers = self._headers
        usual = {*headers.of_well(headers.structure), headers.variations[source]}
        return not usual.issuperset(headers.of_well(headers.variations))

    def payload(self, rank: int) -> torch.Tensor:
        """Return the payload of a rank; it starts at a multiple of 16."""
        assert self._frames is not None
        return self._frames.each[rank].narrow(0, _start(self._headers.sizes[rank]), self._headers.payload[rank])

    def view(self, rank: int) -> memoryview:
        """Return the payload of a rank as bytes."""
        assert self._frames is not None
        start = rank * self._frames.nbytes + _start(self._headers.sizes[rank])
        return self._frames.view[start : start + self._headers.payload[rank]]

    def payload_of(self, comms: Communicators, rank: int) -> torch.Tensor:
        """Return the payload of a rank on all ranks; all of them call this.

        Cost: one broadcast, unless it came with the headers.
        """
        if self.has_payload:
            return self.payload(rank)
        nbytes = self.nbytes[rank]
        payload = self.call.payload[0] if comms.rank == rank else memory.empty([nbytes], torch.uint8)
        comms.cpu(nbytes).broadcast(payload, rank, async_op=False)
        return payload

    def packed(self, rank: int = 0) -> Packed:
        """Return the leaves that came as payloads, of all ranks that sent as many sizes as this one."""
        assert self._frames is not None
        return self._frames.packed(self.call.tree.layout.packing, _start(self._headers.sizes[rank]))

    def sizes(self) -> list[list[int]] | None:
        """Return ``[r][i]``, the size of rank r's leaf i along the free dimension; None if sizes did not come along."""
        first = len(self.call.numbers)
        return None if self._frames is None or first in self._headers.sizes else self._sent(first, self._headers.sizes)

    def numbers(self) -> list[tuple[int, ...]]:
        """Return the numbers that each rank's call sends to the others."""
        if self._frames is None:
            return [self.call.numbers]
        view, nbytes, stride = self._frames.view, _NUMBERS.size + 8 * len(self.call.numbers), self._frames.nbytes
        rows = [bytes(view[at + _NUMBERS.size : at + nbytes]) for at in range(0, len(view), stride)]
        if rows.count(rows[0]) == len(rows):
            return [self.call.numbers] * len(rows)
        return [struct.unpack(f"<{len(self.call.numbers)}q", row) for row in rows]

    def words(self) -> list[list[int]]:
        """Return the numbers of each rank's call after the first, which is their count: it may differ between ranks."""
        if self._frames is None:
            return [[*self.call.numbers[1:]]]
        counts = self._sent(0, [1] * len(self._headers.sizes))
        return self._sent(1, [1 + count for (count,) in counts])

    def _sent(self, first: int, stops: Sequence[int]) -> list[list[int]]:
        """Return the numbers after each rank's header, from one position to the rank's own."""
        assert self._frames is not None
        view = self._frames.view
        starts = range(_NUMBERS.size, self._frames.rows.numel(), self._frames.nbytes)
        return [
            view[start + 8 * first : start + 8 * stop].cast("q").tolist()
            for start, stop in zip(starts, stops, strict=True)
        ]


def _start(sizes: int) -> int:
    """Return the offset of the payload, a multiple of 16."""
    return _NUMBERS.size + 8 * (sizes + sizes % 2)


def exchange(comms: Communicators, header: CallHeader, sizes: bytes, call: Call) -> Headers:
    """Send this rank's frame, and return the headers of all ranks."""
    frames = comms.frames
    # 8 bytes for an odd number of sizes: the payload begins at a multiple of 16.
    at, room = comms.rank * frames.nbytes, frames.nbytes - _NUMBERS.size - 8
    numbers = struct.pack(f"<{len(call.numbers)}q", *call.numbers) if call.numbers else b""
    # Sizes without room travel in an exchange of their own, if they differ.
    sizes = numbers + sizes if len(numbers) + len(sizes) <= room else numbers
    count = len(sizes) // 8
    # Each rank decides for itself; a payload counts only if all ranks have sent theirs (``has_payload``).
    payload = call.nbytes if (call.payload or call.text) and call.nbytes <= frames.nbytes - _start(count) else 0
    _NUMBERS.pack_into(frames.view, at, *header[:6], count, payload)
    if count:
        frames.view[at + _NUMBERS.size : at + _NUMBERS.size + len(sizes)] = sizes
    stop = _start(count) + payload
    if payload:
        _pack(call, frames, comms.rank, _start(count))
    return _exchange(comms, stop)


def _pack(call: Call, frames: Frames, rank: int, start: int) -> None:
    if call.text:
        at = rank * frames.nbytes + start
        frames.view[at : at + call.nbytes] = call.text
        return
    first = call.payload[0]
    # The usual case: the row has views for such leaves from earlier calls.
    if call.leaves is not None and call.payload is call.leaves.tensors:
        frames.packed(call.leaves.layout.packing, start).pack(rank, call.leaves.tensors)
    elif len(call.payload) == 1 and first.dtype is torch.uint8 and first.is_cpu and first.is_contiguous():  # encoded
        memory.copy(frames.each[rank].data_ptr() + start, first.data_ptr(), first.numel())
    else:
        packing.pack(call.payload, out=frames.each[rank][start : start + call.nbytes])


def room(comms: Communicators) -> int:
    """Return the most bytes that a fault may have, or the payload of a call that sends no numbers and no sizes."""
    return comms.frames.nbytes - _NUMBERS.size


def exchange_fault(comms: Communicators, text: bytes) -> Headers:
    """Send the text of this rank's fault in place of data, and return the headers of all ranks."""
    frames, at = comms.frames, comms.rank * comms.frames.nbytes
    _NUMBERS.pack_into(frames.view, at, *CallHeader(FAULT, came=time.time_ns(), payload=len(text)))
    frames.view[at + _NUMBERS.size : at + _NUMBERS.size + len(text)] = text
    return _exchange(comms, _NUMBERS.size + len(text))


def faults(comms: Communicators, headers: Headers) -> dict[int, bytes]:
    """Return the fault texts of the ranks that have failed."""
    starts = {r: r * comms.frames.nbytes + _NUMBERS.size for r, one in enumerate(headers.status) if one == FAULT}
    return {r: bytes(comms.frames.view[start : start + headers.payload[r]]) for r, start in starts.items()}


def _exchange(comms: Communicators, nbytes: int) -> Headers:
    headers = comms.begin(lambda: _headers(comms, nbytes))
    comms.monitor.is_fresh = False
    if listeners:
        note_arrivals(headers.came)
    return headers


def _headers(comms: Communicators, nbytes: int) -> Headers:
    frames = comms.frames
    headers = _folded(comms) if comms.size >= FOLDED_FROM else None
    if headers is None:
        comms.control.all_gather_upto(frames.rows, nbytes, async_op=False)
        headers = Headers._make(frames.columns.tolist())
    monitor, now = comms.monitor, time.monotonic()
    if (apart := monitor.exchanged(now)) > APART:
        seems_late = time.time_ns() > min(headers.came) + _LATE
        # A rank that came early may have given up since: the frame that it sent before that does not count.
        monitor.check_reports(remote=monitor.listens_after(now, apart, seems_late))
    return headers


def _folded(comms: Communicators) -> Headers | None:
    """Return the headers of all ranks if they are equal and nothing comes with them; else None, on all ranks.

    Of the times of arrival only the earliest and the latest become known, and the ranks whose these are; those of the
    others are returned as the earliest.
    """
    mine = CallHeader._make(_NUMBERS.unpack_from(comms.frames.view, comms.rank * comms.frames.nbytes))
    # The lowest bits of the time become the rank.
    low = (1 << comms.size.bit_length()) - 1
    words = torch.tensor(mine._replace(came=mine.came & ~low | comms.rank), device="cpu")
    both = torch.cat([words, ~words])
    comms.control.all_reduce(both, ReduceOp.MAX, async_op=False)
    most, least = (CallHeader._make(part.tolist()) for part in (both[:8], ~both[8:]))
    if most.sizes or most.payload or most._replace(came=0) != least._replace(came=0):
        return None
    headers = Headers._make([number] * comms.size for number in least._replace(came=least.came & ~low))
    headers.came[most.came & low] = most.came & ~low
    headers.came[comms.rank] = mine.came
    return headers
