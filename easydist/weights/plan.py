"""The transfers between two layouts of a tensor: which rank sends which block to which. Pure arithmetic.

A layout assigns a block to each rank. ``plan`` intersects each wanted block with the held blocks. Only these
intersections travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from easydist.weights.blocks import Block, common, is_covered, shard, whole

Layout = Mapping[int, Block]
"""The block of a tensor that each rank holds or wants, by rank."""


class Transfer(NamedTuple):
    """A block of a tensor that goes from one rank to another.

    Attributes:
        src: The rank that has it.
        dst: The rank that wants it, which may be the same.
        block: The block, in coordinates of the whole tensor.
    """

    src: int
    dst: int
    block: Block


def laid_out(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> dict[int, Block]:
    """Return the layout of a ``DTensor``.

    Args:
        shape: The shape of the whole tensor.
        mesh: The ranks, as nested lists or a tensor with one dimension for each placement.
        placements: The placements of ``torch.distributed.tensor``.

    Raises:
        TypeError: A placement has no values before a reduction.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> laid_out((4, 2), [5, 7], [Shard(0)])
        {5: Block(start=(0, 0), shape=(2, 2)), 7: Block(start=(2, 0), shape=(2, 2))}
    """
    import torch

    ranks = torch.as_tensor(mesh, device="cpu")
    places = (torch.unravel_index(torch.tensor(i, device="cpu"), ranks.shape) for i in range(ranks.numel()))
    coordinates = [tuple(int(one) for one in place) for place in places]
    return {int(ranks[at]): shard(shape, tuple(ranks.shape), at, placements) for at in coordinates}


def everywhere(shape: Sequence[int], ranks: Iterable[int]) -> dict[int, Block]:
    """Return the layout of a tensor that each of these ranks holds whole."""
    return {rank: whole(shape) for rank in ranks}


def plan(shape: Sequence[int], held: Layout, wanted: Layout, load: dict[int, int] | None = None) -> list[Transfer]:
    """Return the transfers that give every rank the block it wants.

    Law: the blocks of the transfers to a rank cover the block it wants, each element once, and each is a part of its
    source's block. A rank that holds a wanted part takes it from itself. Of several ranks that hold the same block, the
    one that has sent least sends it.

    Args:
        shape: The shape of the whole tensor.
        held: The block that each rank holds. Blocks of two ranks are equal or do not overlap.
        wanted: The block that each rank wants.
        load: The number of elements that each rank already sends. The call adds those of this plan.

    Raises:
        ValueError: The held blocks do not cover the tensor.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> rows, columns = laid_out((4, 4), [0, 1], [Shard(0)]), laid_out((4, 4), [2, 3], [Shard(1)])
        >>> [(one.src, one.dst, one.block.shape) for one in plan((4, 4), rows, columns)]
        [(0, 2, (2, 2)), (1, 2, (2, 2)), (0, 3, (2, 2)), (1, 3, (2, 2))]
    """
    load = {} if load is None else load
    holders: dict[Block, list[int]] = {}
    for rank, block in held.items():
        if block.numel:
            holders.setdefault(block, []).append(rank)
    if math.prod(shape) and not is_covered(shape, list(holders)):
        raise ValueError(f"the blocks of ranks {sorted(held)} do not make up a tensor of shape {tuple(shape)}")
    transfers = []
    for dst, box in wanted.items():
        for block, ranks in holders.items():
            if (part := common(block, box)) is not None:
                src = dst if dst in ranks else min(ranks, key=lambda rank: load.get(rank, 0))
                transfers.append(Transfer(src, dst, part))
                if src != dst:
                    load[src] = load.get(src, 0) + part.numel
    return transfers
