"""The writing end."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from easydist import codec
from easydist.comms.peer import Peer
from easydist.comms.sharing import is_wanted
from easydist.queue.end import End, lost, own_record
from easydist.queue.far import Door, Outlet, own_address
from easydist.queue.handle import Handle
from easydist.queue.pieces import cut
from easydist.shm.ring import RingWriter, Shape

_log = logging.getLogger("easydist")
_LOOK_EVERY = 0.1
_FAREWELL = 5.0
"""Seconds that ``close`` waits for slow connections."""

_KNOCK_EVERY = 0.005
"""Seconds of sleep while readers are still to come: those without shared memory cannot wake the writer."""

_SOON = 0.001
"""Seconds that readers get to make room before the ring grows."""


class WriterEnd(End):
    """Writes messages into the ring, and to connections.

    Args:
        n_reader: How many readers there are.
        local_ranks: Those that are expected to share memory.
        max_chunk_bytes: With ``max_chunks``: bytes that may wait.
        max_chunks: Messages that may wait.
        connect_ip: Where to listen for the others.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(
        self,
        n_reader: int,
        local_ranks: Sequence[int],
        max_chunk_bytes: int,
        max_chunks: int,
        connect_ip: str | None,
    ) -> None:
        super().__init__()
        self._n_reader, self._local_ranks, self._max_chunks = n_reader, tuple(local_ranks), max_chunks
        self._capacity = max_chunk_bytes * max_chunks
        self._key = secrets.token_bytes(32)
        self._peers: dict[int, Peer] = {}
        self._outlets: dict[int, Outlet] = {}
        self._ring, self._door = self._make_ring(), None
        self._n_far = n_reader - (len(self._local_ranks) if self._ring else 0)
        self._progress: SimpleQueue[None] = SimpleQueue()  # an interrupt inside an Event leaves it locked for ever
        self._start = -1
        self._look_at = 0.0
        self._seen: Exception | None = None
        try:
            self._door = self._open_door(connect_ip)
        except BaseException:
            self._abandon()
            raise

    def _make_ring(self) -> RingWriter | None:
        if not self._local_ranks or not is_wanted():
            return None
        try:
            return RingWriter(Shape.of(len(self._local_ranks), self._capacity, self._max_chunks))
        except OSError as error:
            _log.warning("easydist: MessageQueue has no shared memory (%s): its readers use TCP, more slowly", error)
            return None

    def _open_door(self, connect_ip: str | None) -> Door | None:
        if not self._n_reader:
            return None
        n_remote = self._n_reader - len(self._local_ranks)
        try:
            return Door(connect_ip or (own_address() if n_remote else "127.0.0.1"), self._key)
        except OSError:
            if self._n_far:
                raise
            return None  # no network: readers that cannot attach will say so

    def handle(self, weights_only: bool) -> Handle:
        """What readers need."""
        ring = (self._ring.name, self._ring.shape.plain()) if self._ring else None
        address = self._door.address if self._door else None
        return Handle(self._local_ranks, self._n_reader, ring, address, self._key, own_record(), weights_only)

    def put(self, message: codec.Message, until: float | None) -> None:
        """Give a message to all readers, or to none."""
        with self.turn(until):
            if (fault := self._seen or self._departure()) is not None:
                raise fault
            if len(self._outlets) < self._n_far:
                self._until(self._all_far_are_here, until, lambda: self._late("enqueue"))
            if not self._has_room(message.nbytes):
                self._until(lambda: self._has_room(message.nbytes), until, lambda: self._late("enqueue"))
            if self._ring is not None:
                self._write(self._ring, message, until)
            if self._outlets:
                data = b"".join(message.parts())
                for outlet in self._outlets.values():
                    outlet.add(data)
            self._look_around()

    def _has_room(self, nbytes: int) -> bool:
        if self._ring is not None and self._ring.messages() >= self._max_chunks:
            return False
        unsent = [outlet.unsent() for outlet in self._outlets.values()]
        return all(not n or (n < self._max_chunks and b + nbytes <= self._capacity) for n, b in unsent)

    def _write(self, ring: RingWriter, message: codec.Message, until: float | None) -> None:
        at = 0
        for piece in cut(message.parts(), ring.shape.piece):
            nbytes = sum(map(len, piece))
            start = ring.place(nbytes, grow=False)
            if start < 0:
                start = self._place(ring, nbytes, until)
            ring.post(start, piece, at, message.nbytes)
            at += nbytes

    def _place(self, ring: RingWriter, nbytes: int, until: float | None) -> int:
        soon = time.monotonic() + _SOON

        def look() -> bool:
            self._start = ring.place(nbytes, grow=time.monotonic() >= soon)
            return self._start >= 0

        self._until(look, until, lambda: self._late("enqueue"))
        return self._start

    def _late(self, operation: str) -> str:
        absent = [rank for rank in self._local_ranks if rank not in self._peers]
        n_far = self._n_far - len(self._outlets)
        if operation == "wait_until_ready" or n_far > 0:
            return f"{operation}: {len(absent) + max(n_far, 0)} of {self._n_reader} readers did not come in time"
        slow = [self._local_ranks[i] for i in self._ring.behind()] if self._ring else []
        slow += [rank for rank, outlet in self._outlets.items() if outlet.unsent()[0]]
        return f"{operation}: readers {sorted(set(slow))} made no room in time; nothing of this message will arrive"

    def wait_until_ready(self, until: float | None) -> None:
        """Wait for all readers, and tell them."""
        with self.turn(until):
            self._until(self._all_are_here, until, lambda: self._late("wait_until_ready"))
            if self._ring is not None:
                self._ring.set_ready()
            for outlet in self._outlets.values():
                outlet.set_ready()
            self._shut_door()

    def _all_far_are_here(self) -> bool:
        self._greet()
        return len(self._outlets) >= self._n_far

    def _all_are_here(self) -> bool:
        self._greet()
        return len(self._peers) == self._n_reader

    def _greet(self) -> None:
        """Let readers in that have come."""
        for i, rank in enumerate(self._local_ranks if self._ring else ()):
            if rank not in self._peers and self._ring and (note := self._ring.note(i)) is not None:
                self._peers[rank] = Peer(rank, note)
        for rank, record, outlet in self._door.knocks() if self._door else ():
            if self._admits(rank):
                self._admit(rank, record, outlet)
            else:
                outlet.refuse()

    def _admits(self, rank: int) -> bool:
        if rank in self._peers or rank in self._local_ranks:
            return rank not in self._peers
        return sum(r not in self._local_ranks for r in self._outlets) < self._n_reader - len(self._local_ranks)

    def _admit(self, rank: int, record: bytes, outlet: Outlet) -> None:
        self._peers[rank], self._outlets[rank] = Peer(rank, record), outlet
        outlet.on_progress = self._wake
        outlet.welcome()
        if self._ring is not None and rank in self._local_ranks:  # one that cannot attach
            self._n_far += 1
            for message in self._ring.drop(self._local_ranks.index(rank)):
                outlet.add(message)

    def _look_around(self) -> None:
        """Now and then, after the readers have been told: the next call raises what is seen."""
        if time.monotonic() >= self._look_at:
            self._seen = self._fault()

    def _fault(self) -> Exception | None:
        self._look_at = time.monotonic() + _LOOK_EVERY
        if len(self._peers) < self._n_reader:
            self._greet()
        for peer in self._peers.values():
            if peer.has_ended():
                return self._departure() or lost(peer, f"reader {peer.rank}")
        return self._departure()

    def _departure(self) -> Exception | None:
        """What is to be said of a reader that is known to have left."""
        for i, rank in enumerate(self._local_ranks if self._ring else ()):
            if self._ring and self._ring.has_left(i):
                return _left(rank)
        for rank, outlet in self._outlets.items():
            outlet.look()
            if outlet.has_left:
                return _left(rank)
            if outlet.is_broken:
                return lost(self._peers[rank], f"reader {rank}", "ended, or its connection broke")
        return None

    def _sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        if len(self._peers) < self._n_reader:
            seconds = min(seconds, _KNOCK_EVERY)
        if self._ring is not None:
            return self._ring.sleep(look, seconds)
        while not self._progress.empty():
            self._progress.get()
        if look():
            return True
        self._pause(seconds)
        return look()

    def _pause(self, seconds: float) -> None:
        """Sleep until ``_wake`` is called."""
        with suppress(Empty):
            self._progress.get(timeout=seconds)

    def _wake(self) -> None:
        self._progress.put(None)
        with suppress(AttributeError):  # it is being closed
            if self._ring is not None:
                self._ring.wake()

    def _shut_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()

    def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
        until = time.monotonic() + _FAREWELL
        for outlet in self._outlets.values():
            outlet.say_goodbye()
        while any(outlet.unsent()[0] for outlet in self._outlets.values()) and time.monotonic() < until:
            self._pause(0.05)
        for outlet in self._outlets.values():
            outlet.close()
        self._drop()

    def _abandon(self) -> None:
        if self._ring is not None:
            self._ring.release()
        for outlet in self._outlets.values():
            outlet.release()
        self._drop()

    def _drop(self) -> None:
        self._shut_door()
        self._ring = None
        self._outlets.clear()
        self._peers.clear()


def _left(rank: int) -> BrokenPipeError:
    return BrokenPipeError(f"MessageQueue: reader {rank} has closed its end")
