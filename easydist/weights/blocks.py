"""Blocks, parts of tensors as offsets and sizes, and the arithmetic of shards and layouts. Nothing here touches data.

A ``Block`` is the part that slices select of a tensor of any number of dimensions. Large tensors travel as several
blocks, a shard of a ``DTensor`` is a block of the whole tensor, and a shard of one layout shares a block with each
shard of another layout that it overlaps. A layout assigns a block to each rank; only what a wanted block and a held one
share travels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class Block(NamedTuple):
    """A part of a tensor.

    Attributes:
        start: The first index in each dimension.
        shape: The size in each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of ``tensor``, as a view."""
        if self.shape == tensor.shape:
            return tensor
        return tensor[tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))]

    def within(self, outer: Block) -> Block:
        """Return the same elements as a block relative to the start of a block that contains them."""
        return Block(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)


def whole(shape: Sequence[int]) -> Block:
    """Return the block of all elements of a tensor."""
    return Block((0,) * len(shape), tuple(shape))


def common(one: Block, other: Block) -> Block | None:
    """Return the elements that two blocks of one tensor share; None if there are none.

    Example:
        >>> common(Block((0, 0), (2, 6)), Block((1, 4), (3, 4)))
        Block(start=(1, 4), shape=(1, 2))
    """
    start = tuple(map(max, one.start, other.start))
    stops = (min(a + n, b + m) for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True))
    shape = tuple(stop - first for stop, first in zip(stops, start, strict=True))
    return Block(start, shape) if all(size > 0 for size in shape) else None


def apart(held: Sequence[tuple[int, Block]]) -> list[tuple[int, Block]]:
    """Return parts of the ranks' blocks that do not overlap: each element is that of the first rank that holds it.

    Example:
        >>> [(rank, *part) for rank, part in apart([(0, Block((0, 1), (2, 2))), (1, whole((2, 4)))])]
        [(0, (0, 1), (2, 2)), (1, (0, 0), (2, 1)), (1, (0, 3), (2, 1))]
    """
    found: list[tuple[int, Block]] = []
    for rank, block in held:
        rest = [block]
        for _, taken in found:
            rest = [part for one in rest for part in _without(one, taken)]
        found += [(rank, part) for part in rest]
    return found


def _without(block: Block, taken: Block) -> list[Block]:
    """Return blocks of the elements that only the first of two blocks has."""
    shared = common(block, taken)
    if shared is None:
        return [block] if block.numel else []
    parts = []
    start, shape = list(block.start), list(block.shape)
    for dim, (first, size) in enumerate(zip(*shared, strict=True)):
        stop = start[dim] + shape[dim]
        for low, high in ((start[dim], first), (first + size, stop)):
            part = Block((*start[:dim], low, *start[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
            parts += [part] if part.numel else []
        start[dim], shape[dim] = first, size
    return parts


def cut(block: Block, numel: int) -> Iterator[Block]:
    """Yield parts of at most ``numel`` elements, in order, each contiguous in a contiguous tensor of the block's shape.

    Example:
        >>> [part.shape for part in cut(whole((5, 3)), 6)], [part.start for part in cut(whole((2, 5)), 3)]
        ([(2, 3), (2, 3), (1, 3)], [(0, 0), (0, 3), (1, 0), (1, 3)])
    """
    if block.numel <= numel:
        yield block
        return
    dim = next(d for d, _ in enumerate(block.shape) if math.prod(block.shape[d + 1 :]) <= numel)
    rows = numel // math.prod(block.shape[dim + 1 :])
    for index in itertools.product(*map(range, block.shape[:dim])):
        for row in range(0, block.shape[dim], rows):
            start = (*index, row, *(0,) * (len(block.shape) - dim - 1))
            shape = (*(1,) * dim, min(rows, block.shape[dim] - row), *block.shape[dim + 1 :])
            yield Block(tuple(a + b for a, b in zip(block.start, start, strict=True)), shape)


def shard(shape: Sequence[int], mesh_shape: Sequence[int], place: Sequence[int], placements: Sequence[Any]) -> Block:
    """Return the block of a sharded tensor that one rank of a mesh holds.

    Each mesh dimension with ``Shard(d)`` cuts the part of dimension d that the previous ones have left, into parts of
    equal size, the last of which may be smaller or empty, as ``torch.chunk`` does. FSDP2 over tensor parallelism uses
    ``_StridedShard``, which means that the later mesh dimensions have cut first.

    Args:
        shape: The shape of the whole tensor.
        mesh_shape: The shape of the mesh.
        place: The rank's coordinates in the mesh.
        placements: A placement of ``torch.distributed.tensor`` for each dimension of the mesh.

    Raises:
        TypeError: A placement is neither of these nor ``Replicate``, so there are no values before a reduction.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> [shard((5, 2), (2,), (rank,), [Shard(0)]) for rank in (0, 1)]
        [Block(start=(0, 0), shape=(3, 2)), Block(start=(3, 0), shape=(2, 2))]
        >>> shard((4, 4), (2, 2), (1, 0), [Shard(1), Replicate()])
        Block(start=(0, 2), shape=(4, 2))
    """
    start, sizes = [0] * len(shape), list(shape)
    for axis in _cutting_order(placements):
        dim = placements[axis].dim % len(shape)
        part = -(-sizes[dim] // mesh_shape[axis])
        first = min(part * place[axis], sizes[dim])
        start[dim] += first
        sizes[dim] = min(part, sizes[dim] - first)
    return Block(tuple(start), tuple(sizes))


def _cutting_order(placements: Sequence[Any]) -> list[int]:
    """Return the mesh dimensions that cut, in the order in which they cut."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if type(placement).__name__ == "_StridedShard":
            order.append(axis)
        elif type(placement).__name__ == "Shard":
            order.insert(0, axis)
        elif type(placement).__name__ != "Replicate":
            raise TypeError(f"a DTensor with {placement!r} has no values before a reduction; redistribute() it first")
    return order


def is_covered(shape: Sequence[int], blocks: Sequence[Block]) -> bool:
    """True if the blocks cover the whole tensor without overlapping.

    Example:
        >>> is_covered((4,), [Block((0,), (2,)), Block((2,), (2,))]), is_covered((4,), [Block((0,), (2,))])
        (True, False)
    """
    if sum(block.numel for block in blocks) != math.prod(shape):
        return False
    return all(common(one, other) is None for one, other in itertools.combinations(blocks, 2))


class Overlap(NamedTuple):
    """A block that some ranks hold, as all or part of theirs, and others want.

    Attributes:
        holders: The ranks that have it, in the order in which they were given.
        ranks: The ranks that want it, likewise.
        block: The block, in coordinates of the whole tensor.
    """

    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    block: Block


_Layout = tuple[tuple[int, Block], ...]
"""Ranks, and the block that each holds or wants."""


@functools.lru_cache(maxsize=64)  # the layers of a model have few layouts
def overlaps(shape: tuple[int, ...], held: _Layout, wanted: _Layout) -> tuple[Overlap, ...]:
    """Return what each wanted block shares with each held one, for every pair of different blocks.

    Args:
        shape: The shape of the whole tensor.
        held: The ranks that send, and the block that each holds. Two blocks are equal or do not overlap.
        wanted: The ranks that receive, and the block that each wants.

    Raises:
        ValueError: The held blocks do not cover the tensor.
    """
    holders = _by_block([one for one in held if one[1].numel])
    if not is_covered(shape, list(holders)):
        raise ValueError(f"the blocks of ranks {[rank for rank, _ in held]} do not make up a tensor of shape {shape}")
    pairs = itertools.product(_by_block(wanted).items(), holders.items())
    shared = [(some, ranks, common(block, box)) for (box, ranks), (block, some) in pairs]
    return tuple([Overlap(tuple(some), tuple(ranks), part) for some, ranks, part in shared if part is not None])


def _by_block(layout: Iterable[tuple[int, Block]]) -> dict[Block, list[int]]:
    found: dict[Block, list[int]] = {}
    for rank, block in layout:
        found.setdefault(block, []).append(rank)
    return found


class Delivery(NamedTuple):
    """A block of a tensor that goes from one rank to several at once.

    Attributes:
        root: The rank that has it.
        ranks: The ranks that want it, ascending; ``root`` may be one of them.
        block: The block, in coordinates of the whole tensor.
    """

    root: int
    ranks: tuple[int, ...]
    block: Block


def deliveries(shape: tuple[int, ...], held: _Layout, wanted: _Layout) -> list[Delivery]:
    """Return the deliveries that give every rank the block it wants, and no rank anything else.

    Law: the blocks of the deliveries to a rank cover the block it wants, each element once, and each is a part of its
    root's block. A block that several ranks want travels once. Of several ranks that hold the same block, the first one
    sends it.

    Args:
        shape: As in ``overlaps``.
        held: As in ``overlaps``.
        wanted: As in ``overlaps``.

    Raises:
        ValueError: The held blocks do not cover the tensor.

    Example:
        >>> left, right, both = Block((0,), (2,)), Block((2,), (2,)), whole((4,))
        >>> [one[1:] for one in deliveries((4,), ((0, both),), ((1, left), (2, right), (3, left)))]
        [((1, 3), Block(start=(0,), shape=(2,))), ((2,), Block(start=(2,), shape=(2,)))]
    """
    found: dict[tuple[int, Block], list[int]] = {}
    for holders, ranks, part in overlaps(shape, held, wanted):
        found.setdefault((holders[0], part), []).extend(ranks)
    return [Delivery(root, tuple(sorted(ranks)), part) for (root, part), ranks in found.items()]


class BlockTransfer(NamedTuple):
    """A block of a tensor that goes from one rank to another.

    Attributes:
        src: The rank that has it.
        dst: The rank that wants it, which may be the same.
        block: The block, in coordinates of the whole tensor.
    """

    src: int
    dst: int
    block: Block


def block_transfers(
    shape: tuple[int, ...], held: _Layout, wanted: _Layout, load: dict[int, int] | None = None
) -> list[BlockTransfer]:
    """Return the transfers that give every rank the block it wants.

    Law: the blocks of the transfers to a rank cover the block it wants, each element once, and each is a part of its
    source's block. A rank that holds a wanted part takes it from itself. Of several ranks that hold the same block, the
    one that has sent least sends it.

    Args:
        shape: As in ``overlaps``.
        held: As in ``overlaps``.
        wanted: As in ``overlaps``.
        load: The number of elements that each rank already sends. The call adds those of this plan.

    Raises:
        ValueError: The held blocks do not cover the tensor.

    Example:
        >>> rows = (0, Block((0, 0), (2, 4))), (1, Block((2, 0), (2, 4)))
        >>> columns = (2, Block((0, 0), (4, 2))), (3, Block((0, 2), (4, 2)))
        >>> [(one.src, one.dst, one.block.shape) for one in block_transfers((4, 4), rows, columns)]
        [(0, 2, (2, 2)), (1, 2, (2, 2)), (0, 3, (2, 2)), (1, 3, (2, 2))]
    """
    load = {} if load is None else load
    transfers = []
    for holders, ranks, part in overlaps(shape, held, wanted):
        for dst in ranks:
            src = dst if dst in holders else min(holders, key=lambda rank: load.get(rank, 0))
            transfers.append(BlockTransfer(src, dst, part))
            if src != dst:
                load[src] = load.get(src, 0) + part.numel
    return transfers
