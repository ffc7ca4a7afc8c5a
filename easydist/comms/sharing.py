"""Shared memory for the ranks of each host: made by the first of them, attached by the others."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Sequence

import torch

from easydist.comms.backend import Backend
from easydist.comms.comm import TorchComm
from easydist.comms.shm import Shm
from easydist.comms.solo import Solo
from easydist.comms.watch import Watch
from easydist.shm import Segment
from easydist.shm.streams import Guard

Hosts = Sequence[Sequence[int]]
"""The ranks of each host, ascending; the hosts by their lowest ranks."""

_log = logging.getLogger("easydist")
_NBYTES = 256
"""The length of the message that names a segment."""


def is_wanted() -> bool:
    """Whether this process uses shared memory; ``EASYDIST_SHM=0`` says no."""
    return os.environ.get("EASYDIST_SHM", "1") != "0"


def attach(control: TorchComm, watch: Watch, hosts: Hosts, slots: Sequence[int]) -> tuple[Backend, Hosts]:
    """Shared memory with the ranks of this host, and which ranks of the group share it, as attaching has proved.

    A rank that cannot attach counts as a host of its own; where the first of a host can give no memory, all of it do.

    Args:
        control: A communicator of the group.
        watch: The group's.
        hosts: The ranks of each host, ascending; the hosts by their lowest ranks.
        slots: How much a rank shall be able to publish at once, in bytes: the first for which there is room.

    Cost: two all-gathers for each time that a rank cannot attach, and for the last.
    """
    while any(len(ranks) > 1 for ranks in hosts):
        backend, attached = _try(control, watch, hosts, slots)
        if all(attached):
            return backend or Solo(), hosts
        hosts = _proved(hosts, attached)
    return Solo(), hosts


def _proved(hosts: Hosts, attached: Sequence[bool]) -> Hosts:
    found: list[list[int]] = []
    for ranks in hosts:
        together = [r for r in ranks if attached[r]] if attached[ranks[0]] else []
        found += [together, *[[r] for r in ranks if r not in together]]
    return sorted(ranks for ranks in found if ranks)


def _try(control: TorchComm, watch: Watch, hosts: Hosts, slots: Sequence[int]) -> tuple[Backend | None, list[bool]]:
    """Make and attach the memory of every host; says which ranks could."""
    rank = control.get_rank()
    here = next(ranks for ranks in hosts if rank in ranks)
    segment, slot = _create(len(here), slots) if len(here) > 1 and rank == here[0] else (None, 0)
    told = _exchange(control, json.dumps([segment.name, slot] if segment else None).encode().ljust(_NBYTES))
    guard = watch.guard if len(here) == len(told) else functools.partial(_guard, watch)
    backend = _attach(json.loads(told[here[0]]), segment, here.index(rank), len(here), guard)
    attached = _exchange(control, bytes([backend is not None or len(here) == 1]))
    if segment is not None:
        segment.unlink()
    return backend, [one == b"\1" for one in attached]


def _guard(watch: Watch, ranks: Sequence[int], waited: float) -> None:
    """Look after all ranks: those of this host that are awaited may themselves wait for another host."""
    watch.guard(list(watch.peers), waited)


def _exchange(control: TorchComm, mine: bytes) -> list[bytes]:
    rows = torch.empty((control.get_size(), len(mine)), dtype=torch.uint8, device="cpu")
    control.all_gather_single(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8), async_op=False)
    return [row.numpy().tobytes() for row in rows]


def _create(size: int, slots: Sequence[int]) -> tuple[Segment | None, int]:
    for slot in slots:
        try:
            return Segment.create(Shm.nbytes(size, slot)), slot
        except OSError as error:
            reason = error
    _warn(f"no shared memory of {Shm.nbytes(size, slots[-1])} bytes in /dev/shm ({reason})")
    return None, 0


def _attach(told: list[object] | None, segment: Segment | None, rank: int, size: int, guard: Guard) -> Shm | None:
    if told is None:
        return None
    name, slot = str(told[0]), int(str(told[1]))
    try:
        return Shm(segment or Segment.attach(name, Shm.nbytes(size, slot)), rank, size, guard)
    except OSError as error:
        _warn(f"the shared memory of this host's first rank cannot be used here ({error})")
        return None


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(
        "easydist: %s; ranks of this host talk through gloo, more slowly. In a container give /dev/shm more room "
        "(docker run --shm-size=1g), or set EASYDIST_SHM=0 to be without shared memory and this warning.",
        reason,
    )
