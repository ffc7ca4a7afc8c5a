"""The reader's end of a queue."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

from easydist.groups.sharing import is_wanted
from easydist.liveness.peer import Peer
from easydist.queue.end import End, Handle, address_text, lost, name_of, own_record
from easydist.queue.tcp import Receiver
from easydist.shm.ring import RingReader, Shape


class ReaderEnd(End):
    """The end that receives messages from the ring, or from a connection.

    Args:
        handle: The writer's handle.
        rank: The rank of this reader.

    Attributes:
        is_local: True if it shares memory with the writer.

    Raises:
        OSError: The writer cannot be reached; a PeerLostError if it has ended.
        RuntimeError: The rank has been used.
        ValueError: The rank is not a reader of the queue.
    """

    def __init__(self, handle: Handle, rank: int) -> None:
        # A handle does not list the readers elsewhere, which may have any ranks.
        if rank not in handle.local_reader_ranks and handle.n_reader <= len(handle.local_reader_ranks):
            readers = ", ".join(map(str, handle.local_reader_ranks))
            raise ValueError(f"MessageQueue.create_from_handle: rank={rank} is not a reader; the readers are {readers}")
        super().__init__()
        self._writer = Peer(-1, handle.writer)
        self._channel = self._attach(handle, rank) or self._connect(handle, rank)
        self.is_local = isinstance(self._channel, RingReader)
        self._message: memoryview | None = None

    def _attach(self, handle: Handle, rank: int) -> RingReader | None:
        if handle.ring is None or rank not in handle.local_reader_ranks or not is_wanted():
            return None
        name, shape = handle.ring
        with suppress(OSError):  # it then connects, so that the writer waits for it in the ring no more
            return RingReader(name, Shape(*shape), handle.local_reader_ranks.index(rank), own_record())
        return None

    def _connect(self, handle: Handle, rank: int) -> Receiver:
        if handle.address is None:
            raise ConnectionError(f"MessageQueue: the memory of {name_of(self._writer)} is not visible to this process")
        try:
            return Receiver(handle.address, handle.key, rank, own_record(), self._writer)
        except OSError as error:
            if self._writer.has_ended():
                raise lost(self._writer, "the writer") from error
            at = address_text(handle.address)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConnectionError(
                    f"MessageQueue: no connection to {name_of(self._writer)} at {at}: {error.strerror}. Close some "
                    "files, or raise the limit (ulimit -n)"
                ) from error
            raise ConnectionError(
                f"MessageQueue: {name_of(self._writer)} is not listening at {at} ({error}); it has closed the queue, "
                "has all its readers, or needs a connect_ip= that this host can reach"
            ) from error

    def take(self, until: float | None, patient: bool) -> memoryview:
        """Return the next message. With ``patient``, a wait of minutes is not logged."""
        with self.turn(until):
            if not self._pull():
                self._until(self._pull, until, self._late, patient)
            message, self._message = self._message, None
            assert message is not None
            return message

    def _late(self) -> str:
        return f"dequeue: no message from the writer, {name_of(self._writer)}, arrived in time"

    def _pull(self) -> bool:
        # Kept until it is taken: a wait for readiness may receive it, and an interrupt may come before.
        if self._message is None:
            self._message = self._channel.pull()
        return self._message is not None

    def wait_until_ready(self, until: float | None) -> None:
        """Wait until all readers have attached."""
        with self.turn(until):
            self._until(self._is_ready, until, lambda: "wait_until_ready: not all readers came in time")

    def _is_ready(self) -> bool:
        if not self._channel.is_ready:
            self._pull()
        return self._channel.is_ready

    def _fault(self) -> Exception | None:
        # First, because a writer that has closed the queue may have ended since.
        if self._channel.is_closed:
            return EOFError(f"MessageQueue: the writer, {name_of(self._writer)}, has closed the queue")
        if self._writer.has_ended():
            return lost(self._writer, "the writer")
        if isinstance(self._channel, Receiver) and self._channel.is_broken:
            return lost(self._writer, "the writer", "ended, or its connection broke")
        return None

    def _sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        return self._channel.sleep(look, seconds)

    def _wake(self) -> None:
        if isinstance(self._channel, RingReader):
            self._channel.wake()

    def _release(self) -> None:
        self._channel.close()
        self._drop()

    def _abandon(self) -> None:
        self._channel.release()
        self._drop()

    def _drop(self) -> None:
        del self._channel, self._writer
        self._message = None
