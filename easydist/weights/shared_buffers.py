"""Broadcasts through buffers on GPUs that several processes have mapped (CUDA IPC), so that no byte visits the CPU.

Each source has a buffer of two halves. It copies packets into one half until the next packet does not fit; then a
barrier tells that this half is full. While the receivers copy from it, the source fills the other one, which all have
left, since they have reached the barrier after it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from easydist import settings
from easydist.agreement.agree import judged
from easydist.base.torch_private import cuda_handle, cuda_storage, foreach_copy, release_cuda_handle
from easydist.groups.communicators import Communicators
from easydist.transport.work import TorchWork
from easydist.weights.schedule import Packet

LEAST = 1 << 22
"""The bytes from which opening the buffers pays off."""

_NO_COUNTER = b"/none", 0
"""The name of the file that counts the processes that have mapped memory, and the place in it: there is none."""


class SharedBuffers:
    """A communicator for broadcasts whose sources have buffers that all receivers have mapped.

    All ranks begin the same broadcasts, and wait for them, in the same order.

    Args:
        comms: The group.
        buffers: The buffers by the rank of their source, each of at least two halves; those of a rank that neither
            sends nor receives may be missing.
        room: The bytes of a half, at least those of the largest packet.
        device: This rank's device.
    """

    def __init__(
        self, comms: Communicators, buffers: Mapping[int, torch.Tensor], room: int, device: torch.device
    ) -> None:
        self._comms, self._buffers, self._room, self._device = comms, dict(buffers), room, device
        self._begun: list[tuple[int, int, torch.Tensor]] = []  # those that this rank sends or receives
        self._filled: Counter[int] = Counter()
        self.turn = 0

    def get_device(self) -> torch.device:
        """Return the device of the data."""
        return self._device

    def multicast(self, buffer: torch.Tensor, root: int, ranks: Container[int], async_op: bool = True) -> TorchWork:
        """Send the bytes of ``root`` to these ranks, once its half is full or somebody waits for them."""
        if self._filled[root] + buffer.numel() > self._room:
            self.deliver()
        if root == self._comms.rank or self._comms.rank in ranks:
            self._begun.append((root, self._filled[root], buffer))
        self._filled[root] += buffer.numel()
        return TorchWork([_Delivery(self, self.turn)])

    def deliver(self) -> None:
        """Deliver all broadcasts that have begun."""
        mine, theirs = self._copies(is_source=True), self._copies(is_source=False)
        self._copy([part for part, _ in mine], [buffer for _, buffer in mine])
        self._comms.control.barrier(async_op=False)
        self._copy([buffer for _, buffer in theirs], [part for part, _ in theirs])
        self._begun.clear()
        self._filled.clear()
        self.turn += 1

    def _copies(self, is_source: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts of buffers that this rank writes or reads, each with its data."""
        start = self.turn % 2 * self._room
        return [
            (self._buffers[root].narrow(0, start + offset, data.numel()), data)
            for root, offset, data in self._begun
            if root in self._buffers and (root == self._comms.rank) is is_source
        ]

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if targets:
            foreach_copy(targets, sources)
            if not targets[0].is_cpu:
                torch.accelerator.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Unmap the buffers, from which all has been delivered; once all ranks have, their memory may be used again."""
        for root in self._buffers.keys() - {self._comms.rank}:
            del self._buffers[root]
        self._comms.control.barrier(async_op=False)


class _Delivery:
    """A broadcast under way."""

    def __init__(self, buffers: SharedBuffers, turn: int) -> None:
        self._buffers, self._turn = buffers, turn

    def wait(self, timeout: timedelta | None = None) -> None:
        """Deliver it, and all others that have begun, unless that has happened."""
        if self._buffers.turn == self._turn:
            self._buffers.deliver()

    def is_completed(self) -> bool:
        """True if it has been delivered."""
        return self._buffers.turn > self._turn


def opened(
    comms: Communicators, operation: str, packets: Iterable[Packet], bucket_nbytes: int, receives: bool
) -> SharedBuffers | None:
    """Return the buffers for the packets of GPUs, if every receiver can map those of all sources; else None.

    Args:
        comms: The group.
        operation: The verb's name.
        packets: The packets, the same on all ranks.
        bucket_nbytes: The most bytes under way.
        receives: True if this rank receives.

    Cost: two exchanges of reports; a tenth of a millisecond to share a buffer and to map it.
    """
    totals: Counter[int] = Counter()
    for packet in packets:
        totals[packet.root] += packet.nbytes if packet.kind == "cuda" else 0
    if sum(totals.values()) < LEAST:
        return None
    room = min(bucket_nbytes // 2, max(totals.values()))
    buffers: dict[int, torch.Tensor] = {}
    offers = judged(comms, operation, lambda: _offer(buffers, comms.rank, room) if totals[comms.rank] else {})
    roots = {root for root, nbytes in totals.items() if nbytes}
    if {root for root, offer in offers.items() if offer.get("handle")} != roots:
        return None
    if judged(comms, operation, lambda: receives and not _map(buffers, offers)):
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if buffers else torch.device("cpu")
    return SharedBuffers(comms, buffers, room, device)


def _offer(buffers: dict[int, torch.Tensor], rank: int, room: int) -> dict[str, Any]:
    """Allocate this source's buffer, and return the name of its GPU and the handle; {} if it cannot be shared."""
    with contextlib.suppress(Exception):  # on any failure the weights travel through the CPU
        if settings.read("EASYDIST_CUDA_IPC"):
            buffers[rank] = torch.empty(2 * room, dtype=torch.uint8, device="cuda")
            _, handle, nbytes, start, *counter, event, waits = cuda_handle(buffers[rank].untyped_storage())
            release_cuda_handle(*counter)  # it would wait forever for a receiver that refuses or dies
            about = {"handle": handle.hex(), "nbytes": nbytes, "start": start, "event": event.hex(), "waits": waits}
            return {"gpu": _name(buffers[rank].device.index), **about}
    return {}


def _map(buffers: dict[int, torch.Tensor], offers: Mapping[int, Mapping[str, Any]]) -> bool:
    """Map the buffers of the sources; return False if that cannot be done."""
    if not settings.read("EASYDIST_CUDA_IPC") or not torch.cuda.is_available():
        return False
    with contextlib.suppress(Exception):
        names = [_name(index) for index in range(torch.cuda.device_count())]
        for root, offer in offers.items():
            handle, event = (bytes.fromhex(offer[name]) for name in ("handle", "event"))
            about = (handle, offer["nbytes"], offer["start"], *_NO_COUNTER, event, offer["waits"])
            storage = cuda_storage(names.index(offer["gpu"]), *about)
            buffers[root] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return True
    return False


def _name(index: int) -> str:
    """Return the name of a GPU that is the same in all processes, whichever GPUs they see."""
    return str(torch.cuda.get_device_properties(index).uuid)
