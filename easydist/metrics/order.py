"""The order in which samples were distributed to ranks, and the rows that are repeated samples.

A loader distributes samples in steps. A step gives each rank a block of consecutive samples. A batch of accelerate's
prepared loader is a block; ``DistributedSampler`` uses blocks of one sample. Samples repeated to make the ranks equal
come last in the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from easydist.data.arithmetic import split_bounds

__all__ = ["Order", "Sharding", "check_even", "check_split", "in_order", "positions", "rows_text"]

Order = torch.Tensor | slice | None
"""The rows of all ranks to keep, as positions in rank order; None: all, unchanged."""


class Sharding(NamedTuple):
    """A loader's distribution of samples to the ranks, in one pass.

    Attributes:
        block: The number of consecutive samples of one rank in one step; None: all samples of a rank.
        rest: The number of samples of the last step that are not repeated; None: no sample is repeated.
        rows: The rows of all ranks, repeated samples included; None if that is unknown.
        is_even: True if every rank has as many rows as the others in each call.
    """

    block: int | None = None
    rest: int | None = None
    rows: int | None = None
    is_even: bool = False

    @property
    def is_counted(self) -> bool:
        """True if it may depend on the rows of other calls which rows are repeated."""
        return self.is_even or self.rows is not None

    def samples(self, size: int) -> int | None:
        """Return the number of samples without those that are repeated, on ``size`` ranks; None if it is unknown."""
        if self.rows is None or self.rest is None or self.block is None:
            return self.rows
        step = self.block * size
        return self.rows - (self.rows % step or step) + self.rest


def in_order(rows: Sequence[int], sharding: Sharding, has_last: bool = True) -> Order:
    """Select the rows to keep, in the order of the samples.

    Args:
        rows: The number of rows of each rank; the last of them belong to one step.
        sharding: The distribution of their samples.
        has_last: True if the last step of the pass is among them.

    Returns:
        Positions in the rows of all ranks, joined in rank order; a slice if no row changes its place; None: all.

    Raises:
        ValueError: The rows do not match the distribution.

    Example:
        >>> in_order([2, 2], Sharding(block=1, rest=1))
        tensor([0, 2, 1])
        >>> in_order([4, 4], Sharding(block=4, rest=5))
        slice(None, 5, None)
        >>> in_order([4, 4], Sharding(block=4, rest=5), has_last=False) is None
        True
    """
    if sharding.block is None or not any(rows):
        return None
    return _order(rows, sharding.block, sharding.rest if has_last else None)


def check_even(rows: Sequence[int], sharding: Sharding, may_be_last: bool) -> None:
    """Make sure that the ranks have as many rows as one another, and whole blocks, as a loader deals that is even.

    Args:
        rows: The number of rows of each rank.
        sharding: The distribution of their samples.
        may_be_last: True if the last step may be among them, which need not be full.

    Raises:
        ValueError: They have not.
    """
    if sharding.block and (len({*rows}) > 1 or (rows[0] % sharding.block and not may_be_last)):
        raise ValueError(
            f"{rows_text(rows)}, but the loader's batches have {sharding.block}, as many on every rank; pass one row "
            "per sample, or indices="
        )


def check_split(rows: Sequence[int], block: int) -> None:
    """Make sure that rows of several steps are those of a ``distributed_loader``: blocks, and equal parts at the end.

    Args:
        rows: The number of rows of each rank.
        block: The samples of one rank in a step.

    Raises:
        ValueError: They are not.
    """
    if max(rows) <= block:
        return  # of one step, whose rows are in rank order, also if some were left out
    size, full = len(rows), -(-max(rows) // block) * block - block
    rest = max(sum(rows) - full * size, 0)
    bounds = [split_bounds(rest, size, rank) for rank in range(size)]
    if [*rows] != [full + last - first for first, last in bounds]:
        raise ValueError(
            f"{rows_text(rows)}, but the loader gives each rank {block} samples in a step, and equal parts of the rest "
            "in the last; gather one row per sample of one epoch, or pass indices="
        )


def rows_text(rows: Sequence[int]) -> str:
    """Return the beginning of an error: ``the ranks have 2, 3 rows``."""
    return f"the ranks have {per_rank(rows)}"


def per_rank(rows: Sequence[int]) -> str:
    """Return the numbers of rows of all ranks: ``2, 3 rows``."""
    return f"{', '.join(map(str, rows))} {'row' if [*rows] == [1] else 'rows'}"


def _order(rows: Sequence[int], block: int, rest: int | None) -> Order:
    steps = -(-max(rows) // block)
    order = None if steps == 1 else _by_step(rows, block, steps)
    if rest is None:
        return order
    last = [max(count - (steps - 1) * block, 0) for count in rows]
    _check_last(rows, last, block, rest)
    kept = sum(rows) - sum(last) + rest
    if kept == sum(rows):
        return order
    return slice(kept) if order is None else order[:kept]


def _by_step(rows: Sequence[int], block: int, steps: int) -> torch.Tensor:
    """Return the positions of the rows, step by step: ``rows=[2, 2], block=1`` gives 0, 2, 1, 3."""
    padded = torch.full((len(rows), steps * block), -1, device="cpu")
    start = 0
    for rank, count in enumerate(rows):
        padded[rank, :count] = torch.arange(start, start + count, device="cpu")
        start += count
    order = padded.view(len(rows), steps, block).transpose(0, 1).reshape(-1)
    return order[order >= 0]


def _check_last(rows: Sequence[int], last: Sequence[int], block: int, rest: int) -> None:
    """Make sure that the last step is full, or evenly distributed."""
    even = -(-rest // len(rows))
    if sum(last) < rest or ({*last} != {block} and max(last) != even):
        raise ValueError(
            f"{rows_text(rows)}, which are not the loader's: its last step has {rest} samples in batches of {block}; "
            "pass one row per sample, or indices="
        )


def positions(order: Order, rows: Sequence[int], rank: int) -> tuple[torch.Tensor, int]:
    """Return the final position of each row of a rank, -1 if it is dropped, and the number of rows kept of all ranks.

    Args:
        order: A result of ``in_order``.
        rows: The number of rows of each rank.
        rank: The rank.

    Example:
        >>> positions(torch.tensor([0, 2, 1]), [2, 2], 1)
        (tensor([ 1, -1]), 3)
    """
    every = torch.arange(sum(rows), device="cpu")
    start = sum(rows[:rank])
    mine = slice(start, start + rows[rank])
    if order is None:
        return every[mine], len(every)
    kept = every[order]
    places = torch.full_like(every, -1)
    places[order] = every[: len(kept)]
    return places[mine], len(kept)
