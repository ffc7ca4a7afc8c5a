"""The order in which samples were dealt to ranks, and which rows of theirs are repeated samples.

A loader deals samples in steps: a step gives each rank a block of consecutive samples. A batch of accelerate's prepared
loader is a block; ``DistributedSampler`` deals blocks of one sample. What is repeated to make the ranks equal comes
last in the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Dealt", "Order", "by_index", "in_order", "positions"]

Order = torch.Tensor | slice | None
"""The rows of all ranks to keep, joined in rank order; None: all as they stand."""


class Dealt(NamedTuple):
    """What a loader has dealt to the ranks.

    Attributes:
        block: Consecutive samples of one rank in one step; None: all that a rank has.
        rest: Of the last step the samples that are not repeated; None: no sample is repeated.
        is_full: All ranks have their whole blocks of every step; else that may be otherwise in the last one.
        total: How many rows the ranks have, where no more is known.
        most: How many rows a rank may have, where the loader was not named.
        kept: How many rows are kept, likewise.
    """

    block: int | None = None
    rest: int | None = None
    is_full: bool = False
    total: int | None = None
    most: int | None = None
    kept: int | None = None


def in_order(rows: Sequence[int], dealt: Dealt) -> Order:
    """Choose the rows to keep, in the order of the samples.

    Args:
        rows: How many rows each rank has; the last of them are of one step.
        dealt: What they are rows of.

    Returns:
        Positions in the rows of all ranks, joined in rank order; a slice where none changes its place; None: all.

    Raises:
        ValueError: The rows are not those of samples that were dealt so.

    Example:
        >>> in_order([2, 2], Dealt(block=1, rest=1))
        tensor([0, 2, 1])
        >>> in_order([4, 4], Dealt(block=4, rest=5))
        slice(None, 5, None)
        >>> in_order([3, 2], Dealt()) is None
        True
    """
    _check(rows, dealt)
    order = None if dealt.block is None or not any(rows) else _order(rows, dealt.block, dealt.rest)
    kept = sum(rows) if order is None else len(range(sum(rows))[order]) if isinstance(order, slice) else len(order)
    if dealt.kept not in (None, kept):
        raise ValueError(
            f"{_told(rows)}, of which {kept} count, and the only loader that has come to its end has {dealt.kept} "
            "samples; pass loader=, the one that these rows are of"
        )
    return order


def _told(rows: Sequence[int]) -> str:
    return f"the ranks have {', '.join(map(str, rows))} rows"


def _check(rows: Sequence[int], dealt: Dealt) -> None:
    """Make sure that the ranks have as many rows as samples were dealt to them, as far as that is known."""
    if dealt.total is not None and sum(rows) != dealt.total:
        raise ValueError(
            f"{_told(rows)}, {sum(rows)} in all, and total is {dealt.total}; pass loader= or indices=, which say what "
            "is repeated"
        )
    if dealt.is_full and dealt.block is not None and any(count % dealt.block for count in rows):
        raise ValueError(
            f"{_told(rows)}, and the loader's batches have {dealt.block}; pass one row per sample, or indices="
        )
    if dealt.most is not None and max(rows) > dealt.most:
        raise ValueError(
            f"{_told(rows)}, and a batch of the loader that is being iterated has {dealt.most}; pass loader=, the one "
            "that these rows are of"
        )


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
    """Positions of the rows, step by step: ``rows=[2, 2], block=1`` gives 0, 2, 1, 3."""
    padded = torch.full((len(rows), steps * block), -1)
    start = 0
    for rank, count in enumerate(rows):
        padded[rank, :count] = torch.arange(start, start + count)
        start += count
    order = padded.view(len(rows), steps, block).transpose(0, 1).reshape(-1)
    return order[order >= 0]


def _check_last(rows: Sequence[int], last: Sequence[int], block: int, rest: int) -> None:
    """Make sure that the last step is full, or shared out evenly."""
    even = -(-rest // len(rows))
    if sum(last) < rest or ({*last} != {block} and max(last) != even):
        raise ValueError(
            f"{_told(rows)}, which are not the loader's: its last step has {rest} samples in batches of {block}; pass "
            "one row per sample, or indices="
        )


def positions(order: Order, rows: Sequence[int], rank: int) -> tuple[torch.Tensor, int]:
    """Say where each row of a rank comes to stand, -1 where it is not kept, and how many rows of all ranks are kept.

    Args:
        order: What ``in_order`` gave.
        rows: How many rows each rank has.
        rank: Whose.

    Example:
        >>> positions(torch.tensor([0, 2, 1]), [2, 2], 1)
        (tensor([ 1, -1]), 3)
    """
    every = torch.arange(sum(rows))
    start = sum(rows[:rank])
    mine = slice(start, start + rows[rank])
    if order is None:
        return every[mine], len(every)
    kept = every[order]
    places = torch.full_like(every, -1)
    places[order] = every[: len(kept)]
    return places[mine], len(kept)


def by_index(indices: torch.Tensor) -> torch.Tensor:
    """Choose one row of each index, in order of the index.

    Args:
        indices: Of all ranks' rows, joined in rank order; where one occurs twice, the first row counts.

    Example:
        >>> by_index(torch.tensor([3, 0, 3, 1]))
        tensor([1, 3, 0])
    """
    order = torch.argsort(indices, stable=True)
    found = indices[order]
    is_first = torch.ones(len(found), dtype=torch.bool)
    is_first[1:] = found[1:] != found[:-1]
    return order[is_first]
