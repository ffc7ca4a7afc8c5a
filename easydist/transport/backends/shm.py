"""A backend over shared memory, for ranks of one host.

Data that several ranks read is in slots, and each such collective consists of numbered steps that all ranks take. Data
that only one rank reads (gather, scatter, all_to_all, send, recv, a multicast to one rank) goes through pipes between
pairs, because no rank knows the sizes of the messages between two others. Small messages take one step: copy into the
own slot, publish, wait for all, copy out. Reductions run in rank order, straight out of the slots, each rank its share
of the elements.

Measured on two cores with 16 MB from each rank: slots of 2 MB stay in the cache between the two copies, and all-gather
takes 3.3 ms on two ranks and 14 ms on four; with slots of 8 MB it takes 5 and 18 ms. One copy by ``process_vm_readv``
instead of two does not pay off: it moves 7 GB/s (14 in pieces of 2 MB), a copy in the cache moves 48, and it is often
forbidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch

from easydist.data.arithmetic import split_bounds
from easydist.errors import DisagreementError
from easydist.memory import copy
from easydist.shm.calls import Calls
from easydist.shm.mailbox import Mailbox
from easydist.shm.segment import Segment
from easydist.shm.slots import COLLECTIVES, NEVER, POINT_TO_POINT, TAG, Differ, Need, Slots, unequal
from easydist.shm.steps import Extent, Steps
from easydist.shm.streams import AnyRank, Guard, Operation, Streams, Task
from easydist.transport.backend import Backend, Gathered
from easydist.transport.described import DTYPE_CODES, GOES_ON, OWN, described, text
from easydist.transport.reduce_op import ReduceOp, check_reducible, combine_into
from easydist.transport.work import ENDED, Pending

_REDUCED_AT_ONCE = 1 << 16
"""The bytes up to which every rank reduces everything: W times the work, but one step instead of two."""

_LOOK_EVERY = 0.05
"""The seconds between two looks at the ranks that may still send."""

_BLOCK = 1 << 17
"""The number of elements that are reduced at a time, so that intermediate sums stay in the cache."""


class Shm(Backend):
    """The backend for tensors on the CPU between the ranks of one host.

    All ranks attach one segment, and issue their operations in the same order (sends and receives: in the same order
    per pair). Several operations may be under way; they advance while this process waits for any of them. A forked
    child cannot use the backend.

    Args:
        segment: The segment, of ``Shm.nbytes(size, slot)`` bytes, zeros at first; it may be unlinked once all have
            attached.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        guard: A function that every wait calls about every 50 ms, with the ranks still awaited and the seconds waited
            so far. It raises to end the wait; after that the backend cannot be used any more.

    Example:
        >>> from easydist.comms import Shm
        >>> from easydist.shm import Segment
        >>> segment = Segment.create(Shm.nbytes(size=1, slot=4096))
        >>> segment.unlink()
        >>> Shm(segment, 0, 1, guard=lambda ranks, seconds: None).size
        1

    Raises:
        OSError: The order of memory accesses cannot be kept on this machine; see ``easydist.shm.futex``.
    """

    name = "shm"
    moves_any_dtype = shares_memory = True
    device = torch.device("cpu")

    def __init__(self, segment: Segment, rank: int, size: int, guard: Guard) -> None:
        self.rank, self.size = rank, size
        slots = Slots(segment, rank, size)
        self._calls = calls = Calls(slots)
        self._steps, self._streams = Steps(slots, calls), Streams(slots, calls, guard)
        calls.restart = self._steps.restart
        self._reduced_at_once = min(_REDUCED_AT_ONCE, slots.slot)
        self._mailboxes: dict[int, Mailbox] = {}

    @staticmethod
    def nbytes(size: int, slot: int) -> int:
        """Return the bytes that the segment of a group needs.

        Args:
            size: The number of processes in the group.
            slot: The bytes that a rank can publish at once, 2 MB if there is room; larger data goes in pieces.
        """
        return Slots.nbytes(size, slot)

    def compare(
        self, error: Callable[[str], DisagreementError], who: str, excludes: Callable[[], object] | None = None
    ) -> None:
        self._calls.error_of = lambda dispute: error(text(dispute, f"{who} {GOES_ON}"))
        self.compares = self._calls.compares = True
        self.call = OWN
        if excludes is not None:
            self._streams.excludes = excludes

    def _word(self) -> int:
        """Return the word of the collective that begins; 0 if calls are not compared."""
        self._streams.check()  # a call that is refused has no number
        return 0 if (call := self.call) is None else self._calls.begin(call)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor) -> Pending:
        address, nbytes = output.data_ptr(), data.nbytes
        rows = [(address + r * nbytes, nbytes) for r in range(self.size)]
        return self._step(self._share(_extent(data), rows), output, data)

    def all_gather_upto(self, rows: torch.Tensor, nbytes: int) -> Pending:
        share = self._steps.share_upto(rows.data_ptr(), rows.shape[1], nbytes, self._word())
        return self._step(share, rows, patient=True)

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> Pending:
        return self._step(self._share(_extent(data), list(map(_extent, outputs))), *outputs, data)

    def all_gather_parts(self, parts: Sequence[Gathered]) -> Pending:
        rows: list[list[Extent]] = [[] for _ in range(self.size)]
        for output, data, sizes in parts:
            address, nbytes = output.data_ptr(), data.nbytes
            for rank, row in enumerate(rows):
                length = nbytes if sizes is None else sizes[rank] * data.itemsize
                row.append((address, length))
                address += length
        mine = [_extent(data) for _, data, _ in parts]
        return self._step(self._steps.share(mine, rows, self._word()), parts)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        return self.all_reduce_from(tensor, tensor, op)

    def all_reduce_from(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> Pending:
        if data.nbytes > self._reduced_at_once:
            return self.all_reduce_parts([output], [data], op)
        check_reducible(data.dtype, op)
        return self._step(_reduce_at_once(self._steps, output, data, op, self._word()), output, data)

    def all_reduce_parts(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        check_reducible(parts[0].dtype, op)
        return self._step(_reduce_in_shares(self._steps, outputs, parts, op, self._word()), *outputs, *parts)

    def barrier(self) -> Pending:
        return self._step(self._steps.meet(self._word()))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        return self._step(self._steps.spread([_extent(tensor)], root, self._word()), tensor)

    def broadcast_parts(self, tensors: Sequence[torch.Tensor], root: int) -> Pending:
        return self._step(self._steps.spread(list(map(_extent, tensors)), root, self._word()), *tensors)

    def multicast(self, tensor: torch.Tensor, root: int, ranks: Sequence[int]) -> Pending:
        if len(ranks) > 1:
            spread = self._steps.spread([_extent(tensor)], root, self._word(), copies=self.rank in ranks)
            return self._step(spread, tensor)
        # Ranks without a part come here, too: ``_swap`` numbers the call, as on the others.
        sends = [(peer, tensor) for peer in ranks if self.rank == root]
        return self._swap(sends, [(root, tensor)] if self.rank in ranks else [])

    def all_to_all_v(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        _copy(outputs[self.rank], inputs[self.rank])
        return self._swap([*enumerate(inputs)], [*enumerate(outputs)])

    def gather(self, outputs: Sequence[torch.Tensor], data: torch.Tensor, root: int) -> Pending:
        if self.rank != root:
            return self._swap([(root, data)], [])
        _copy(outputs[root], data)
        return self._swap([], [*enumerate(outputs)])

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Pending:
        if self.rank != root:
            return self._swap([], [(root, output)])
        _copy(output, inputs[root])
        return self._swap([*enumerate(inputs)], [])

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Pending:
        self._streams.check()
        put = self._put(POINT_TO_POINT, dst, tensor, self._kind(tensor, tag))
        return ENDED if put is None else self._message("send", put, tensor, dst)

    def has_room(self, sizes: Sequence[int], dst: int) -> bool:
        """True if messages of these bytes would be sent at once, without waiting for their receiver.

        Args:
            sizes: The bytes of each message.
            dst: The receiver.
        """
        pipe = self._steps.slots.pipe_to(POINT_TO_POINT, dst)
        return self._streams.is_idle(pipe) and pipe.has_room(sizes)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Pending:
        self._streams.check()
        return self._message("recv", self._take_message(src, tensor, self._kind(tensor, tag)), tensor, src)

    def recv_any(
        self, tensor: torch.Tensor, tag: int, senders: Callable[[], Sequence[int]]
    ) -> tuple[Pending, Sequence[int]]:
        """Receive the next message with a tag from any rank; those for which a ``recv`` waits count for that.

        Args:
            tensor: As in ``recv``.
            tag: The tag.
            senders: Returns the ranks that may still send.

        Returns:
            The operation, and a list that has the sender once it has ended.
        """
        self._streams.check()
        found: list[int] = []
        task = self._take_any(tensor, self._kind(tensor, tag), senders, found)
        return self._message("recv", (AnyRank(tag), task), tensor, None), found

    def _take_any(
        self, tensor: torch.Tensor, kind: int, senders: Callable[[], Sequence[int]], found: list[int]
    ) -> Iterator[Need]:
        slots, until, need = self._steps.slots, 0.0, (NEVER, self._steps.slots.others)
        pipes = [slots.pipe_from(POINT_TO_POINT, peer) for peer in slots.others]
        while True:
            for pipe in pipes:
                # A ``recv`` from this rank, or another task like this one, gets its next message.
                if not self._streams.is_idle(pipe) or pipe.is_lent:
                    continue
                pipe.is_lent = True
                try:
                    if (yield from pipe.has_come(kind)):
                        found.append(pipe.peer)
                        yield from self._take_message(pipe.peer, tensor, kind, lent=True)[1]
                        return
                finally:
                    pipe.is_lent = False
            if (now := time.monotonic()) >= until:  # each look at the processes takes microseconds
                until, need = now + _LOOK_EVERY, (NEVER, tuple(senders()))
            yield need

    def _message(self, name: str, task: Task, tensor: torch.Tensor, peer: int | None) -> Pending:
        operation = self._streams.begin([task], tensor)
        operation.is_collective = False
        if operation.left:
            about = None if self.call is OWN else (name, tensor, peer)
            operation.describe = lambda: OWN if about is None else described(*about)
        return operation

    def _kind(self, tensor: torch.Tensor, tag: int) -> int:
        """Return the kind of a message: its epoch, its tag and, if it is not part of a verb, its dtype."""
        if self.call is None:
            return tag << TAG
        calls = self._calls
        calls.check()
        kind = calls.high | tag << TAG
        return kind if self.call is OWN else kind | DTYPE_CODES[tensor.dtype]

    def mailbox(self, peer: int) -> Mailbox:
        """Return the mailbox for short messages to and from another rank; they never mix with other messages.

        Args:
            peer: The other rank.
        """
        if peer not in self._mailboxes:
            self._mailboxes[peer] = Mailbox(self._steps.slots, self._streams, peer)
        return self._mailboxes[peer]

    def parts(self, awaited: Sequence[int]) -> dict[int, bool | None] | None:
        """Return what the other ranks do about the operation for which this one waits, if calls are compared.

        Args:
            awaited: The ranks for which it waits.

        Returns:
            True for a rank in which a thread waits, False for one that has begun it, but waits for nothing, None for
            one that has not begun it. Messages are not numbered: only the awaited ranks have a part, and have begun it
            once a part of the message has moved. None instead of the dict once the memory is closed.
        """
        slots: Slots | None = getattr(self._steps, "slots", None)  # not once it is closed
        if slots is None:
            return None
        operation = self._streams.guarded
        if operation is None or operation.is_collective:
            return slots.parts(self._calls.number)
        return {rank: slots.waits(rank) if self._has_begun(rank, operation) else None for rank in awaited}

    def _has_begun(self, rank: int, operation: Operation) -> bool:
        """True if a part of the message has moved for which an operation waits."""
        slots = self._steps.slots
        pipes = slots.pipe_to(POINT_TO_POINT, rank), slots.pipe_from(POINT_TO_POINT, rank)
        return any(p.has_begun() and (p.is_lent or self._streams.is_first(p, operation)) for p in pipes)

    def finish(self, limit: timedelta | None = None) -> None:
        self._streams.finish(limit)

    def close(self) -> None:
        """Release the memory; operations under way do not end."""
        self._mailboxes.clear()
        self._streams.close()
        self._steps.close()

    def _share(self, mine: Extent, rows: Sequence[Extent]) -> Iterator[Need]:
        if max([nbytes for _, nbytes in rows]) <= self._steps.slots.slot:
            return self._steps.share_small(mine, rows, self._word())
        return self._steps.share([mine], [[row] for row in rows], self._word())

    def _step(self, task: Iterator[Need], *keep: object, patient: bool = False) -> Pending:
        if self._calls.is_entering:
            task = self._calls.entered(task)
        return self._streams.begin([(None, task)], keep, patient)

    def _swap(self, sends: Sequence[tuple[int, torch.Tensor]], recvs: Sequence[tuple[int, torch.Tensor]]) -> Pending:
        """Send to each rank and receive from it, through the pipes.

        Empty tensors are sent, too: the other rank may expect data, and must not take the next message for it.
        """
        word = self._word()
        tasks: list[Task] = []
        for peer, tensor in sends:
            if peer != self.rank and (put := self._put(COLLECTIVES, peer, tensor, word)):
                tasks.append(put)
        for peer, tensor in recvs:
            if peer != self.rank:
                tasks.append(self._take(peer, tensor, word))
        if self._calls.is_entering:
            tasks = [(key, self._calls.entered(task)) for key, task in tasks]
        return self._streams.begin(tasks, (sends, recvs)) if tasks else ENDED

    def _put(self, lane: int, peer: int, tensor: torch.Tensor, kind: int) -> Task | None:
        """Return the task that sends a tensor; None if the pipe has taken it at once."""
        pipe = self._steps.slots.pipe_to(lane, peer)
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        # Not before a message under way in this pipe, nor before all ranks have entered a new epoch.
        is_free = not (lane == COLLECTIVES and self._calls.is_entering) and self._streams.is_idle(pipe)
        if is_free and pipe.put_whole(address, nbytes, kind):
            return None
        return pipe, pipe.put(address, nbytes, kind)

    def _take(self, peer: int, tensor: torch.Tensor, word: int) -> Task:
        """Return the task that receives a tensor of a collective."""
        pipe, calls = self._steps.slots.pipe_from(COLLECTIVES, peer), self._calls
        differ: Differ = _unequal
        if word:
            differ = lambda rank, kind, found, expected: calls.differ(word, rank, found, expected)  # noqa: E731
        return pipe, pipe.take(tensor.data_ptr(), tensor.nbytes, word, differ)

    def _take_message(self, peer: int, tensor: torch.Tensor, kind: int, lent: bool = False) -> Task:
        """Return the task that receives a message."""
        pipe, calls = self._steps.slots.pipe_from(POINT_TO_POINT, peer), self._calls
        differ: Differ = _unequal
        if self.call is not None:
            differ = lambda rank, found, n, expected: calls.differ_in_message(kind, rank, (found, n), expected)  # noqa: E731
        return pipe, pipe.take(tensor.data_ptr(), tensor.nbytes, kind, differ, lent)


def _unequal(rank: int, kind: int, found: int, expected: int) -> Exception:
    return unequal(rank, found, expected)


def _extent(tensor: torch.Tensor) -> Extent:
    return tensor.data_ptr(), tensor.nbytes


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    copy(target.data_ptr(), source.data_ptr(), source.nbytes)


def _view(slots: Slots, rank: int, half: int, like: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """Return a view of a slot with as many elements as ``like``, from byte ``begin`` on."""
    offset = slots.slot_offset(rank, half) + begin
    # ``frombuffer`` refuses to view nothing.
    if not (count := like.numel()):
        return like
    return torch.frombuffer(slots.memory, dtype=like.dtype, count=count, offset=offset)


def _reduce_at_once(steps: Steps, output: torch.Tensor, data: torch.Tensor, op: ReduceOp, word: int) -> Iterator[Need]:
    """Reduce in one step: every rank reduces everything."""
    slots = steps.slots
    copy((yield from steps.own_slot(half := steps.next_half())), *_extent(data))
    yield from steps.reach_with(half, data.nbytes, word)
    parts = [data if r == slots.rank else _view(slots, r, half, data) for r in range(slots.size)]
    combine_into(output, op, parts)


_Pieces = Sequence[tuple[torch.Tensor, torch.Tensor, int]]
"""Parts of outputs, the same parts of the data, and their places in a slot, in elements."""


def _reduce_in_shares(
    steps: Steps, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], op: ReduceOp, word: int
) -> Iterator[Need]:
    """Reduce in two steps per slotful: every rank reduces its share of the elements, and all collect the shares."""
    slots, item, nbytes = steps.slots, parts[0].itemsize, sum([data.nbytes for data in parts])
    for count, pieces in _slotfuls(outputs, parts, slots.slot // item):
        bounds = [split_bounds(count, slots.size, r) for r in range(slots.size)]
        slot = yield from steps.own_slot(half := steps.next_half())
        for _, data, at in pieces:  # skip this rank's own share, which no other rank reads
            place, (begin, stop) = slot + item * at, _within(bounds[slots.rank], at, len(data))
            copy(place, data.data_ptr(), item * begin)
            copy(place + item * stop, data.data_ptr() + item * stop, item * (len(data) - stop))
        yield from steps.reach_with(half, nbytes, word)
        for target, data, at in pieces:
            share = range(*_within(bounds[slots.rank], at, len(data)), _BLOCK)
            _reduce_share(slots, half, target, data, at, share, op)
        yield from steps.all_reach(steps.publish(half))
        for rank in slots.others:
            for target, _, at in pieces:
                begin, stop = _within(bounds[rank], at, len(target))
                source = slots.slots[rank][half] + item * (at + begin)
                copy(target.data_ptr() + item * begin, source, item * (stop - begin))


def _slotfuls(
    outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], room: int
) -> Iterator[tuple[int, _Pieces]]:
    """Yield the pieces that fill a slot, and their elements; one without elements if there are none."""
    at, pieces = 0, list[tuple[torch.Tensor, torch.Tensor, int]]()
    for output, data in zip(outputs, parts, strict=True):
        begin = 0
        while begin < len(data):
            stop = min(len(data), begin + room - at)
            pieces.append((output[begin:stop], data[begin:stop], at))
            at, begin = at + stop - begin, stop
            if at == room:
                yield at, pieces
                at, pieces = 0, []
    if at or not any(map(len, parts)):
        yield at, pieces


def _within(bounds: tuple[int, int], at: int, length: int) -> tuple[int, int]:
    """Return the bounds of a share inside of the piece that begins at an element.

    Example:
        >>> _within((3, 8), 5, 10), _within((3, 8), 0, 2), _within((3, 8), 9, 2)
        ((0, 3), (2, 2), (0, 0))
    """
    begin = min(max(bounds[0] - at, 0), length)
    return begin, max(begin, min(bounds[1] - at, length))


def _reduce_share(
    slots: Slots, half: int, target: torch.Tensor, data: torch.Tensor, at: int, share: range, op: ReduceOp
) -> None:
    """Reduce blocks of a piece from all slots into ``target``, and for the others into this rank's slot."""
    for begin in share:
        mine = data[begin : min(begin + _BLOCK, share.stop)]
        views = [_view(slots, r, half, mine, (at + begin) * data.itemsize) for r in range(slots.size)]
        total = target[begin : begin + len(mine)]
        combine_into(total, op, [mine if r == slots.rank else view for r, view in enumerate(views)])
        # No other rank reads this part of the slot before the next step.
        views[slots.rank].copy_(total)
