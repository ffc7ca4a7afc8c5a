"""The writer's end of a queue."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from easydist.errors import WireError
from easydist.format import codec
from easydist.groups.sharing import is_wanted
from easydist.liveness.peer import Peer
from easydist.liveness.watchdog import interrupts_deferred
from easydist.queue.end import End, Handle, lost, own_record
from easydist.queue.tcp import Listener, Sender, own_address
from easydist.shm.ring import RingWriter, Shape

_log = logging.getLogger("easydist")
_LOOK_EVERY = 0.1
_FAREWELL = 5.0
"""Seconds for which ``close`` waits for slow connections."""

_ACCEPT_EVERY = 0.005
"""The longest sleep in seconds while readers are missing: those without shared memory cannot wake the writer."""

_SOON = 0.001
"""Seconds for which readers can make room before the ring grows."""


class WriterEnd(End):
    """The end that writes messages into the ring, and to connections.

    Args:
        n_reader: The number of readers.
        local_ranks: The readers that are expected to share memory.
        max_chunk_bytes: The product with ``max_chunks`` is the number of bytes that can wait.
        max_chunks: The number of messages that can wait.
        connect_ip: The address at which to listen for the others.

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
        self._senders: dict[int, Sender] = {}
        self._ring, self._listener = self._make_ring(), None
        self._n_remote = n_reader - (len(self._local_ranks) if self._ring else 0)
        self._progress: SimpleQueue[None] = SimpleQueue()  # an interrupt inside an Event would leave it locked forever
        self._start = -1
        self._look_at = 0.0
        self._seen: Exception | None = None
        self._refusal: str | None = None
        try:
            self._listener = self._open_listener(connect_ip)
        except BaseException:
            self._abandon()
            raise

    def _make_ring(self) -> RingWriter | None:
        if not self._local_ranks or not is_wanted():
            return None
        try:
            return RingWriter(Shape.of(len(self._local_ranks), self._capacity, self._max_chunks))
        except OSError as error:
            _log.warning(
                "easydist: MessageQueue has no shared memory (%s); its readers use TCP, which is slower", error
            )
            return None

    def _open_listener(self, connect_ip: str | None) -> Listener | None:
        if not self._n_reader:
            return None
        n_remote = self._n_reader - len(self._local_ranks)
        try:
            return Listener(connect_ip or (own_address() if n_remote else "127.0.0.1"), self._key)
        except OSError:
            if self._n_remote:
                raise
            return None  # no network: readers that cannot attach report it

    def handle(self, weights_only: bool) -> Handle:
        """Return the handle for readers."""
        ring = (self._ring.name, self._ring.shape.plain()) if self._ring else None
        address = self._listener.address if self._listener else None
        return Handle(self._local_ranks, self._n_reader, ring, address, self._key, own_record(), weights_only)

    def put(self, message: codec.EncodedObject, until: float | None) -> None:
        """Send a message to all readers, or to none."""
        with self.turn(until):
            if (fault := self._seen or self._departure()) is not None:
                raise fault
            # Readers in the ring may come later, and find the message there; a connection has to exist first.
            if len(self._senders) < self._n_remote:
                self._until(self._all_remote_are_here, until, lambda: self._late("enqueue"))
            # In the ring and on each connection before the first byte: the message goes to all readers, or to none.
            if not self._has_room(message.nbytes):
                self._until(lambda: self._has_room(message.nbytes), until, lambda: self._late("enqueue"))
            last = None if self._ring is None else self._write(self._ring, message, until)
            if self._senders:
                self._post_to_all(last, b"".join(message.parts()))
            elif last is not None:
                last()
            self._look_around()

    def _post_to_all(self, last: Callable[[], None] | None, data: bytes) -> None:
        """Post the last piece in the ring, and the message on each connection; Ctrl-C comes before this or after it."""
        with interrupts_deferred():
            if last is not None:
                last()
            for sender in self._senders.values():
                sender.add(data)

    def _has_room(self, nbytes: int) -> bool:
        if self._ring is not None and not self._ring.has_fewer(self._max_chunks):
            return False
        if not self._senders:
            return True
        unsent = [sender.unsent() for sender in self._senders.values()]
        return all(not n or (n < self._max_chunks and b + nbytes <= self._capacity) for n, b in unsent)

    def _write(self, ring: RingWriter, message: codec.EncodedObject, until: float | None) -> Callable[[], None]:
        """Write all pieces of a message but the last one, and return the function that writes that."""
        at, parts, most = 0, message.parts(), ring.shape.piece
        for piece in [parts] if message.nbytes <= most else _cut(parts, most):
            nbytes = sum(map(len, piece))
            start = ring.place(nbytes, grow=False)
            if start < 0:
                start = self._place(ring, nbytes, until)
            if at + nbytes == message.nbytes:
                break
            ring.post(start, piece, at, message.nbytes)
            at += nbytes
        return functools.partial(ring.post, start, piece, at, message.nbytes)

    def _place(self, ring: RingWriter, nbytes: int, until: float | None) -> int:
        soon = time.monotonic() + _SOON

        def look() -> bool:
            # Readers make room in a moment, as a rule; memory into which the ring has grown stays taken.
            self._start = ring.place(nbytes, grow=time.monotonic() >= soon)
            return self._start >= 0

        self._until(look, until, lambda: self._late("enqueue"))
        return self._start

    def _late(self, operation: str) -> str:
        if operation == "wait_until_ready" or len(self._senders) < self._n_remote:
            missing = self._n_reader - len(self._peers)
            return f"{operation}: {missing} of {self._n_reader} readers did not come in time"
        slow = [self._local_ranks[i] for i in self._ring.behind()] if self._ring else []
        slow += [rank for rank, sender in self._senders.items() if sender.unsent()[0]]
        return f"{operation}: readers {sorted(set(slow))} made no room in time, so no part of this message will arrive"

    def wait_until_ready(self, until: float | None) -> None:
        """Wait for all readers, and tell them."""
        with self.turn(until):
            self._until(self._all_are_here, until, lambda: self._late("wait_until_ready"))
            if self._ring is not None:
                self._ring.set_ready()
            for sender in self._senders.values():
                sender.set_ready()
            self._shut_door()

    def _all_remote_are_here(self) -> bool:
        self._greet()
        return len(self._senders) >= self._n_remote

    def _all_are_here(self) -> bool:
        self._greet()
        return len(self._peers) == self._n_reader

    def _greet(self) -> None:
        """Accept the readers that have arrived."""
        for i, rank in enumerate(self._local_ranks if self._ring else ()):
            if rank not in self._peers and self._ring and (note := self._ring.note(i)) is not None:
                try:
                    self._peers[rank] = Peer(rank, note)
                except WireError as error:
                    self._refusal = f"reader {rank} cannot be admitted: {error}"
        for rank, record, sender in self._listener.accepted() if self._listener else ():
            try:
                if self._admits(rank):
                    self._admit(rank, record, sender)
                    continue
            except WireError as error:
                self._refusal = f"reader {rank} was not admitted: {error}"
            sender.release()
        if self._listener is not None and self._listener.refused is not None:
            self._refusal, self._listener.refused = self._listener.refused, None
        if self._listener is not None and self._listener.fault is not None:
            self._refusal = (
                f"a reader cannot be admitted: {self._listener.fault}. If this process has too many open files, close "
                "some, or raise the limit (ulimit -n); then call again"
            )

    def _admits(self, rank: int) -> bool:
        # One that should share memory, but cannot attach, has its place in the ring; the others share what is left.
        if rank in self._peers or rank in self._local_ranks:
            return rank not in self._peers
        return sum(r not in self._local_ranks for r in self._senders) < self._n_reader - len(self._local_ranks)

    def _admit(self, rank: int, record: bytes, sender: Sender) -> None:
        self._peers[rank], self._senders[rank] = Peer(rank, record), sender
        sender.on_progress = self._wake
        # Before the messages: the reader takes the first bytes for the proof.
        sender.welcome()
        if self._ring is not None and rank in self._local_ranks:  # a local reader that cannot attach
            self._n_remote += 1
            for message in self._ring.drop(self._local_ranks.index(rank)):
                sender.add(message)

    def _look_around(self) -> None:
        """Look for lost readers from time to time, after sending. The next call raises the result."""
        if time.monotonic() >= self._look_at:
            self._seen = self._lost_reader()

    def _fault(self) -> Exception | None:
        fault = self._lost_reader()
        refusal, self._refusal = self._refusal, None  # report it once: the reader may come again
        return fault or (ConnectionError(f"MessageQueue: {refusal}") if refusal else None)

    def _lost_reader(self) -> Exception | None:
        self._look_at = time.monotonic() + _LOOK_EVERY
        if len(self._peers) < self._n_reader:
            self._greet()
        for peer in self._peers.values():
            if peer.has_ended():
                return self._departure() or lost(peer, f"reader {peer.rank}")
        return self._departure()

    def _departure(self) -> Exception | None:
        """Return the error for a reader that is known to have left; None if there is none."""
        if self._ring is not None and (left := self._ring.left()):
            return _left(self._local_ranks[left[0]])
        for rank, sender in self._senders.items():
            sender.look()
            if sender.has_left:
                return _left(rank)
            if sender.is_broken:
                return lost(self._peers[rank], f"reader {rank}", "ended, or its connection broke")
        return None

    def _sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        if len(self._peers) < self._n_reader:
            seconds = min(seconds, _ACCEPT_EVERY)
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
        if self._progress.empty():  # with a ring no wait takes them out
            self._progress.put(None)
        if self._ring is not None:
            self._ring.wake()

    def _shut_door(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
        until = time.monotonic() + _FAREWELL
        for sender in self._senders.values():
            sender.say_goodbye()
        while any(sender.unsent()[0] for sender in self._senders.values()) and time.monotonic() < until:
            self._pause(0.05)
        for sender in self._senders.values():
            sender.close()
        self._drop()

    def _abandon(self) -> None:
        if self._ring is not None:
            self._ring.release()
        for sender in self._senders.values():
            sender.release()
        self._drop()

    def _drop(self) -> None:
        self._shut_door()
        self._ring = None
        self._senders.clear()
        self._peers.clear()


def _left(rank: int) -> BrokenPipeError:
    return BrokenPipeError(f"MessageQueue: reader {rank} has closed its end")


def _cut(parts: Sequence[bytes | memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """Yield a message in pieces of ``nbytes`` each; the last one may be shorter.

    Example:
        >>> [b"".join(piece) for piece in _cut([b"abc", b"defgh"], 4)]
        [b'abcd', b'efgh']
    """
    piece: list[memoryview] = []
    room = nbytes
    for part in [memoryview(part) for part in parts]:
        while len(part) >= room:
            yield [*piece, part[:room]]
            piece, part, room = [], part[room:], nbytes
        if len(part):
            piece.append(part)
            room -= len(part)
    if piece:
        yield piece
