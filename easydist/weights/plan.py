"""The transfers between two layouts of a tensor: which rank sends which block to which. Pure arithmetic.

A layout assigns a block to each rank. ``plan`` intersects each wanted block with the held blocks. Only these
intersections travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from easydist.weights.blocks import Block, common, is_covered

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
        >>> rows = {0: Block((0, 0), (2, 4)), 1: Block((2, 0), (2, 4))}
        >>> columns = {2: Block((0, 0), (4, 2)), 3: Block((0, 2), (4, 2))}
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
