"""A backend for hosts of several ranks: shared memory inside a host, one rank per host between hosts.

Data that every rank gets (all-gather, broadcast, all-reduce, barrier) crosses between two hosts once, from *leader* to
leader, the lowest ranks of their hosts, and spreads inside each host through shared memory. So each rank's bytes
between hosts are divided by the number of ranks per host. Data that only one rank gets (gather, scatter, all-to-all,
send and receive) crosses only once anyway; it goes straight to that rank, through memory or over the group's
connections.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch

from easydist import memory
from easydist.base.wording import reason
from easydist.data.arithmetic import split_sizes
from easydist.errors import without_frames
from easydist.transport.backend import Backend, parts_beside, set_to
from easydist.transport.backends.c10d import Gloo
from easydist.transport.reduce_op import RedOpType, ReduceOp, accumulator, average, check_reducible, combine
from easydist.transport.rounds import LENGTH, end_of, put
from easydist.transport.work import ENDED, Begun, TorchWork, handle


class Hierarchical(Backend):
    """The backend for tensors on the CPU between ranks of several hosts.

    All ranks issue their operations in the same order (sends and receives: in the same order per pair). Collectives
    that have several steps run one after another, in that order, inside ``wait``. After a failed operation the backend
    cannot be used any more.

    Args:
        near: The backend among the ranks of this host, in their order.
        gloo: The backend among all ranks; this backend sends its own messages over its connections.
        hosts: The ranks of each host, ascending; the hosts by their lowest ranks.
        lane: A number that differs for each ``Hierarchical`` over the same connections.
    """

    name = "hierarchical"
    collects = False
    device = torch.device("cpu")

    def __init__(self, near: Backend, gloo: Gloo, hosts: Sequence[Sequence[int]], lane: int = 0) -> None:
        self.rank, self.size, self._near = gloo.rank, gloo.size, near
        self._hosts = [list(ranks) for ranks in hosts]
        self._host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._host = self._host_of[self.rank]
        self._here = self._hosts[self._host]
        # Lane 0 is the group's own, and no other ``lane`` leads to the same two.
        self._direct = gloo.among(range(self.size), 2 * lane + 1)
        leaders = [ranks[0] for ranks in hosts]
        self._far = gloo.among(leaders, 2 * lane + 2) if self.rank in leaders else None
        self._queue = RunQueue()
        self._room = _Room(0, self._hosts, self._host)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor) -> Begun:
        return self.all_gather_v(output.chunk(self.size) if output.numel() else [output] * self.size, data)

    def all_gather_upto(self, rows: torch.Tensor, nbytes: int) -> Begun:
        return self._queue.begin(self._gather_frames(rows, nbytes))

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> Begun:
        return self._queue.begin(self._gather_all(outputs, data))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Begun:
        return self.all_reduce_from(tensor, tensor, op)

    def all_reduce_from(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> Begun:
        """Reduce inside each host in rank order, then over the hosts, in the order of their lowest ranks.

        If floats are rounded, the result may differ from that in rank order (``(a + b) + (c + d)`` on two hosts of
        two), but all ranks get the same bits in every run on hosts that hold the same ranks. Sums and products of
        floats of 16 and 8 bits stay float32 until they include all ranks.
        """
        check_reducible(data.dtype, op)
        return self._queue.begin(self._reduce(output, data, op))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Begun:
        # Only on the root may the tensor change.
        total = memory.empty([tensor.numel()], tensor.dtype)
        work = self.all_reduce_from(total, tensor, op)
        return handle(work).followed_by(lambda: set_to(tensor, total)) if self.rank == root else work

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> Begun:
        total = torch.cat(list(inputs))
        mine = total.split([len(tensor) for tensor in inputs])[self.rank]
        return handle(self.all_reduce(total, op)).followed_by(lambda: set_to(output, mine))

    def barrier(self) -> Begun:
        return self._queue.begin(self._meet())

    def broadcast(self, tensor: torch.Tensor, root: int) -> Begun:
        return self._queue.begin(self._spread(tensor, root))

    def multicast(self, tensor: torch.Tensor, root: int, ranks: Sequence[int]) -> Begun:
        if len(ranks) == self.size - 1:
            return self.broadcast(tensor, root)
        return self._queue.begin(self._spread_to(tensor, root, ranks))

    def all_to_all_v(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Begun:
        near = self._near.all_to_all_v(self._local(outputs), self._local(inputs))
        return TorchWork([near, self._direct.all_to_all_v(self._remote(outputs), self._remote(inputs))])

    def gather(self, outputs: Sequence[torch.Tensor], data: torch.Tensor, root: int) -> Begun:
        if root not in self._here:
            return self._direct.gather([], data, root)
        near = self._near.gather(self._local(outputs), data, self._here.index(root))
        if root != self.rank:
            return near
        return TorchWork([near, self._direct.gather(self._remote(outputs), data[:0], root)])

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Begun:
        if root not in self._here:
            return self._direct.scatter(output, [], root)
        near = self._near.scatter(output, self._local(inputs), self._here.index(root))
        if root != self.rank:
            return near
        return TorchWork([near, self._direct.scatter(output[:0], self._remote(inputs), root)])

    def send(self, tensor: torch.Tensor, dst: int) -> Begun:
        is_near = dst in self._here
        return self._near.send(tensor, self._here.index(dst)) if is_near else self._direct.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Begun:
        is_near = src in self._here
        return self._near.recv(tensor, self._here.index(src)) if is_near else self._direct.recv(tensor, src)

    def close(self) -> None:
        """Release the host's memory; operations under way do not end."""
        self._queue.fail(RuntimeError("it has been closed"))
        self._near.close()

    def _local(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[r] for r in self._here] if tensors else []

    def _remote(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return one tensor per rank, empty for the ranks of this host: empty tensors are not sent."""
        return [tensor[:0] if r in self._here else tensor for r, tensor in enumerate(tensors)]

    def _meet(self) -> Iterator[Begun]:
        # Twice here: a leader speaks for its whole host, and nobody leaves before its leader has heard from all hosts.
        yield self._near.barrier()
        if self._far:
            yield self._far.barrier()
        yield self._near.barrier()

    def _spread(self, tensor: torch.Tensor, root: int) -> Iterator[Begun]:
        home = self._host_of[root]
        # First at home: the leader there, which sends to the other hosts, may not be the root.
        if home == self._host:
            yield self._near.broadcast(tensor, self._here.index(root))
        if self._far:
            yield self._far.broadcast(tensor, home)
        if home != self._host:
            yield self._near.broadcast(tensor, 0)

    def _spread_to(self, tensor: torch.Tensor, root: int, ranks: Sequence[int]) -> Iterator[Begun]:
        """Send to the first receiver of each other host, which spreads it there: the leader may not be a receiver."""
        home = self._host_of[root]
        # Reversed, so that the lowest receiver of a host stays; at home the root takes its place.
        firsts = {self._host_of[rank]: rank for rank in reversed(ranks)} | {home: root}
        far = self._direct.multicast(tensor, root, [rank for rank in firsts.values() if rank != root])
        if home != self._host:  # otherwise both are under way at once
            yield far
        rest = [i for i, rank in enumerate(self._here) if rank in ranks and rank != firsts[self._host]]
        if rest:
            yield self._near.multicast(tensor, self._here.index(firsts[self._host]), rest)
        yield far

    def _gather_all(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> Iterator[Begun]:
        """Let the leaders exchange the data of their first ranks, their second ranks, …, straight into its place."""
        yield self._near.all_gather_v(self._local(outputs), data)
        # In the later rounds the leader of a smaller host sends nothing, but the others' data comes to it.
        rounds = [[ranks[k] if k < len(ranks) else None for ranks in self._hosts] for k in range(self._longest)]
        arriving = [self._exchange([data[:0] if r is None else outputs[r] for r in round_]) for round_ in rounds]
        spreading = []
        for round_, work in zip(rounds, arriving, strict=True):
            yield work
            ranks = [r for r in round_ if r is not None and r not in self._here]
            # Waited for at the end: until then, later rounds arrive.
            spreading += [self._near.broadcast(outputs[r], 0) for r in ranks]
        yield from spreading

    @property
    def _longest(self) -> int:
        return max(map(len, self._hosts))

    def _exchange(self, outputs: Sequence[torch.Tensor]) -> Begun:
        """Exchange among leaders: ``outputs[h]`` goes from host h to all."""
        return self._far.all_gather_v(outputs, outputs[self._host]) if self._far else ENDED

    def _reduce(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> Iterator[Begun]:
        """Reduce inside the host; then leaders exchange their results, or chunks of them and the totals of these."""
        grows = op.type in (RedOpType.SUM, RedOpType.PRODUCT, RedOpType.AVG)
        wide = data.to(accumulator(data.dtype, op)) if grows and data.dtype is not torch.uint64 else data
        # Hosts may differ in size, so the mean of their means is not that of all ranks.
        is_mean, op = op.type is RedOpType.AVG, ReduceOp.SUM if op.type is RedOpType.AVG else op
        total = output if wide is data else wide
        yield self._near.all_reduce_from(total, wide, op)
        if self._far and self._far.reduces_whole(total, op):
            yield self._far.all_reduce(total, op)
            output.copy_(average(total, self.size) if is_mean else total)
        elif self._far:
            sizes = split_sizes(output.numel(), self._far.size)
            chunks, results = total.split(sizes), output.split(sizes)
            parts = parts_beside(chunks[self._host], self._host, self._far.size)
            yield self._far.all_to_all_v(_bits(parts), _bits(chunks))
            mine = combine(op, parts)
            results[self._host].copy_(average(mine, self.size) if is_mean else mine)
            yield self._exchange(_bits(results))
        yield self._near.broadcast(output.view(torch.uint8), 0)

    def _gather_frames(self, rows: torch.Tensor, nbytes: int) -> Iterator[Begun]:
        """Gather frames; the frames of a host form one message between leaders."""
        stride, frames = rows.shape[1], rows.view(-1).numpy().data
        room = self._room = self._room if self._room.stride == stride else _Room(stride, self._hosts, self._host)
        mine = room.near_views[self._here.index(self.rank)]
        stop = put(mine, frames[self.rank * stride : self.rank * stride + nbytes])
        yield self._near.all_gather_upto(room.near, stop)
        if self._far:
            yield self._far.all_gather_upto(room.far, room.bundle())
        # Not a broadcast: only the leader knows how long its message is.
        yield self._near.all_gather_upto(room.relay, room.relayed() if self._far else 0)
        for rank, frame in room.arrived():
            if rank != self.rank:
                frames[rank * stride : rank * stride + len(frame)] = frame


class _Room:
    """The buffers for frames in transit, each frame after its length; reused while the rows have the same length.

    Args:
        stride: The length of the rows.
        hosts: The ranks of each host.
        host: The index of this host.
    """

    def __init__(self, stride: int, hosts: Sequence[Sequence[int]], host: int) -> None:
        self.stride, self._hosts, self._host = stride, hosts, host
        record, here = LENGTH.size + stride, len(hosts[host])
        self.near, self.near_views = _rows(here, record)
        self.far, self._far_views = _rows(len(hosts), record * max(map(len, hosts)))
        self.relay, self._relay_views = _rows(here, record * sum(map(len, hosts)))

    def bundle(self) -> int:
        """Concatenate the frames of this host; return their length."""
        return _join(self._far_views[self._host], [view[: end_of(view)] for view in self.near_views])

    def relayed(self) -> int:
        """Concatenate the frames from the other hosts; return their length."""
        others = [(view, len(ranks)) for view, ranks in zip(self._far_views, self._hosts, strict=True)]
        del others[self._host]
        return _join(self._relay_views[0], [view[: end_of(view, count)] for view, count in others])

    def arrived(self) -> Iterator[tuple[int, memoryview]]:
        """Yield each rank and its frame."""
        for rank, view in zip(self._hosts[self._host], self.near_views, strict=True):
            yield rank, view[LENGTH.size : end_of(view)]
        start, view = 0, self._relay_views[0]
        for rank in (rank for host, ranks in enumerate(self._hosts) if host != self._host for rank in ranks):
            stop = end_of(view, 1, start)
            yield rank, view[start + LENGTH.size : stop]
            start = stop


def _rows(count: int, nbytes: int) -> tuple[torch.Tensor, list[memoryview]]:
    rows = torch.empty((count, nbytes), dtype=torch.uint8, device="cpu")
    return rows, [row.numpy().data for row in rows]


def _join(view: memoryview, parts: Sequence[memoryview]) -> int:
    """Concatenate parts into ``view``; return the offset of their end."""
    stop = 0
    for part in parts:
        view[stop : stop + len(part)] = part
        stop += len(part)
    return stop


def _bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8) for tensor in tensors]


class _Queued(TorchWork):
    """A collective of several steps, which runs after those that have begun before it."""

    def __init__(self, queue: RunQueue, steps: Iterator[Begun]) -> None:
        super().__init__(itertools.chain([ENDED], steps))  # its first step begins in its turn, too
        self.queue: RunQueue | None = queue

    def advance(self, waits: bool, timeout: timedelta | None) -> bool:
        if (queue := self.queue) is None:
            return super().advance(waits, timeout)
        # Not its own lock: a background thread gives up an operation that is locked, since another one runs it.
        if not queue.lock.acquire(blocking=waits):
            return False
        try:
            return queue.run(self, waits, timeout)
        finally:
            queue.lock.release()


class RunQueue:
    """Operations that run one at a time, in the order in which they began; a wait for one also ends all before it.

    So all ranks take the same steps in the same order, in whichever order each of them waits.

    Example:
        >>> from easydist.comms import TorchWork
        >>> queue = RunQueue()
        >>> def steps():
        ...     yield TorchWork()
        ...     print("the second step")
        >>> queue.begin(steps()).wait()
        the second step
    """

    def __init__(self) -> None:
        self._queue: deque[_Queued] = deque()
        self.lock = threading.Lock()
        self._error: BaseException | None = None

    def begin(self, steps: Iterator[Begun]) -> TorchWork:
        """Queue an operation; if it is the first, run it until it would have to wait.

        Args:
            steps: An iterator that begins a step at each ``next``.

        Raises:
            RuntimeError: An earlier operation has failed, or ``fail`` was called.
        """
        self._check()
        work = _Queued(self, steps)
        self._queue.append(work)
        if work.is_completed():
            work.wait()  # it may have failed
        return work

    def run(self, last: _Queued, waits: bool, timeout: timedelta | None) -> bool:
        """Run the operations up to ``last``, which holds the lock; see ``TorchWork.advance``."""
        works = self._queue
        while last.queue is not None:
            self._check()
            try:
                # Not its own ``advance``, which would wait for the lock that ``last`` holds.
                if not super(_Queued, works[0]).advance(waits, timeout):
                    return False
            except BaseException as error:  # a step was left unfinished
                self.fail(error)
                raise
            works.popleft().queue = None
        return True

    def fail(self, error: BaseException) -> None:
        """Drop all operations under way, and refuse new ones with this error."""
        self._error, self._queue = without_frames(error), deque()  # another thread may be running the old ones

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"this communicator can no longer be used: {reason(self._error)}") from self._error
