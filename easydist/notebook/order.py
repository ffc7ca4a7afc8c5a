"""The lines on the page, to recognise the same line of a rank that comes to it later."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

Line = tuple[str, str]
"""The stream of a line, ``"stdout"`` or ``"stderr"``, and its text."""

_Place = tuple[int, int]
"""A place among the lines: that of the leading rank's line, and a number behind it for lines of ranks that lag."""

_KEPT = 50_000
"""The number of lines that are kept at least. A rank that lags by more than twice as many is not recognised."""


class Shown:
    """The lines that are on the page, in the order in which each rank writes them.

    Args:
        ranks: The ranks that write.

    Example:
        >>> shown = Shown([0, 1])
        >>> for text in ("begin", "step 1", "step 2"):
        ...     shown.add([0], ("stdout", text))
        >>> [shown.follow(1, ("stdout", text)) for text in ("begin", "other", "step 2", "step 1")]
        [True, False, True, False]
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._at: dict[int, _Place] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all lines."""
        self._at = dict.fromkeys(self._ranks, (0, 0))
        self._last, self._count = 0, 0
        self._recent: dict[Line, list[_Place]] = {}
        self._older: dict[Line, list[_Place]] = {}

    def follow(self, rank: int, line: Line) -> bool:
        """Move a rank on to its next line on the page that equals this one.

        Returns:
            True if there is one, so that this line need not be shown again.
        """
        found: list[_Place] = []
        for lines in (self._older, self._recent):
            places = lines.get(line, ())
            if (index := bisect_right(places, self._at[rank])) < len(places):
                found.append(places[index])
        if found:
            self._at[rank] = min(found)
        return bool(found)

    def add(self, ranks: Sequence[int], line: Line) -> None:
        """Add a line that these ranks have written after all of their earlier lines."""
        at = max(self._at[rank] for rank in ranks)
        self._count += 1
        if at[0] == self._last or len(ranks) == len(self._ranks):
            self._last += 1
            at = (self._last, 0)
        else:
            at = (at[0], self._count)
        self._at.update(dict.fromkeys(ranks, at))
        if len(ranks) < len(self._ranks):
            insort(self._recent.setdefault(line, []), at)
            if self._count % _KEPT == 0:
                self._older, self._recent = self._recent, {}
