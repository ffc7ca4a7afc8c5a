"""The loader that the rows of a call come from: what one rank knows of it, and what all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from easydist.errors import DisagreementError
from easydist.metrics.order import Dealt
from easydist.metrics.tally import Position, Tally

__all__ = ["ACTIVE", "ENDED", "NAMED", "Lot", "agreed_lot"]

NAMED, ACTIVE, ENDED = range(3)
"""How a loader was found: it was passed, it is being iterated, or it is the only one that has ended."""


class Lot(NamedTuple):
    """A loader, as one rank knows it.

    Attributes:
        tally: The rows that were gathered; None if this rank has no loader.
        dealt: The distribution of its samples; None if only another rank knows it.
        at: Its position.
        origin: How it was found.
    """

    tally: Tally | None = None
    dealt: Dealt | None = None
    at: Position = Position()
    origin: int = NAMED

    def numbers(self) -> tuple[int, ...]:
        """Return it as numbers for the other ranks, together with the rows in this rank's tally."""
        if self.dealt is None:
            return (_NONE,) * _LENGTH
        gathered = 0 if self.tally is None else self.tally.rows
        block, rest, rows, is_even = [_NONE if each is None else each for each in self.dealt]
        return (self.origin, gathered, block, rest, rows, is_even, *self.at)


_NONE = -1
_SPLIT = 2 + len(Dealt._fields)
_LENGTH = _SPLIT + len(Position._fields)


def agreed_lot(mine: Lot, numbers: Sequence[tuple[int, ...]]) -> tuple[Lot, bool]:
    """Return the lot that all ranks agree on, and whether their tallies are the same.

    Args:
        mine: This rank's lot.
        numbers: The numbers of all ranks' lots. A rank that does not know its own takes that of the others.

    Raises:
        DisagreementError: The ranks' loaders differ, or are at different positions.
    """
    if numbers.count(numbers[0]) == len(numbers):
        return mine, True
    known = {rank: row for rank, row in enumerate(numbers) if row[0] != _NONE}
    _compare(known)
    first = next(iter(known.values()))
    block, rest, rows, is_even = [None if each == _NONE else each for each in first[2:_SPLIT]]
    at = Position._make(first[_SPLIT:])
    lot = Lot(mine.tally, Dealt(block, rest, rows, bool(is_even)), at, first[0])
    return lot, len({row[1] for row in known.values()}) == 1


def _compare(known: dict[int, tuple[int, ...]]) -> None:
    """Make sure that all ranks have the same loader, and if samples are repeated, at the same position."""
    lots = {row[2:_SPLIT] for row in known.values()}
    if len(lots) > 1:
        lines = [f"  rank {rank}: {_described(row)}" for rank, row in known.items()]
        text = "gather_for_metrics: the ranks' loaders distribute their samples differently"
        raise DisagreementError("\n".join([text, *lines, "Pass the same loader on every rank, or indices="]))
    positions = {rank: (row[_SPLIT + 1], row[_SPLIT + 3]) for rank, row in known.items()}
    if next(iter(lots))[1] != _NONE and len({*positions.values()}) > 1:
        lines = [f"  rank {rank}: batch {steps}" for rank, (steps, _) in positions.items()]
        text = "gather_for_metrics: the ranks' loaders are at different batches"
        raise DisagreementError("\n".join([text, *lines, "Gather at the same step on every rank, or pass indices="]))


def _described(row: tuple[int, ...]) -> str:
    block, rest, rows, _ = row[2:_SPLIT]
    parts = [f"{rows} rows" if rows != _NONE else "any number of rows"]
    parts += [f"in blocks of {block}"] if block != _NONE else []
    return ", ".join([*parts, f"{rest} samples in the last step" if rest != _NONE else "no sample repeated"])
