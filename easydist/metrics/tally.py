"""The loader that the rows of a call come from, and the tally of its rows, on which all ranks agree.

The tally tells which samples a call has, from the rows of the calls before it. The n-th calls between the steps of a
loader form a *sequence*, so predictions and labels that are gathered apart are two. The rows of a sequence come in the
loader's order, one batch after another, whenever they are gathered: in their own step, some steps later, or all at
once. So a sequence that has all rows of the pass has its last step, the only one with repeated samples. If rows cannot
be placed in this way, the call raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from easydist.errors import DisagreementError
from easydist.metrics.order import Sharding, check_even, rows_text

__all__ = ["ACTIVE", "ENDED", "NAMED", "Lot", "Position", "Tally", "agreed_lot"]

_ADVICE = "gather each batch in the loop, or all of them together after it, and pass one row per sample, or indices="


class Position(NamedTuple):
    """The position of a loader.

    Attributes:
        serial: The number of the current pass; 0 if none was seen.
        steps: The batches that it has yielded to each rank.
        available: Their rows on all ranks.
        has_ended: True if there are no more batches.
        finished: The number of the last pass that came to its end, as far as that is known.
        mixed: How often an older pass went on after a newer one had begun.
    """

    serial: int = 0
    steps: int = 0
    available: int = 0
    has_ended: bool = False
    finished: int = 0
    mixed: int = 0


class _Sequence:
    """The n-th calls between two steps.

    Attributes:
        name: A name for errors.
        rows: The rows of all ranks in its calls.
        behind: After its first call, the rows that the loader had yielded and this sequence had not gathered.
    """

    def __init__(self, number: int) -> None:
        self.name = "the call" if number == 0 else f"call {number + 1}"
        self.rows, self.behind = 0, -1


class Tally:
    """The rows that were gathered in the current pass over one loader. All ranks keep the same tally.

    Attributes:
        rows: The rows of all sequences.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._at = Position(serial=-1)
        self._total: int | None = None
        self._sequences: list[_Sequence] = []
        self._calls = 0
        self._is_lost = False

    def lose(self) -> None:
        """Forget the rows of this pass, since the ranks do not agree on them or do not know them."""
        self._sequences, self.rows, self._is_lost = [], 0, True

    def admit(self, rows: int, sharding: Sharding, at: Position) -> bool:
        """Add the rows of a call.

        Args:
            rows: The rows of all ranks.
            sharding: The distribution of the loader's samples.
            at: The position of the loader.

        Returns:
            True if the last step of the pass is among the rows.

        Raises:
            ValueError: It is not known which samples these rows are, or a sequence of the last pass lacks rows. The
                rows of this pass are lost then: call ``lose``.
        """
        last, self._at = self._at, at
        if at.serial != last.serial or at.mixed != last.mixed:
            self._begin(last, sharding, at)
        elif at.steps != last.steps:
            self._calls = 0
        repeats_none = sharding.rows is None and sharding.rest is None and at.has_ended
        if rows == sharding.rows or repeats_none:
            return True  # a whole pass, or one of unknown length
        sequence = None if self._is_lost or not at.serial else self._next_sequence(at)
        if sequence is None:
            return self._unplaced(rows, sharding)
        self._total = sharding.rows
        self.rows += rows
        sequence.rows += rows
        behind = at.available - sequence.rows
        sequence.behind = behind if sequence.behind < 0 else sequence.behind
        if behind < 0 or (at.has_ended and behind > sequence.behind):
            raise ValueError(
                f"{sequence.name} of each step has gathered {sequence.rows} rows so far, and the loader has yielded "
                f"{at.available} on all ranks, so it is not known which batches the last of them came from; {_ADVICE}"
            )
        return at.has_ended and sequence.rows == sharding.rows

    def _begin(self, last: Position, sharding: Sharding, at: Position) -> None:
        """Begin to count a pass that has begun since the last call."""
        is_mixed = last.serial > 0 and at.mixed != last.mixed
        sequences, self._sequences = self._sequences, []
        self.rows, self._calls, self._is_lost = 0, 0, is_mixed
        if is_mixed and sharding.rest is not None:
            raise ValueError(
                "the loader is being iterated several times at once, so it is not known which batches these rows and "
                "the last ones came from; use a loader for each loop, or pass indices="
            )
        if at.finished == last.serial or last.has_ended:
            self._check(sequences)

    def _check(self, sequences: list[_Sequence]) -> None:
        """Make sure that the sequences of a finished pass have all its rows."""
        for sequence in sequences:
            if self._total not in (None, sequence.rows):
                raise ValueError(
                    f"in the last pass over the loader, {sequence.name} of each step gathered {sequence.rows} of "
                    f"{self._total} rows, so samples are missing in its results; {_ADVICE}"
                )

    def _next_sequence(self, at: Position) -> _Sequence | None:
        """Return the sequence of this call; None if that is not known."""
        number, self._calls = self._calls, self._calls + 1
        if not at.has_ended and number == len(self._sequences):
            self._sequences.append(_Sequence(number))
        # After the last step, the sequences that the steps before had go on in turns.
        return self._sequences[number % len(self._sequences)] if self._sequences else None

    def _unplaced(self, rows: int, sharding: Sharding) -> bool:
        """Refuse rows of which it is not known whether the last step is among them."""
        if sharding.rest is None or (self._at.serial and not self._at.has_ended):
            return False
        raise ValueError(
            f"these are {rows} of the {sharding.rows} rows that the loader yields in a pass, which repeat samples, and "
            f"it is not known whether they are the last; {_ADVICE}"
        )


NAMED, ACTIVE, ENDED = range(3)
"""How a loader was found: it was passed, it is being iterated, or it is the only one that has ended."""

_THIS_LOADER = "pass loader= (the loader that these rows come from)"


class Lot(NamedTuple):
    """A loader, as one rank knows it.

    Attributes:
        tally: The rows that were gathered; None if this rank has no loader.
        sharding: The distribution of its samples; None if only another rank knows it.
        at: Its position.
        origin: How it was found.
    """

    tally: Tally | None = None
    sharding: Sharding | None = None
    at: Position = Position()
    origin: int = NAMED

    def admit(self, rows: Sequence[int]) -> bool:
        """Add the rows of a call to the tally.

        Args:
            rows: The number of rows of each rank.

        Returns:
            True if the last step of the pass is among them.

        Raises:
            ValueError: On all ranks: the rows are not those of the loader, or ``Tally.admit`` raised it.
        """
        if self.sharding is None or self.tally is None:
            return True
        if self.origin == ACTIVE and self.sharding.block is not None and max(rows) > self.sharding.block:
            raise ValueError(
                f"gather_for_metrics: {rows_text(rows)}, but a batch of the loader that is being iterated has "
                f"{self.sharding.block}; {_THIS_LOADER}"
            )
        has_last = self._counted(rows, self.sharding, self.tally)
        if self.origin == ENDED and self.sharding.rows is not None and not has_last:
            raise ValueError(
                f"gather_for_metrics: {rows_text(rows)}, but the only loader that has ended has "
                f"{self.sharding.samples(len(rows))} samples; {_THIS_LOADER}"
            )
        return has_last

    def _counted(self, rows: Sequence[int], sharding: Sharding, tally: Tally) -> bool:
        """Add the rows to the tally, or let it lose those of this pass."""
        try:
            if sharding.is_even:
                check_even(rows, sharding, self.at.has_ended or not self.at.serial)
            return tally.admit(sum(rows), sharding, self.at)
        except ValueError as error:
            tally.lose()
            if self.origin != ENDED:
                raise ValueError(f"gather_for_metrics: {error}") from None
            return False

    def numbers(self) -> tuple[int, ...]:
        """Return it as numbers for the other ranks, together with the rows in this rank's tally."""
        if self.sharding is None:
            return (_NONE,) * _LENGTH
        gathered = 0 if self.tally is None else self.tally.rows
        block, rest, rows, is_even = [_NONE if each is None else each for each in self.sharding]
        return (self.origin, gathered, block, rest, rows, is_even, *self.at)


_NONE = -1
_SPLIT = 2 + len(Sharding._fields)
_LENGTH = _SPLIT + len(Position._fields)


def agreed_lot(mine: Lot, numbers: Sequence[tuple[int, ...]]) -> Lot:
    """Return the lot that all ranks agree on. Their tallies lose their rows if they differ.

    Args:
        mine: This rank's lot.
        numbers: The numbers of all ranks' lots. A rank that does not know its own takes that of the others.

    Raises:
        DisagreementError: The ranks' loaders differ, or are at different positions.
    """
    if numbers.count(numbers[0]) == len(numbers):
        return mine
    known = {rank: row for rank, row in enumerate(numbers) if row[0] != _NONE}
    _compare(known)
    first = next(iter(known.values()))
    block, rest, rows, is_even = [None if each == _NONE else each for each in first[2:_SPLIT]]
    at = Position._make(first[_SPLIT:])
    tally = mine.tally or Tally()
    if len({row[1] for row in known.values()}) > 1:  # a call failed on some ranks only
        tally.lose()
    return Lot(tally, Sharding(block, rest, rows, bool(is_even)), at, first[0])


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
