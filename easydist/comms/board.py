"""What the ranks of one group know of one another: where each is, and what it has said last.

On this host that stands on each process's page, which the others read; between hosts, in the group's store.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

from easydist.comms.far_store import FarStore
from easydist.comms.peer import Peer
from easydist.shm import own_page


class Board:
    """What one rank knows of a group.

    Args:
        rank: This process in the group.
        size: How many processes the group has.
        store: Where ranks of other hosts write.

    Attributes:
        peers: The other ranks.
        slot: What stands for the group on this process's page; -1 where there is none.
        number: Counts the calls of this group, but for those of two ranks alone.
    """

    def __init__(self, rank: int, size: int, store: FarStore | None = None) -> None:
        self.rank, self.size, self.number = rank, size, 0
        self.peers = {r: Peer(r) for r in range(size) if r != rank}
        self._page = own_page() if size > 1 else None
        self.slot = self._page.new_slot() if self._page else -1
        if self._page is not None:
            weakref.finalize(self, self._page.free_slot, self.slot)
        self._store = store
        self._place = b""
        self._published = (0, b"")

    def publish(self) -> None:
        """Tell ranks of other hosts where this one is, if it has been there for a while."""
        now = (self.number, self._place)
        if now != self._published:
            self._published = now
            self._write(f"seen/{self.rank}", json.dumps([self.number, self._place.decode()]))

    @property
    def _is_deaf(self) -> bool:
        """Whether nothing is to be heard from other hosts."""
        return (store := self._store) is not None and store.is_silent

    def _place_of(self, peer: Peer) -> str:
        return peer.place() if peer.is_visible else (self._read(f"seen/{peer.rank}") or [0, ""])[1]

    def _number_of(self, peer: Peer) -> int | None:
        return peer.number() if peer.is_visible else (self._read(f"seen/{peer.rank}") or [None])[0]

    def _read(self, key: str) -> Any:
        if (store := self._store) is not None and self._has_far_peers():  # the sentry may let go of it meanwhile
            try:
                return json.loads(store.get(key) or "null")
            except RuntimeError:  # it has ended with rank 0, and would log each further attempt
                self._store = None
        return None

    def _write(self, key: str, text: str) -> None:
        if (store := self._store) is not None and self._has_far_peers():
            try:
                store.set(key, text)
            except RuntimeError:
                self._store = None

    def _has_far_peers(self) -> bool:
        return not all(peer.is_visible for peer in self.peers.values())

    def _last_seen(self, peer: Peer) -> list[str]:
        place = self._place_of(peer)
        lines = [f"  rank {peer.rank} was last seen in {place}"] if place else []
        return [*lines, f"  rank {self.rank} waited in {self._place.decode()}"]

    def _row(self, rank: int, is_missing: bool) -> str:
        if rank == self.rank:
            return f"  rank {rank}: waits in {self._place.decode()}"
        peer = self.peers[rank]
        place = self._place_of(peer)
        state = f"came; {place or 'nothing more is known'}"
        if is_missing:
            unseen = "nothing is known of it" if self._is_deaf else "not seen in this group yet"
            state = f"missing; last seen in {place}" if place else f"missing; {unseen}"
        condition = peer.condition(even_if_well=is_missing)
        return f"  rank {rank}: {state}" + (f"; {condition}" if condition else "")
