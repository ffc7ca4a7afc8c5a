"""The receive buffers of a tensor dict: one message for each large tensor, one for all others of a device type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from easydist import memory
from easydist.data import packing
from easydist.data.backing import mark_written
from easydist.errors import WireError
from easydist.format.header import Entry, Header
from easydist.groups.communicators import Communicators
from easydist.verbs.buckets import LARGE, at_once


def coalesced(
    comms: Communicators, kinds: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, torch.device, Sequence[int]]]:
    """Yield the device type, device and tensors of each message; sender and receiver get the same messages.

    The grouping depends only on the device types and sizes of the tensors.
    """
    for kind in dict.fromkeys(kinds):
        there = comms.data(torch.device(kind)).get_device()
        members = [i for i, other in enumerate(kinds) if other == kind and sizes[i]]
        yield from ((kind, there, bucket) for bucket in at_once(members, sizes, LARGE).groups())


def filled(head: Header, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors by name, from data that came along; each gets its own memory."""
    sizes = list(map(entry_nbytes, head.entries))
    demand_nbytes(data, sum(sizes))
    parts = zip(head.entries, data.split(sizes), strict=True)
    return {entry.name: part.view(entry.dtype).view(entry.shape).clone() for entry, part in parts}


def demand_nbytes(data: torch.Tensor, nbytes: int) -> None:
    """Check that the data has exactly this length.

    Raises:
        WireError: It has another length.
    """
    if data.numel() != nbytes:
        raise WireError(f"{data.numel()} bytes of data came with it, not {nbytes}")


def entry_nbytes(entry: Entry) -> int:
    """Return the bytes of a tensor."""
    return entry.stop - entry.start


class ReceiveBuffer:
    """The memory for one message.

    Args:
        kind: The device type of the data.
        there: The device on which it arrives.
        entries: The tensors of the message.
        targets: The leaves of ``into`` by the names of the entries; None for new memory.

    Attributes:
        kind: The device type of the data.
        buffer: The memory into which the message is received.
        tensors: The tensors of the message, by name; they have their values after ``finish``.
    """

    def __init__(
        self, kind: str, there: torch.device, entries: Sequence[Entry], targets: Mapping[str, Any] | None
    ) -> None:
        self.kind, self._there = kind, there
        self.tensors: dict[str, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if len(entries) == 1 and (place := self._place(entries[0], targets)) is not None:
            self.buffer, self.tensors[entries[0].name] = packing.as_bytes(place), place
        else:
            self.buffer = memory.empty([sum(map(entry_nbytes, entries))], torch.uint8, there)
            self._cut(entries, kind if targets is None else None)

    def _place(self, entry: Entry, targets: Mapping[str, Any] | None) -> torch.Tensor | None:
        """Return memory into which a message of one tensor can arrive without a copy; None if there is none.

        It is the target, or the tensor of the result.
        """
        target = targets.get(entry.name) if targets is not None else None
        if _fits(target, entry, self._there):
            return target.detach()  # type: ignore[no-any-return, union-attr]
        if targets is None and self.kind != self._there.type:  # a device that the group's communicators cannot reach
            return None
        return memory.empty(entry.shape, entry.dtype, self._there)

    def _cut(self, entries: Sequence[Entry], kind: str | None) -> None:
        """Set the tensors for the parts of the buffer: new ones, or views if they are copied to targets anyway."""
        parts = self.buffer.split([entry_nbytes(entry) for entry in entries])
        for entry, part in zip(entries, parts, strict=True):
            if kind is None:
                self.tensors[entry.name] = part.view(entry.dtype).view(entry.shape)
            else:
                tensor = self.tensors[entry.name] = empty(entry, kind)
                self._copies.append((packing.as_bytes(tensor), part))

    def finish(self) -> None:
        """Copy the received data into the tensors that are not views of the buffer; autograd notices the others."""
        mark_written([self.buffer])
        for target, part in self._copies:
            target.copy_(part)
        self._copies = []


def _fits(target: Any, entry: Entry, device: torch.device) -> bool:
    """True if a message can arrive in the target itself."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and (target.dtype, tuple(target.shape), target.device.type) == (entry.dtype, entry.shape, device.type)
        and target.layout is torch.strided
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )


def empty(entry: Entry, kind: str) -> torch.Tensor:
    """Return an uninitialised tensor for an entry.

    Raises:
        RuntimeError: There is no device of this kind.
    """
    try:
        return memory.empty(entry.shape, entry.dtype, kind)
    except (RuntimeError, AssertionError) as error:
        raise RuntimeError(
            f"{entry.name or 'the tensor'} is on {kind}, where this process cannot make a tensor ({error}); pass into="
        ) from error
