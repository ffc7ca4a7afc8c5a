"""Backends over a ``torch.distributed`` process group, including groups that the caller made.

``Gloo`` builds every collective from messages between pairs of ranks, all posted at once: a message takes any size and
needs no staging copy, and on four ranks and two cores a collective takes a third of the time of gloo's own ring (which
takes 2 (W - 1) rounds). Between many ranks small data takes fewer messages, in ``rounds``. In a reduction every rank
reduces one chunk of all ranks' data in rank order, so that all ranks get the same bits in every run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from easydist.data.arithmetic import split_sizes
from easydist.errors import DisagreementError
from easydist.liveness.background import within
from easydist.liveness.monitor import Monitor
from easydist.transport import rounds
from easydist.transport.backend import Addressed, Backend, combined, parts_beside
from easydist.transport.backends.waits import FOREVER, NOBODYS_TAG, TAG, GlooMessage, GlooMessages, Waits
from easydist.transport.described import DTYPE_CODES, MESSAGE, OWN, Described
from easydist.transport.reduce_op import ReduceOp, combine_into
from easydist.transport.schedules import is_doubled, is_scattered, tree
from easydist.transport.work import ENDED, Pending, TorchWork

SEND_TAG = TAG + 1
"""The tag that separates ``send`` and ``recv`` from the messages of collectives."""

_TAGS = 4
"""The distance between the tags of one lane and those of the next."""

_ROUND_TAG, _ROUNDS, _ROUND_LANES = 1 << 30, 1 << 20, 1 << 10
"""The tags of operations of several steps: each has its own, because ranks may run the later steps in any order."""

_SIZED_TAG = 1 << 29
"""The first of as many tags for messages of described operations. A tag is a hash of the operation and the length: gloo
ends the process if a message is longer than its receiver expects, and leaves memory uninitialised if it is shorter."""

KEPT = 32
"""The operations whose descriptions are kept."""

_REDUCED_AT_ONCE, _REDUCED_DOUBLED = 1 << 20, 1 << 20
"""The bytes up to which every rank reduces the data of all ranks, instead of a chunk of it, in one round less: those of
all messages, W (W - 1) times the data of a rank; for data that is gathered in ``rounds``, those of all ranks.

With 128 KB, one round takes 0.8 of the processors' time of two on 2 ranks, 0.9 on 3 and 4. With 1 MB on 2 ranks, and
with 256 KB on 4, it takes 1.1 and 1.4."""

_LARGE, _LARGE_AFAR = 1 << 18, 1 << 15
"""The bytes above which a message may be half sent when a rank dies. A kernel takes megabytes at once for a process of
its own host, but for another host only some 50 KB until that has answered."""


class Pairwise(Backend):
    """The common part of both backends: collectives made of messages between pairs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        self.name, self.device = name, device
        self.rank, self.size = group.rank(), group.size()
        self._group = group

    @abstractmethod
    def _exchange(self, sends: Sequence[Addressed], recvs: Sequence[Addressed]) -> Sequence[Pending]:
        """Post all messages at once; none is empty, and none goes to this rank itself."""

    def _swap(self, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> TorchWork:
        """Send ``sends[r]`` to each rank r and receive ``recvs[r]`` from it; empty tensors are not sent."""
        if recvs and sends:
            recvs[self.rank].copy_(sends[self.rank])
        return TorchWork(self._exchange(self._others(sends), self._others(recvs)), keep=(*sends, *recvs))

    def _others(self, tensors: Sequence[torch.Tensor]) -> Sequence[Addressed]:
        return [(tensor, r) for r, tensor in enumerate(tensors) if r != self.rank and tensor.numel()]

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> TorchWork:
        return self._swap([data] * self.size, outputs)

    def all_to_all_v(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> TorchWork:
        return self._swap(inputs, outputs)

    def gather(self, outputs: Sequence[torch.Tensor], data: torch.Tensor, root: int) -> TorchWork:
        if self.rank == root:
            outputs[root].copy_(data)
            return TorchWork(self._exchange([], self._others(outputs)), keep=outputs)
        return TorchWork(self._exchange([(data, root)] if data.numel() else [], []), keep=[data])

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> TorchWork:
        if self.rank == root:
            output.copy_(inputs[root])
            return TorchWork(self._exchange(self._others(inputs), []), keep=inputs)
        return TorchWork(self._exchange([], [(output, root)] if output.numel() else []), keep=[output])


def _nowhere(rank: int) -> bool:
    return False


class Posted:
    """A described operation and its messages, which are known before the first one is posted.

    Attributes:
        key: Its number among the collectives, or among the messages to or from one rank.
        call: Its description.
        sends: The bytes to each rank.
        recvs: The bytes from each rank.
        room: The length of the receivers' memory if they do not know that of the message; else None.
        batch: The description of the batch that this message is a part of; ``call`` if it is no message of a batch.
    """

    def __init__(
        self,
        key: int,
        call: Described,
        sends: Iterable[Addressed],
        recvs: Iterable[Addressed],
        room: int | None = None,
        batch: Described | None = None,
    ) -> None:
        self.key, self.call, self.room, self.batch = key, call, room, batch or call
        self.sends = {peer: room or tensor.nbytes for tensor, peer in sends}
        self.recvs = {peer: room or tensor.nbytes for tensor, peer in recvs}
        self._round = 0

    def second_round(self) -> Posted:
        """Return the same operation, with other tags."""
        second = copy.copy(self)
        second._round = 1
        return second

    def tag(self, lane: int, nbytes: int) -> int:
        """Return the tag of its messages of this length on a lane."""
        # A receiver with room for more does not know the length, so both ends take that of its room.
        mixed = ((lane * _FACTOR + self.key) * _FACTOR + self.call[0]) * _FACTOR + self._round
        return _SIZED_TAG + (mixed * _FACTOR + (self.room or nbytes)) % _PRIME


# The largest prime below 2**29: so these tags end before those of operations of several steps.
_FACTOR, _PRIME = 1_000_003, 536_870_909


class Gloo(Pairwise):
    """The backend for tensors on the CPU over a gloo group.

    Args:
        group: The process group.
        device: The device of the tensors.
        name: The name of the backend.

    Attributes:
        monitor: The monitor, which finds out why a connection broke; None if the group has none.
        log: The last described operations.
        is_near: Returns True if a rank is known to be on this host.
        gloo_waits: The waits for messages over the connections of the group.
    """

    moves_any_dtype = True
    monitor: Monitor | None = None
    is_near: Callable[[int], bool]

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        super().__init__(group, device, name)
        self._members: Sequence[int] = range(self.size)
        self.is_near = _nowhere
        self.gloo_waits = Waits()
        self._lane = 0
        self._rounds = itertools.count()
        self.log: deque[Posted] = deque(maxlen=KEPT)
        self._number, self._messages = 0, Counter[tuple[str, int]]()

    def compare(
        self, error: Callable[[str], DisagreementError], who: str, excludes: Callable[[], object] | None = None
    ) -> None:
        self.compares, self.call = True, OWN

    def among(self, ranks: Sequence[int], lane: int) -> Gloo:
        """Return a backend among some of the ranks, over the same connections.

        Args:
            ranks: The ranks that take part, including this one; the others need not call this.
            lane: A number other than zero; messages of different lanes never mix.
        """
        part = copy.copy(self)
        # With counters of its own: the ranks outside do not count its operations.
        part._members, part._lane, part._rounds = list(ranks), lane, itertools.count()
        part.log, part._number, part._messages = deque(maxlen=KEPT), 0, Counter()
        part.rank, part.size = part._members.index(self.rank), len(ranks)
        return part

    def _exchange(
        self,
        sends: Sequence[Addressed],
        recvs: Sequence[Addressed],
        tag: int | Posted | None = None,
    ) -> Sequence[Pending]:
        tag = self._begun(sends, recvs) if tag is None else tag
        # Receive first: if a connection has broken, gloo refuses that before this rank has sent anything. So no rank
        # gets all headers of a call that another one has given up, even if no store can tell it.
        posted = [self._post(self._group.recv, tensor, self._members[peer], tag) for tensor, peer in recvs]
        posted += [self._post(self._group.send, tensor, self._members[peer], tag) for tensor, peer in sends]
        return [GlooMessages(self, posted)] if posted else []

    def announce(self) -> None:
        """Describe the collective that ``call`` is about before its first message is posted."""
        self._begun([], [])

    def _tag(self, tag: int) -> int:
        return tag + _TAGS * self._lane

    def _begun(
        self, sends: Sequence[Addressed], recvs: Sequence[Addressed], room: int | None = None, own: int | None = None
    ) -> int | Posted:
        """Return the tag of the first messages of an operation of all ranks; ``own`` is that of an undescribed one."""
        if (call := self._described()) is None:
            return self._tag(TAG) if own is None else own
        self._number += 1
        self.log.append(posted := Posted(self._number, call, sends, recvs, room))
        return posted

    def _described(self) -> Described | None:
        return None if self.call is OWN else self.call

    def _round_tag(self) -> int:
        """Return the tag of the next messages of an operation of several steps that is not described."""
        return _ROUND_TAG + self._lane % _ROUND_LANES * _ROUNDS + next(self._rounds) % _ROUNDS

    def _is_doubled(self, nbytes: int) -> bool:
        """True if small data goes round; described operations go straight, as their errors name pairs of ranks."""
        return is_doubled(self.size, nbytes) and self._described() is None

    def _in_rounds(self, run: rounds.Run, keep: Sequence[torch.Tensor], tag: int | Posted | None = None) -> TorchWork:
        """Begin an operation of several rounds; its tag is its own, unless it is described."""
        return TorchWork(run(functools.partial(self._exchange, tag=self._round_tag() if tag is None else tag)), keep)

    def _post(
        self,
        fn: Callable[..., dist.Work],
        tensor: torch.Tensor,
        peer: int,
        tag: int | Posted,
    ) -> GlooMessage:
        nbytes = tensor.nbytes
        if isinstance(tag, Posted):
            tag = tag.tag(self._lane, nbytes)
        try:
            return GlooMessage(fn([tensor], peer, tag), peer, fn.__name__ == "recv", self._is_large(nbytes, peer))
        except RuntimeError as error:  # the connection had broken before
            if self.monitor is None:
                error.peer = peer  # type: ignore[attr-defined]  # as in ``GlooMessages.wait``
                raise
            raise self.monitor.explain(error, peer) from error

    def _is_large(self, nbytes: int, peer: int) -> bool:
        return nbytes > _LARGE_AFAR and (nbytes > _LARGE or not self.is_near(peer))

    def wait_alone(self, wait: Callable[[], object], peer: Callable[[], int], check: Callable[[], None] | None) -> None:
        """Wait for messages without a monitor.

        Args:
            wait: The function that waits.
            peer: As in ``wait_watched``.
            check: As in ``wait_watched``.
        """
        try:
            wait() if check is None else within(FOREVER.total_seconds(), wait, check)
        except BaseException as error:
            if check is not None and not isinstance(error, Exception):  # the thread would go on waiting after Ctrl-C
                self.disconnect()
            raise

    @property
    def recv_alone(self) -> Callable[..., dist.Work]:
        """The method of the group that begins to receive."""
        return self._group.recv

    def disconnect(self) -> None:
        """Break all connections, so that waits of this rank, and ranks that wait for it, get an error.

        A wait that times out makes gloo close all connections; a wait on an already broken connection does not.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._group.recv([nothing], peer, NOBODYS_TAG).wait(timedelta(milliseconds=1))
        self.gloo_waits.end()  # a message that gloo has lost is on no connection that could break

    def send(self, tensor: torch.Tensor, dst: int) -> Pending:
        return self._messages_of([(self._group.send, tensor, dst)])

    def recv(self, tensor: torch.Tensor, src: int) -> Pending:
        return self._messages_of([(self._group.recv, tensor, src)])

    def batch(self, sends: Sequence[Addressed], recvs: Sequence[Addressed]) -> TorchWork:
        messages = [(self._group.recv, *one) for one in recvs] + [(self._group.send, *one) for one in sends]
        return TorchWork([self._messages_of(messages)])

    def _messages_of(self, messages: Sequence[tuple[Callable[..., dist.Work], torch.Tensor, int]]) -> Pending:
        """Begin messages; all of them are known before the first is posted. Empty ones are not sent."""
        tags = [self._tag_of(fn.__name__, tensor, peer) for fn, tensor, peer in messages]
        posted = [
            self._post(fn, tensor, self._members[peer], tag)
            for (fn, tensor, peer), tag in zip(messages, tags, strict=True)
            if tensor.numel()
        ]
        return GlooMessages(self, posted) if posted else ENDED

    def _tag_of(self, name: str, tensor: torch.Tensor, peer: int) -> int | Posted:
        if (call := self._described()) is None:
            return self._tag(SEND_TAG)
        self._messages[way := (name, peer)] += 1
        sends, recvs = ([(tensor, peer)], []) if name == "send" else ([], [(tensor, peer)])
        batch = None if call is MESSAGE else call
        # Negative, by which statuses tell messages from collectives.
        posted = Posted(self._messages[way], (-DTYPE_CODES[tensor.dtype], 0), sends, recvs, batch=batch)
        self.log.append(posted)
        return posted

    def all_gather_upto(self, rows: torch.Tensor, nbytes: int) -> TorchWork:
        if self._is_doubled(0):  # the sizes of the others are not known
            return self._in_rounds(lambda exchange: rounds.gather_frames(exchange, self.rank, rows, nbytes), [rows])
        every = rows.unbind()
        mine = every[self.rank][: max(1, nbytes)]  # the others cannot know that it is empty, and wait for a message
        sends, recvs = self._others([mine] * self.size), self._others(every)
        tag = self._begun(sends, recvs, room=rows.shape[1])
        return TorchWork(self._exchange(sends, recvs, tag), keep=[rows])

    def broadcast(self, tensor: torch.Tensor, root: int) -> TorchWork:
        return self._spread(tensor, [*range(root, self.size), *range(root)])

    def multicast(self, tensor: torch.Tensor, root: int, ranks: Sequence[int]) -> TorchWork:
        return self._spread(tensor, [root, *ranks])

    def _spread(self, tensor: torch.Tensor, path: Sequence[int]) -> TorchWork:
        """Send a tensor from the first rank of the path to the others."""
        # Not a multicast: every rank of the group would have to pass a chunk on.
        if len(path) == self.size and is_scattered(self.size, tensor.nbytes) and self._described() is None:
            chunks = tensor.split(split_sizes(tensor.numel(), self.size))
            return self._in_rounds(lambda ex: rounds.scatter_and_share(ex, self.rank, path[0], chunks), [tensor])
        is_part = self.rank in path and tensor.numel() > 0
        parent, children = tree(path.index(self.rank), len(path)) if is_part else (None, [])
        above = [] if parent is None else [(tensor, path[parent])]
        below = [(tensor, path[child]) for child in children]
        # Also on a rank that gets nothing: the tags of all later operations follow from this count.
        tag = self._begun(below, above, own=self._round_tag())
        return self._in_rounds(lambda exchange: rounds.spread(exchange, above, below), [tensor], tag)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor) -> TorchWork:
        return self.all_gather_v(output.chunk(self.size) if output.numel() else [output] * self.size, data)

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> TorchWork:
        if not self._is_doubled(sum(output.nbytes for output in outputs)):
            return super().all_gather_v(outputs, data)
        return self._in_rounds(lambda exchange: rounds.gather_blocks(exchange, self.rank, outputs, data), [data])

    def _folds(self, tensor: torch.Tensor, op: ReduceOp) -> bool:
        return rounds.can_fold(tensor.dtype, op) and self._is_doubled(tensor.nbytes * self.size)

    def reduces_whole(self, tensor: torch.Tensor, op: ReduceOp) -> bool:
        """True if every rank reduces all of the data, because it is small, instead of a chunk of it.

        Args:
            tensor: The data of this rank.
            op: The reduction.
        """
        nbytes = tensor.nbytes * self.size
        if self._is_doubled(nbytes):
            return nbytes <= _REDUCED_DOUBLED or self._folds(tensor, op)
        return nbytes * (self.size - 1) <= _REDUCED_AT_ONCE

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> TorchWork:
        return self.all_reduce_from(tensor, tensor, op)

    def all_reduce_from(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> TorchWork:
        if self._folds(data, op):
            output.copy_(data)
            return self._in_rounds(lambda ex: rounds.fold(ex, self.rank, self.size, output, op), [output])
        if self.reduces_whole(data, op):
            every = parts_beside(data, self.rank, self.size)
            return self.all_gather_v(every, data).followed_by(lambda: combined(output, op, every))
        sizes = split_sizes(data.numel(), self.size)
        chunks, results = data.split(sizes), output.split(sizes)
        parts, mine = parts_beside(chunks[self.rank], self.rank, self.size), results[self.rank]
        first = self._swap(chunks, parts)
        # Not inside the step: ranks may run the second steps of several operations in any order.
        tag = self._round_tag() if self._described() is None else self.log[-1].second_round()

        def reduce_and_share() -> Sequence[Pending]:
            combine_into(mine, op, parts)
            return self._exchange(self._others([mine] * self.size), self._others(results), tag)

        return first.followed_by(reduce_and_share)

    def barrier(self) -> TorchWork:
        if self._is_doubled(0):
            return self._in_rounds(lambda exchange: rounds.meet(exchange, self.rank, self.size), [])
        # A byte from each rank, because empty tensors are not sent.
        tokens = torch.zeros(self.size + 1, dtype=torch.uint8, device="cpu").split(1)
        return self._swap([tokens[-1]] * self.size, tokens[:-1])
