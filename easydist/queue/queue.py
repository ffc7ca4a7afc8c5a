"""The queue as its users see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from easydist.agreement.runner import meet
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.liveness.peer import host_id
from easydist.queue.end import deadline
from easydist.queue.handle import Handle
from easydist.queue.reader import ReaderEnd
from easydist.queue.writer import WriterEnd
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.objects import gather_object
from easydist.verbs.ranks import check_rank

_T = TypeVar("_T")


class MessageQueue:
    """Objects from one writer to all of its readers, in order, each exactly once.

    Law: what ``dequeue`` returns on every reader, call by call, is what was given to ``enqueue``; copies, taken before
    ``enqueue`` returns. A reader that is slow makes the writer wait; nothing is lost.

    Readers on the writer's host share memory with it, others are connected by TCP. Any Python object may be sent; by
    default only plain data, tensors, arrays and what is allow-listed (``docs/safety.md``). Whoever waits sleeps. One
    process may hold several ends; several threads may share one. A forked child has to make ends of its own.

    Example:
        >>> writer = MessageQueue(n_reader=1, n_local_reader=1)
        >>> reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)
        >>> writer.enqueue({"step": 1})
        >>> reader.dequeue()
        {'step': 1}
        >>> writer.close(), reader.close()
        (None, None)

    Args:
        n_reader: How many readers there are.
        n_local_reader: How many of them are on this host. One that turns out not to share memory with the writer
            (another container) is connected by TCP.
        local_reader_ranks: Their ranks; None is 0, 1, …
        max_chunk_bytes: ``max_chunk_bytes * max_chunks`` bytes may wait in the queue; larger messages go in pieces,
            while they are read. Memory is taken from the system as it is needed.
        max_chunks: How many messages may wait in the queue.
        connect_ip: The address at which other hosts reach this one; None finds it out.
        weights_only: Decode with the restricted decoder, and refuse in ``enqueue`` what it would refuse.

    Raises:
        ValueError: The numbers do not fit together.
        UnsafeObjectError: ``weights_only`` is False and pickle is denied.
        OSError: It cannot listen at ``connect_ip``.

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
        *,
        weights_only: bool = True,
    ) -> None:
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
        _check_numbers(n_reader, n_local_reader, ranks, max_chunk_bytes, max_chunks)
        if not weights_only:
            codec.demand_pickle()
        end = WriterEnd(n_reader, ranks, max_chunk_bytes, max_chunks, connect_ip)
        self._begin(end, end.handle(weights_only))

    def _begin(self, end: WriterEnd | ReaderEnd, handle: Handle) -> None:
        self._end, self._handle = end, handle
        self._finalize = weakref.finalize(self, end.close)  # at the end of the process, too

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """A reader's end.

        Args:
            handle: What the writer's ``export_handle`` has returned.
            rank: Which reader this is; each rank once. Ranks that are not among the local ones are connected by TCP.

        Raises:
            ConnectionError: The writer is not to be found.
            RuntimeError: This rank has been taken.
            WireError: The handle is damaged.
            UnsafeObjectError: The queue has ``weights_only=False`` and pickle is denied here.
        """
        if not handle.weights_only:
            codec.demand_pickle()
        self = MessageQueue.__new__(MessageQueue)
        self._begin(ReaderEnd(handle, rank), handle)
        return self

    @property
    def is_writer(self) -> bool:
        """Whether this is the writer's end."""
        return isinstance(self._end, WriterEnd)

    def export_handle(self) -> Handle:
        """What readers need to attach; it can be pickled, and holds the key of the queue."""
        return self._handle

    def wait_until_ready(self, timeout: Timeout | None = None) -> None:
        """Wait until all readers have attached. To be called by the writer and by all readers, or by none.

        Args:
            timeout: Seconds, or a timedelta; None waits for ever.

        Raises:
            TimeoutError: The time is over.
            PeerLostError: The writer, or a reader that had attached, has ended.
            ConnectionError: A reader has come and cannot be let in; the text says why. The next call waits again.
            RuntimeError: ``cancel`` or ``close`` was called.
        """
        self._end.wait_until_ready(deadline(timeout))

    def enqueue(self, obj: Any, timeout: Timeout | None = None) -> None:
        """Give ``obj`` to all readers; returns when it has been copied, and waits where there is no room.

        Args:
            obj: Anything that the queue's decoder takes.
            timeout: Seconds, or a timedelta; None waits for ever.

        Raises:
            TimeoutError: There was no room in time. No reader gets the object, not even if a part of it was under way.
            PeerLostError: A reader's process has ended, its connection broke.
            ConnectionError: A reader has come and cannot be let in; the text says why. The next call waits again.
            BrokenPipeError: A reader has closed its end.
            RuntimeError: This is a reader's end, a closed one, or a forked child's; ``cancel`` was called.
            TypeError: ``obj`` cannot be pickled.
            UnsafeObjectError: ``obj`` is not allow-listed.

        Cost: two copies of what is large, one in the writer and one in each reader; by TCP one more in the writer.
        """
        end = self._end
        if not isinstance(end, WriterEnd):
            raise RuntimeError("Only writers can enqueue: this is a reader's end")
        until = deadline(timeout)
        message = codec.EncodedObject(obj)
        if self._handle.weights_only:
            message.check()
        end.put(message, until)

    def dequeue(self, timeout: Timeout | None = None, indefinite: bool = False) -> Any:
        """The next object.

        Args:
            timeout: Seconds, or a timedelta; None waits for ever.
            indefinite: Do not log that a wait takes minutes.

        Raises:
            TimeoutError: Nothing came in time. What has come of a message is kept for the next call.
            EOFError: The writer has closed the queue, and everything has been read.
            PeerLostError: The writer's process has ended, the connection to it broke; everything has been read.
            RuntimeError: This is the writer's end, a closed one, or a forked child's; ``cancel`` was called.
            UnsafeObjectError: The object is not allow-listed here. It is dropped.
        """
        end = self._end
        if not isinstance(end, ReaderEnd):
            raise RuntimeError("Only readers can dequeue: this is the writer's end")
        return codec.decode(end.take(deadline(timeout), indefinite), weights_only=self._handle.weights_only)

    def broadcast_object(self, obj: Any = None) -> Any:
        """``enqueue`` and return ``obj`` on the writer, ``dequeue`` on the readers."""
        if not self.is_writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def __iter__(self) -> Iterator[Any]:
        """Objects until the writer closes the queue."""
        while True:
            try:
                value = self.dequeue()
            except EOFError:
                return
            yield value

    def cancel(self) -> None:
        """End the waits of this end, from any thread: they raise ``RuntimeError("cancelled")``, now and later."""
        self._end.cancel()

    def close(self) -> None:
        """Close this end.

        Readers can still take what was enqueued before; then they get EOFError. A writer gets BrokenPipeError once a
        reader has closed. Slow connections get 5 s to take what is under way. Happens by itself at the end of the
        process, and when the object is no longer used; a forked child closes nothing.
        """
        self._finalize()

    def shutdown(self) -> None:
        """As ``close``."""
        self.close()

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
        """A queue from one rank of a group to all others; called by all ranks.

        Args:
            pg: The group.
            max_chunk_bytes: As in the constructor.
            max_chunks: As in the constructor.
            writer_rank: The writer, a rank inside the group.
            external_writer_handle: Of a writer outside the group; given on ``writer_rank``. All ranks are its readers
                then, by their ranks inside the group.
            blocking: Wait until all readers have attached.
            weights_only: As in the constructor.

        Returns:
            The writer's end on ``writer_rank`` (but see ``external_writer_handle``), readers' ends elsewhere.

        Raises:
            RemoteError: A rank could not make its end; on that rank ``__cause__`` says why.
            ValueError: ``writer_rank`` is not a rank of the group.

        Cost: four exchanges of a few hundred bytes.
        """
        comms = communicators(pg)
        check_rank(comms, "writer_rank", writer_rank)
        hosts = gather_object([host_id()], weights_only=True, group=pg)

        def make() -> MessageQueue | None:
            if comms.rank != writer_rank or external_writer_handle is not None:
                return None
            readers = [r for r in range(comms.size) if r != writer_rank]
            local = [r for r in readers if hosts[r] == hosts[writer_rank]]
            return MessageQueue(len(readers), len(local), local, max_chunk_bytes, max_chunks, weights_only=weights_only)

        queue = _all_or_none(comms, make)
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
        """A queue from every rank of a group, the reader's own included, to one of them; called by all ranks.

        Args:
            pg: The group.
            max_chunk_bytes: As in the constructor.
            max_chunks: As in the constructor.
            reader_rank: The reader, a rank of the whole world, as in vLLM.
            blocking: Wait until the reader has attached. The reader itself does not wait, because it has to attach.
            weights_only: As in the constructor.

        Returns:
            The writer's end of this rank's queue; on the reader the handles of all of them, in the order of the ranks,
            each for ``create_from_handle(handle, 0)``, elsewhere an empty list.

        Raises:
            RemoteError: A rank could not make its end.
            ValueError: ``reader_rank`` is not in the group.

        Cost: three exchanges of a few hundred bytes.
        """
        comms = communicators(pg)
        reader = dist.get_group_rank(pg, reader_rank) if isinstance(pg, dist.ProcessGroup) else reader_rank
        check_rank(comms, "reader_rank", reader)
        hosts = gather_object([host_id()], weights_only=True, group=pg)
        is_local = hosts[comms.rank] == hosts[reader]
        queue = _all_or_none(
            comms,
            lambda: MessageQueue(1, int(is_local), None, max_chunk_bytes, max_chunks, weights_only=weights_only),
        )
        handles = gather_object([queue.export_handle().plain()], weights_only=True, group=pg)
        if blocking and comms.rank != reader:
            queue.wait_until_ready()
        return queue, [Handle(*plain) for plain in handles] if comms.rank == reader else []


def _all_or_none(comms: Communicators, make: Callable[[], _T]) -> _T:
    """What ``make`` returns; where it raises on one rank, all ranks raise."""
    try:
        made = make()
    except Exception as error:
        meet(comms, "MessageQueue", error)
        raise
    meet(comms, "MessageQueue")
    return made


def _check_numbers(n_reader: int, n_local: int, ranks: list[int], max_chunk_bytes: int, max_chunks: int) -> None:
    if not 0 <= n_local <= n_reader or len(set(ranks)) != n_local:
        raise ValueError(
            f"MessageQueue: n_reader={n_reader}, n_local_reader={n_local}, local_reader_ranks={ranks}: there cannot be "
            "more local readers than readers, and each has a rank of its own"
        )
    if max_chunk_bytes < 1 or max_chunks < 1:
        raise ValueError(f"MessageQueue: max_chunk_bytes={max_chunk_bytes}, max_chunks={max_chunks}: at least 1 each")
