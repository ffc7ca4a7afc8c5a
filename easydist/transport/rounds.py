"""Collectives of several rounds: generators that exchange messages, and yield those for which they wait.

They know neither a backend nor a network, so a test runs thousands of ranks in one process.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from easydist.transport.backend import Addressed
from easydist.transport.reduce_op import RedOpType, ReduceOp, combine_into
from easydist.transport.schedules import doubling
from easydist.transport.work import Pending

LENGTH = struct.Struct("<q")
"""The length of a frame, which precedes it."""

_REPEATABLE = frozenset({RedOpType.MIN, RedOpType.MAX, RedOpType.BAND, RedOpType.BOR})


class Exchange(Protocol):
    """A function that begins messages.

    Between two ranks those of one operation arrive in the order in which they begin.
    """

    def __call__(self, sends: Sequence[Addressed], recvs: Sequence[Addressed]) -> Sequence[Pending]:
        """Begin all of them at once."""


Run = Callable[[Exchange], Iterator[Pending]]
"""A collective of this rank, which needs nothing but a way to exchange messages."""


def meet(exchange: Exchange, rank: int, size: int) -> Iterator[Pending]:
    """Wait for all ranks."""
    token, arrived = torch.zeros(2, dtype=torch.uint8, device="cpu").split(1)
    for one in doubling(rank, size):
        yield from exchange([(token, one.dst)], [(arrived, one.src)])


def can_fold(dtype: torch.dtype, op: ReduceOp) -> bool:
    """True if neither the order of the values matters, nor how often each of them is combined."""
    # Not floats: of 0.0 and -0.0, torch takes the first as the maximum, so the order would matter.
    return op.type in _REPEATABLE and not dtype.is_floating_point and not dtype.is_complex


def fold(exchange: Exchange, rank: int, size: int, tensor: torch.Tensor, op: ReduceOp) -> Iterator[Pending]:
    """Reduce in place, with messages of one length; each rank combines what it has with what another one has."""
    arrived = torch.empty_like(tensor)
    for one in doubling(rank, size):
        yield from exchange([(tensor, one.dst)], [(arrived, one.src)])
        # Only now, when the message that is sent has ended, too, may the tensor change.
        combine_into(tensor, op, [tensor, arrived])


def gather_blocks(
    exchange: Exchange, rank: int, outputs: Sequence[torch.Tensor], data: torch.Tensor
) -> Iterator[Pending]:
    """Gather ``data`` of all ranks, whose sizes are known, by ``doubling``."""
    size = len(outputs)
    following = [*outputs[rank:], *outputs[:rank]]
    lengths = [output.numel() for output in following]
    starts = [0, *itertools.accumulate(lengths)]
    blocks = data.new_empty(starts[-1])
    blocks[: len(data)] = data
    for dst, src, held, count in doubling(rank, size):
        sent, arriving = blocks[: starts[count]], blocks[starts[held] : starts[held + count]]
        yield from exchange([(sent, dst)] if len(sent) else [], [(arriving, src)] if len(arriving) else [])
    for output, block in zip(following, blocks.split(lengths), strict=True):
        output.copy_(block)


def gather_frames(exchange: Exchange, rank: int, rows: torch.Tensor, nbytes: int) -> Iterator[Pending]:
    """Gather the beginning of each rank's row by ``doubling``; a frame travels after its length, which is not known."""
    size, stride = rows.shape
    record = LENGTH.size + stride
    bundle, frames = torch.empty(size * record, dtype=torch.uint8, device="cpu"), rows.view(-1).numpy().data
    view = bundle.numpy().data
    starts = [0, put(view, frames[rank * stride : rank * stride + nbytes])]
    for dst, src, _, count in doubling(rank, size):
        held, stop = starts[-1], starts[count]
        # Room for the longest frames: gloo takes a message that is shorter than its receive.
        arriving = bundle[held : held + count * record]
        yield from exchange([(bundle[:stop], dst)], [(arriving, src)])
        for _ in range(count):
            starts.append(end_of(view, 1, starts[-1]))
    for i in range(1, size):
        frame = view[starts[i] + LENGTH.size : starts[i + 1]]
        at = (rank + i) % size * stride
        frames[at : at + len(frame)] = frame


def spread(exchange: Exchange, above: Sequence[Addressed], below: Sequence[Addressed]) -> Iterator[Pending]:
    """Receive what comes from above in a ``tree``, if anything does, and then pass it on below."""
    if above:
        yield from exchange([], above)
    yield from exchange(below, [])


def scatter_and_share(exchange: Exchange, rank: int, root: int, chunks: Sequence[torch.Tensor]) -> Iterator[Pending]:
    """Broadcast chunks, one for each rank: the root sends each to its rank, and every rank sends its own to all."""
    mine, others = chunks[rank], [r for r in range(len(chunks)) if r not in (rank, root)]
    if rank == root:
        # To each rank its own chunk first, which it passes on.
        yield from exchange([(chunks[r], r) for r in others] + [(mine, r) for r in others], [])
        return
    # The root's two messages, which have one tag, in the order in which it sends them.
    first = exchange([], [(mine, root)])
    rest = exchange([], [(chunks[root], root), *((chunks[r], r) for r in others)])
    yield from first
    yield from [*rest, *exchange([(mine, r) for r in others], [])]


def put(view: memoryview, frame: memoryview) -> int:
    """Write a frame after its length; return the offset of its end."""
    LENGTH.pack_into(view, 0, len(frame))
    view[LENGTH.size : (stop := LENGTH.size + len(frame))] = frame
    return stop


def end_of(view: memoryview, count: int = 1, start: int = 0) -> int:
    """Return the offset at which ``count`` frames end."""
    for _ in range(count):
        start += LENGTH.size + int(LENGTH.unpack_from(view, start)[0])
    return start
