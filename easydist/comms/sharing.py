"""Shared memory for a group: made by its first rank, attached by the others, or by none of them."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Sequence

import torch

from easydist.comms.comm import TorchComm
from easydist.comms.shm import Shm
from easydist.comms.watch import Watch
from easydist.shm import Segment

_log = logging.getLogger("easydist")
_NBYTES = 256
"""The length of the message that names a segment."""


def is_wanted() -> bool:
    """Whether this process uses shared memory; ``EASYDIST_SHM=0`` says no."""
    return os.environ.get("EASYDIST_SHM", "1") != "0"


def share(control: TorchComm, watch: Watch, slots: Sequence[int]) -> TorchComm | None:
    """A communicator over shared memory, where all ranks of the group can attach it; else None, on every rank.

    Args:
        control: A communicator of the group.
        watch: The group's.
        slots: How much a rank shall be able to publish at once, in bytes: the first for which there is room.

    Cost: a broadcast and an all-gather.
    """
    rank, size = control.get_rank(), control.get_size()
    segment, slot = _create(size, slots) if rank == 0 else (None, 0)
    told = json.dumps([segment.name, slot] if segment else None).encode().ljust(_NBYTES)
    message = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    control.broadcast(message, 0, async_op=False)
    backend = _attach(json.loads(bytes(message.numpy())), segment, rank, size, watch)
    attached = torch.empty(size, dtype=torch.uint8, device="cpu")
    mine = torch.tensor([backend is not None], dtype=torch.uint8, device="cpu")
    control.all_gather_single(attached, mine, async_op=False)
    if segment is not None:
        segment.unlink()
    return TorchComm(backend, control.get_name()) if backend is not None and attached.all() else None


def _create(size: int, slots: Sequence[int]) -> tuple[Segment | None, int]:
    for slot in slots:
        try:
            return Segment.create(Shm.nbytes(size, slot)), slot
        except OSError as error:
            reason = error
    _warn(f"no shared memory of {Shm.nbytes(size, slots[-1])} bytes in /dev/shm ({reason})")
    return None, 0


def _attach(told: list[object] | None, segment: Segment | None, rank: int, size: int, watch: Watch) -> Shm | None:
    if told is None:
        return None
    name, slot = str(told[0]), int(str(told[1]))
    try:
        return Shm(segment or Segment.attach(name, Shm.nbytes(size, slot)), rank, size, watch.guard)
    except OSError as error:
        _warn(f"shared memory of rank 0 cannot be used here ({error})")
        return None


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(
        "easydist: %s; ranks of this host talk through gloo, more slowly. In a container give /dev/shm more room "
        "(docker run --shm-size=1g), or set EASYDIST_SHM=0 to be without shared memory and this warning.",
        reason,
    )
