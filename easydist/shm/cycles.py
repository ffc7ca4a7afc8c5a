"""Ranks that wait for one another, so that none of them can ever go on: one in a message, another in a collective.

A rank waits for all that its operation needs: a step or data of some ranks, or room in the pipe to one. If only one
thread makes its calls, and waits, then it begins nothing else until that wait ends. So ranks that wait for one another
in a circle, each for something that the next one has not begun, wait forever. No comparison of calls finds that:
messages are not numbered among the collectives.

Each such rank shows its wait to the others, and looks around about every 50 ms. A circle counts once each of its ranks
has looked again, several times, and nothing has moved: what one look moves, the next ones of the others would see.

    4 numbers per rank, written by that rank:
        wait                             the number of its wait; another one whenever something has moved; 0 for none
        looks                            its looks so far at a circle
        code, elements                   the operation for which it waits
    1 number per rank and other rank:
        flags                            what it needs from that rank, and what it has begun for it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from easydist.shm.slots import Pipe, Slots

_WAIT, _LOOKS, _CODE, _FLAGS = 0, 1, 2, 4

STEP = 1
"""Needs a step of a collective in the slots."""

_DATA, _ROOM = 2, 8
"""Needs data from a pipe, or room in one; shifted by the lane."""

_BEGUN = 5
"""By so many bits, from what a rank needs to what the other one has begun that may give it."""

BEGUN = STEP << _BEGUN
"""Has begun a collective in the slots."""

_NEEDS = (1 << _BEGUN) - 1
_ENOUGH = 3
"""The looks of each rank after which a circle counts."""


def begun(pipe: Pipe) -> int:
    """Return the flag of a transfer under way in a pipe: the other rank may need it."""
    return (_DATA if pipe.is_out else _ROOM) << pipe.lane << _BEGUN


def need(pipe: Pipe) -> int:
    """Return the flag for what a transfer in a pipe needs from the other rank."""
    return (_ROOM if pipe.is_out else _DATA) << pipe.lane


def circle_of(rank: int, size: int, needs: Callable[[int, int], bool]) -> list[int]:
    """Return the ranks of a shortest circle, beginning with a rank; none if that is in no circle.

    Args:
        rank: The rank.
        size: The number of ranks.
        needs: True if one rank waits for another.

    Example:
        >>> circle_of(0, 4, lambda one, other: (one, other) in {(0, 1), (1, 2), (2, 3), (2, 0)})
        [0, 1, 2]
        >>> circle_of(3, 4, lambda one, other: (one, other) in {(0, 1), (1, 0), (3, 0)})
        []
    """
    ways = reached(rank, size, needs)
    return next((way for one, way in ways.items() if needs(one, rank)), [])


def reached(rank: int, size: int, needs: Callable[[int, int], bool]) -> dict[int, list[int]]:
    """Return a shortest way to each rank for which one waits, directly or not, and to itself: the rank alone."""
    ways = {rank: [rank]}
    for one in (queue := [rank]):
        for other in range(size):
            if other not in ways and needs(one, other):
                ways[other] = [*ways[one], other]
                queue.append(other)
    return ways


class Looks:
    """The looks of one rank at the circle that it sees.

    Attributes:
        count: The number of looks.
    """

    def __init__(self) -> None:
        self.count = 0
        self._circle: list[tuple[int, object]] = []
        self._counts: list[int] = []

    def are_enough(self, ranks: Sequence[int], waits: Mapping[int, tuple[object, int]]) -> bool:
        """Look at a circle; return True once all of its ranks have looked at it again.

        Args:
            ranks: The ranks of the circle; none if there is none.
            waits: For each rank a value that distinguishes its wait from its next one, and the looks that it shows.
        """
        self.count += bool(ranks)
        circle, counts = [(rank, waits[rank][0]) for rank in ranks], [waits[rank][1] for rank in ranks]
        if circle != self._circle:
            self._circle, self._counts = circle, counts
        return bool(circle) and all(now >= before + _ENOUGH for now, before in zip(counts, self._counts, strict=True))


class Cycles:
    """One rank's view of the waits.

    Args:
        slots: The memory.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots, self._words, self._rank = slots, slots.words, slots.rank
        self._at = [slots.wait_cell(rank) for rank in range(slots.size)]
        self._own = self._at[slots.rank]
        self._wait, self._looks = 0, Looks()
        self._shown: object = None

    def look(self, flags: Sequence[int], call: tuple[int, int]) -> dict[int, tuple[int, int]] | None:
        """Show this rank's wait, and look at those of the others.

        Args:
            flags: What this rank needs from each rank, and has begun for it.
            call: The operation for which it waits.

        Returns:
            The operations of the ranks that wait for one another forever, this one among them; None if none do.
        """
        self._show(flags, call)
        ranks = circle_of(self._rank, self._slots.size, self._needs)
        words, at = self._words, self._at
        waits = {rank: (words[at[rank] + _WAIT], words[at[rank] + _LOOKS]) for rank in ranks}
        return {rank: self._call(rank) for rank in ranks} if self._looks.are_enough(ranks, waits) else None

    def _show(self, flags: Sequence[int], call: tuple[int, int]) -> None:
        words, own = self._words, self._own
        if (shown := (*call, *flags)) != self._shown:
            words[own + _WAIT] = 0  # the others must not take what stands there now for the next wait
            self._slots.futex.fence()
            for cell, number in enumerate(shown, own + _CODE):
                words[cell] = number
            self._wait, self._shown = self._wait + 1, shown
        # After the flags: a number other than 0 says that they are those of this wait.
        self._slots.write(own + _WAIT, self._wait)
        self._slots.write(own + _LOOKS, self._looks.count)
        self._slots.futex.fence()

    def end(self) -> None:
        """Show that this rank waits no more, or that something has moved."""
        if self._shown is not None:
            self._shown = None
            self._words[self._own + _WAIT] = 0

    def _needs(self, rank: int, other: int) -> bool:
        """True if a rank waits for something that another one has not begun."""
        words, at, there = self._words, self._at[rank], self._at[other]
        needs = words[at + _FLAGS + other] & ~(words[there + _FLAGS + rank] >> _BEGUN) & _NEEDS
        return bool(words[at + _WAIT] and needs)

    def _call(self, rank: int) -> tuple[int, int]:
        code, numel = self._words[self._at[rank] + _CODE : self._at[rank] + _FLAGS].tolist()
        return code, numel

    def close(self) -> None:
        """Release the memory."""
        self._shown = None
        del self._slots, self._words
