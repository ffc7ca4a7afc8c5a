"""How the ranks of a ``torch.distributed`` group come to share memory, through the group's store.

They tell which processes they are, rank 0 names a segment, and all tell whether they have attached it; so all raise the
same error, or none does. Whoever ends meanwhile is noticed, as later in the group's operations.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.comms.far_store import POLL, FarStore
from easydist.comms.peer import RECORD_NBYTES, Peer, by_host, record
from easydist.comms.sharing import is_wanted
from easydist.comms.shm import Shm
from easydist.comms.watch import Watch
from easydist.errors import CollectiveTimeout
from easydist.shm import Segment, own_page
from easydist.shm.streams import Guard

NAME = "easydist_shm"
"""What ``init_process_group`` and ``new_group`` are given."""

_SLOTS = (2 << 20, 1 << 19, 1 << 17, 1 << 14)
"""How much a rank can publish at once, in bytes: the first for which there is room, six times for each rank."""

NEVER = 1e9
"""Seconds: the group itself looks at the time, because after a timeout it does not connect anew."""

_OUTSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
OUT_OF_USE = "The group is of no use any more: make it anew"


class _Member(Peer):
    """Another rank of a group in shared memory. Who is awaited there has not come, whatever number it tells."""

    def has_finished(self, number: int) -> bool:
        return False

    def number(self) -> int | None:
        return None


def late(watch: Watch, awaited: Sequence[int], seconds: float) -> CollectiveTimeout:
    """Who is missing, and where it was last seen."""
    missing = [rank for rank in awaited if rank in watch.peers]
    lines = [f"{watch.operation}: {len(missing)} of {watch.size} ranks did not come within {seconds:.3g} s"]
    for rank in missing:
        peer = watch.peers[rank]
        place, condition = peer.place(), peer.condition()
        seen = f"last seen in {place}" if place else "not seen yet"
        lines.append(f"  rank {rank}: {seen}" + (f"; {condition}" if condition else ""))
    error = CollectiveTimeout("\n".join([*lines, f"{OUT_OF_USE}, with more time (timeout=)."]))
    error.missing = tuple(missing)
    return error


class Meeting:
    """What the ranks of a group that is being made tell one another, through its store.

    Args:
        store: The group's.
        rank: This process in the group.
        size: How many processes the group has.
        timeout: How long all of it may last.

    Attributes:
        store: For this generation of the group.
        watch: Knows the other processes.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout
        # A store may have seen a group of this name before: each generation has keys of its own.
        generation = (store.add("came", 1) - 1) // size
        self.store = PrefixStore(f"{generation}", store)
        self.watch = Watch(rank, size, self._timeout)
        self.watch.waits_in_memory = True
        self.watch.begin("init_process_group", site(), NEVER)
        self._guard_of_group: Guard = self.watch.guard

    def join(self) -> Shm:
        """Attach the memory that rank 0 makes, all ranks or none of them.

        Raises:
            RuntimeError: They cannot share memory; the same text on every rank.
        """
        self._introduce()
        segment, told = self._create() if self.rank == 0 else (None, "")
        name, slot, failure = json.loads(self._tell("segment", told, [0])[0])
        if failure:
            raise _impossible([failure])
        backend: Shm | None = None
        nbytes, failure = Shm.nbytes(self.size, slot), ""
        try:
            backend = Shm(segment or Segment.attach(name, nbytes), self.rank, self.size, self._guard)
        except OSError as error:
            failure = f"rank {self.rank} cannot attach the memory of rank 0: {error}"
        failures = [text for text in self._tell("attached", failure, range(self.size)) if text]
        if segment is not None:
            segment.unlink()
        if failures or backend is None:
            raise _impossible(failures)
        self.watch.end()
        return backend

    def look_to(self, guard: Guard) -> None:
        """From now on ``guard`` says how waits in the memory end."""
        self._guard_of_group = guard

    def _guard(self, awaited: Sequence[int], waited: float) -> None:
        self._guard_of_group(awaited, waited)

    def _introduce(self) -> None:
        """Learn which processes the others are."""
        told = self._tell("record", record(own_page(), self.watch.slot, is_wanted()).decode(), range(self.size))
        records = [text.encode().ljust(RECORD_NBYTES) for text in told]
        self.watch.peers = {r: _Member(r, records[r]) for r in self.watch.peers}
        if len(by_host(records)) > 1:
            seen = [f"rank {r} on {self._host(r)}" for r in range(self.size)]
            raise _impossible([f"ranks are on several hosts, or have EASYDIST_SHM=0: {', '.join(seen)}"])

    def _host(self, rank: int) -> str | None:
        return socket.gethostname() if rank == self.rank else self.watch.peers[rank].host

    def _create(self) -> tuple[Segment | None, str]:
        failure = ""
        for slot in _SLOTS:
            try:
                segment = Segment.create(Shm.nbytes(self.size, slot))
            except OSError as error:
                failure = f"/dev/shm of rank 0 has no room for {Shm.nbytes(self.size, slot)} bytes: {error}"
            else:
                return segment, json.dumps([segment.name, slot, ""])
        return None, json.dumps(["", 0, failure])

    def _tell(self, key: str, mine: str, ranks: Sequence[int]) -> list[str]:
        """What ``ranks`` tell under this key; this rank tells ``mine`` if it is one of them."""
        store = FarStore(self.store)
        if self.rank in ranks:
            store.set(f"{key}/{self.rank}", mine)
        missing = list(ranks)
        while missing := [r for r in missing if not store.check([f"{key}/{r}"])]:
            self._look_around(missing)
            time.sleep(POLL)
        return [self.store.get(f"{key}/{r}").decode() for r in ranks]

    def _look_around(self, missing: Sequence[int]) -> None:
        self.watch.guard(missing)
        if time.monotonic() >= self._deadline:
            raise late(self.watch, missing, self._timeout)


def _impossible(reasons: Sequence[str]) -> RuntimeError:
    text = "; ".join(reasons)
    return RuntimeError(f"{NAME} needs memory that all ranks share: {text}. Use gloo: init_process_group('gloo')")


def site() -> str:
    """File and line of the caller outside of torch and easydist."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
