"""The public class of the queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from easydist.agreement.runner import compare
from easydist.base import modes
from easydist.base.arguments import integer, integers
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.liveness.peer import host_id
from easydist.queue.end import Handle, deadline
from easydist.queue.reader import ReaderEnd
from easydist.queue.writer import WriterEnd
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.objects import gather_object
from easydist.verbs.ranks import check_rank

_T = TypeVar("_T")


class MessageQueue:
    """A queue of objects from one writer to all of its readers, in order, each exactly once.

    Law: the results of ``dequeue`` on every reader, call by call, are copies of the arguments of ``enqueue``, taken
    before ``enqueue`` returns. A slow reader makes the writer wait; nothing is lost.

    Readers on the writer's host share memory with it, others are connected by TCP. Any Python object can be sent if it
    is allowed: by default plain data, tensors, arrays and allow-listed classes (``docs/safety.md``). Waiting ends
    sleep. One process can hold several ends, and several threads can share one. A forked child must create ends of its
    own.

    Example:
        >>> writer = MessageQueue(n_reader=1, n_local_reader=1)
        >>> reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)
        >>> writer.enqueue({"step": 1})
        >>> reader.dequeue()
        {'step': 1}
        >>> writer.close(), reader.close()
        (None, None)

    Args:
        n_reader: The number of readers.
        n_local_reader: The number of readers on this host. A reader that turns out not to share memory with the writer
            (in another container) is connected by TCP.
        local_reader_ranks: The ranks of these readers; None means 0, 1, …
        max_chunk_bytes: ``max_chunk_bytes * max_chunks`` bytes can wait in the queue. Larger messages are sent in
            pieces while they are read. Memory is allocated as it is needed.
        max_chunks: The number of messages that can wait in the queue.
        connect_ip: The address at which other hosts reach this one; None detects it.
        enable_shm_tensor_arena: Accepted as in vLLM, and ignored: tensors are never pickled.
        weights_only: Decode with the restricted decoder, and refuse in ``enqueue`` objects that it would refuse.

    Raises:
        TypeError: A number is not an integer.
        ValueError: The numbers are inconsistent.
        UnsafeObjectError: ``weights_only`` is False and pickle is denied.
        OSError: The writer cannot listen at ``connect_ip``.

    Source: vLLM's ``MessageQueue``.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 1024 * 1024 * 24,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
        *,
        weights_only: bool = True,
    ) -> None:
        n_reader, n_local_reader = _integer("n_reader", n_reader), _integer("n_local_reader", n_local_reader)
        max_chunk_bytes, max_chunks = _integer("max_chunk_bytes", max_chunk_bytes), _integer("max_chunks", max_chunks)
        local = range(n_local_reader) if local_reader_ranks is None else local_reader_ranks
        ranks = integers("MessageQueue: local_reader_ranks", local, "a list of ranks")
        _check_numbers(n_reader, n_local_reader, ranks, max_chunk_bytes, max_chunks)
        if not weights_only:
            codec.demand_pickle()
        end = WriterEnd(n_reader, ranks, max_chunk_bytes, max_chunks, connect_ip)
        self._begin(end, end.handle(weights_only))

    def _begin(self, end: WriterEnd | ReaderEnd, handle: Handle) -> None:
        self._end, self._handle = end, handle
        self._finalize = weakref.finalize(self, end.close)  # runs at the end of the process, too

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """Create a reader's end.

        Args:
            handle: The result of the writer's ``export_handle``.
            rank: The rank of this reader. Each rank can be used once. Ranks that are not local are connected by TCP.

        Raises:
            ConnectionError: The writer cannot be reached.
            PeerLostError: The writer's process has ended.
            RuntimeError: This rank has been used.
            TypeError: ``rank`` is not an integer.
            ValueError: This rank is not a reader of the queue.
            WireError: The handle is damaged.
            UnsafeObjectError: The queue has ``weights_only=False`` and pickle is denied here.
        """
        if not handle.weights_only:
            codec.demand_pickle()
        self = MessageQueue.__new__(MessageQueue)
        self._begin(ReaderEnd(handle, integer("MessageQueue.create_from_handle: rank", rank, "a rank")), handle)
        return self

    @property
    def is_writer(self) -> bool:
        """True if this is the writer's end."""
        return isinstance(self._end, WriterEnd)

    @property
    def shutting_down(self) -> bool:
        """True once ``cancel``, ``close`` or ``shutdown`` has been called on this end."""
        return self._end.is_cancelled

    def export_handle(self) -> Handle:
        """Return the handle that readers need to attach. It can be pickled, and contains the key of the queue."""
        return self._handle

    def wait_until_ready(self, timeout: Timeout | None = None) -> None:
        """Wait until all readers have attached. Either the writer and all readers call it, or none of them.

        Args:
            timeout: Seconds, or a timedelta; None waits forever.

        Raises:
            TimeoutError: The timeout is over.
            PeerLostError: The writer, or a reader that had attached, has ended.
            ConnectionError: A reader was refused; the text says why. The next call waits again.
            RuntimeError: ``cancel`` or ``close`` was called.
        """
        self._end.wait_until_ready(deadline(timeout))

    def enqueue(self, obj: Any, timeout: Timeout | None = None) -> None:
        """Send ``obj`` to all readers. Returns when it has been copied, and waits while there is no room.

        Args:
            obj: Any object that the queue's decoder accepts.
            timeout: Seconds, or a timedelta; None waits forever.

        Raises:
            TimeoutError: There was no room in time. No reader gets the object, even if a part of it was under way.
            PeerLostError: A reader's process has ended, or its connection broke.
            ConnectionError: A reader was refused; the text says why. The next call waits again.
            BrokenPipeError: A reader has closed its end.
            RuntimeError: This end is a reader's, is closed, or belongs to the parent process; or ``cancel`` was called.
            TypeError: ``obj`` cannot be pickled.
            UnsafeObjectError: ``obj`` is not allow-listed.

        Cost: two copies of large data, one in the writer and one in each reader; for TCP one more in the writer.
        """
        modes.demand_data("enqueue")
        end = self._end
        if not isinstance(end, WriterEnd):
            raise RuntimeError("Only writers can enqueue: this is a reader's end")
        until = deadline(timeout)
        # Before its turn, so that other threads need not wait while a large object is encoded.
        message = codec.EncodedObject(obj)
        if self._handle.weights_only:
            message.check()
        end.put(message, until)

    def dequeue(self, timeout: Timeout | None = None, indefinite: bool = False) -> Any:
        """Return the next object.

        Args:
            timeout: Seconds, or a timedelta; None waits forever.
            indefinite: Do not log that a wait takes minutes.

        Raises:
            TimeoutError: No object came in time. Received parts of a message are kept for the next call.
            EOFError: The writer has closed the queue, and everything has been read.
            PeerLostError: The writer's process has ended or the connection to it broke, and everything has been read.
            RuntimeError: This end is the writer's, is closed, or belongs to the parent process; or ``cancel`` was
                called.
            UnsafeObjectError: The object is not allow-listed here. It is dropped.
        """
        modes.demand_data("dequeue")
        end = self._end
        if not isinstance(end, ReaderEnd):
            raise RuntimeError("Only readers can dequeue: this is the writer's end")
        # After its turn: an object that is refused has been taken, so it does not come again.
        return codec.decode(end.take(deadline(timeout), indefinite), weights_only=self._handle.weights_only)

    def broadcast_object(self, obj: Any = None) -> Any:
        """Enqueue ``obj`` on the writer, dequeue it on the readers, and return it.

        Args:
            obj: The object; the readers' is ignored.
        """
        if not self.is_writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def __iter__(self) -> Iterator[Any]:
        """Yield objects until the writer closes the queue."""
        while True:
            try:
                value = self.dequeue()
            except EOFError:
                return
            yield value

    def cancel(self) -> None:
        """End the waits of this end, from any thread: they raise ``RuntimeError("cancelled")``, now and in future."""
        self._end.cancel()

    def close(self) -> None:
        """Close this end.

        Readers can still read everything enqueued before; then they get EOFError. A writer gets BrokenPipeError once a
        reader has closed. Slow connections get 5 s to transmit pending messages. The end closes itself at the end of
        the process, and when the object is no longer used. In a forked child, ``close`` does nothing.
        """
        self._finalize()

    def shutdown(self) -> None:
        """Close this end, as ``close`` does."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent or copied.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a MessageQueue is an end in this process, and cannot be pickled or copied; send its export_handle(), and "
            "call MessageQueue.create_from_handle(handle, rank) in the other process"
        )

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @staticmethod
    def create_from_process_group(
        pg: Group,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
        *,
        weights_only: bool = True,
    ) -> MessageQueue:
        """Create a queue from one rank of a group to all others. All ranks call it.

        Args:
            pg: The group.
            max_chunk_bytes: As in the constructor.
            max_chunks: As in the constructor.
            writer_rank: The writer, a rank inside the group.
            external_writer_handle: The handle of a writer outside the group, passed on ``writer_rank``. All ranks are
                then its readers, by their ranks inside the group.
            blocking: Wait until all readers have attached.
            weights_only: As in the constructor.

        Returns:
            The writer's end on ``writer_rank`` (but see ``external_writer_handle``), readers' ends on other ranks.

        Raises:
            RemoteError: A rank could not create its end; on that rank ``__cause__`` is the reason.
            DisagreementError: ``writer_rank`` differs between the ranks.
            ValueError: ``writer_rank`` is not a rank of the group.

        Cost: four exchanges of a few hundred bytes.
        """
        comms = communicators(pg)
        hosts = gather_object([host_id()], weights_only=True, group=pg)

        def make() -> MessageQueue | None:
            # In here, so that an error of one rank reaches all of them.
            check_rank(comms, "MessageQueue", "writer_rank", writer_rank)
            if comms.rank != writer_rank or external_writer_handle is not None:
                return None
            readers = [r for r in range(comms.size) if r != writer_rank]
            local = [r for r in readers if hosts[r] == hosts[writer_rank]]
            return MessageQueue(len(readers), len(local), local, max_chunk_bytes, max_chunks, weights_only=weights_only)

        queue = _all_or_none(comms, make, lambda: {"writer_rank": int(writer_rank)})
        mine = queue.export_handle() if queue else external_writer_handle
        plain = gather_object([mine.plain() if mine else None], weights_only=True, group=pg)[writer_rank]
        queue = _all_or_none(comms, lambda: queue or MessageQueue.create_from_handle(Handle(*plain), comms.rank))
        if blocking:
            queue.wait_until_ready()
        return queue

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Group,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
        *,
        weights_only: bool = True,
    ) -> tuple[MessageQueue, list[Handle]]:
        """Create a queue from every rank of a group, including the reader's own, to one of them. All ranks call it.

        Args:
            pg: The group.
            max_chunk_bytes: As in the constructor.
            max_chunks: As in the constructor.
            reader_rank: The reader, a rank of the whole world, as in vLLM.
            blocking: Wait until the reader has attached. The reader itself does not wait, because it has to attach.
            weights_only: As in the constructor.

        Returns:
            The writer's end of this rank's queue. On the reader also the handles of all queues, in rank order, each for
            ``create_from_handle(handle, 0)``; on other ranks an empty list.

        Raises:
            RemoteError: A rank could not create its end.
            DisagreementError: ``reader_rank`` differs between the ranks.
            ValueError: ``reader_rank`` is not in the group.

        Cost: three exchanges of a few hundred bytes.
        """
        comms = communicators(pg)
        hosts = gather_object([host_id()], weights_only=True, group=pg)

        def make() -> tuple[MessageQueue, int]:
            reader = dist.get_group_rank(pg, reader_rank) if isinstance(pg, dist.ProcessGroup) else reader_rank
            check_rank(comms, "MessageQueue", "reader_rank", reader)
            n_local = int(hosts[comms.rank] == hosts[reader])
            return MessageQueue(1, n_local, None, max_chunk_bytes, max_chunks, weights_only=weights_only), reader

        queue, reader = _all_or_none(comms, make, lambda: {"reader_rank": int(reader_rank)})
        handles = gather_object([queue.export_handle().plain()], weights_only=True, group=pg)
        if blocking and comms.rank != reader:
            queue.wait_until_ready()
        return queue, [Handle(*plain) for plain in handles] if comms.rank == reader else []


def _all_or_none(comms: Communicators, make: Callable[[], _T], arguments: Callable[[], dict[str, Any]] = dict) -> _T:
    """Return the result of ``make``. If it raises on one rank, or the arguments differ, all ranks raise."""
    return compare(comms, "MessageQueue", lambda _: (make(), arguments()))


def _integer(name: str, value: Any) -> int:
    return integer(f"MessageQueue: {name}", value, "a whole number")


def _check_numbers(n_reader: int, n_local: int, ranks: list[int], max_chunk_bytes: int, max_chunks: int) -> None:
    if not 0 <= n_local <= n_reader or len(set(ranks)) != n_local:
        raise ValueError(
            f"MessageQueue: n_reader={n_reader}, n_local_reader={n_local}, local_reader_ranks={ranks}: there cannot be "
            "more local readers than readers, and each has a rank of its own"
        )
    if max_chunk_bytes < 1 or max_chunks < 1:
        raise ValueError(
            f"MessageQueue: max_chunk_bytes={max_chunk_bytes}, max_chunks={max_chunks}; each must be at least 1"
        )
