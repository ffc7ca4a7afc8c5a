"""The waits for signals of a window, as the other ranks see them: once one has ended, all others may wait in vain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WAITS = 32
"""The bit from which a rank's first number counts its waits; the bits below count the looks of the present one."""


class SignalWait:
    """One wait of this rank for a signal that any rank may send.

    In shared memory each rank has two numbers: which of its waits it is in, and how often it has looked in vain there
    (0 outside of a wait); and the last wait that another rank has found to be in vain.

    Args:
        numbers: The two numbers of each rank.
        rank: This rank.
        number: The number of this wait among those of this rank, from 1; 0 if this rank may signal others meanwhile.
    """

    NUMBERS = 2

    def __init__(self, numbers: Sequence[memoryview], rank: int, number: int) -> None:
        self._numbers, self._mine, self._wait = numbers, numbers[rank], number
        self._looks = 0
        self._seen = dict[int, int]()

    def look(self) -> None:
        """Count a look that found no signal."""
        if self._wait:
            self._looks += 1
            self._mine[0] = (self._wait << _WAITS) + self._looks

    def end(self) -> None:
        """End the wait."""
        if self._wait:
            self._mine[0] = 0

    def is_in_vain(self, others: Iterable[int]) -> bool:
        """True if none of these ranks, which are all that are left, can signal any more: each of them waits as well.

        Each has then looked twice in one wait since this rank saw it there before. The second of these looks began
        when all were waiting already, so it missed no signal.
        """
        now = {rank: self._numbers[rank][0] for rank in others}
        if not now or (self._wait and self._mine[1] == self._wait):
            return True
        if not all(rank in self._seen and _is_same_wait(self._seen[rank], seen) for rank, seen in now.items()):
            self._seen = now
        elif self._wait and all(seen >= self._seen[rank] + 2 for rank, seen in now.items()):
            for rank, seen in now.items():  # this rank may signal again: let them hear of it before it does
                self._numbers[rank][1] = seen >> _WAITS
            return True
        return False


def _is_same_wait(before: int, now: int) -> bool:
    return now > 0 and before >> _WAITS == now >> _WAITS
