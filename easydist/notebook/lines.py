"""The lines of a cell: those on the page, as many as it can show; and a file with all of them."""

from __future__ import annotations

import contextlib
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

Line = tuple[str, str]
"""The stream of a line, ``"stdout"`` or ``"stderr"``, and its text."""

_SortKey = tuple[int, int]
"""A position among the lines: that of the leading rank's line, and a number behind it for lines of ranks that lag."""

_KEPT = 50_000
"""The number of lines that are kept at least. A rank that lags by more than twice as many is not recognised."""

_HEAD = 10_000
"""The number of lines that may be shown at once. A flood begins with the next one."""

_PER_SECOND = 100
"""The number of lines that may be shown each second for any time."""

_TAIL = 20
"""The number of a rank's last lines in a flood that are shown at its end."""

_WIDTH = 100
"""The number of characters that count as a line."""

_LARGEST = 1 << 30
"""The most bytes of a cell that its file keeps."""

_LONGEST_TAIL = 20_000
"""The most characters of a rank's last lines."""


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
        self._at: dict[int, _SortKey] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all lines."""
        self._at = dict.fromkeys(self._ranks, (0, 0))
        self._last, self._count = 0, 0
        self._recent: dict[Line, list[_SortKey]] = {}
        self._older: dict[Line, list[_SortKey]] = {}

    def follow(self, rank: int, line: Line) -> bool:
        """Move a rank on to its next line on the page that equals this one.

        Returns:
            True if there is one, so that this line need not be shown again.
        """
        found: list[_SortKey] = []
        for lines in (self._older, self._recent):
            positions = lines.get(line, ())
            if (index := bisect_right(positions, self._at[rank])) < len(positions):
                found.append(positions[index])
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


def height(text: str) -> int:
    """Return the number of lines that a text, without its last line break, takes on a page."""
    return max(text.count("\n") + 1, len(text) // _WIDTH)


class Flood:
    """The amount of text on a page: it rises with each line, and falls with time.

    Attributes:
        is_on: True while lines come faster than a page can show them.
    """

    def __init__(self) -> None:
        self.is_on, self._taken = False, 0
        self._level, self._time = 0.0, 0.0
        self._tails: dict[int, deque[Line]] = {}

    def rise(self, lines: int) -> bool:
        """Count lines for the page; return True if a flood begins with them."""
        self._level = min(self._level + lines, _HEAD + 2 * _PER_SECOND)  # so that a flood ends two seconds after it
        begins = self._level > _HEAD and not self.is_on
        self.is_on = self.is_on or begins
        return begins

    def fall(self, now: float) -> bool:
        """Note the time; return True if lines have come slowly enough for the flood to end."""
        self._level = max(0.0, self._level - _PER_SECOND * (now - self._time))
        self._time = now
        return self.is_on and self._level <= _HEAD

    def take(self, rank: int, stream: str, block: str) -> None:
        """Take a rank's lines in place of the page."""
        self.rise(height(block))
        self._taken += block.count("\n") + 1
        tail = self._tails.setdefault(rank, deque(maxlen=_TAIL))
        tail.extend((stream, line) for line in block[-_LONGEST_TAIL:].rsplit("\n", _TAIL)[-_TAIL:])

    def end(self) -> tuple[int, dict[int, deque[Line]]]:
        """End the flood; return the number of lines that are left out, and each rank's last lines, to be shown."""
        tails, self._tails = self._tails, {}
        taken, self._taken, self.is_on = self._taken, 0, False
        self._level = _HEAD - sum(height(line) for lines in tails.values() for _, line in lines)
        return taken - sum(map(len, tails.values())), tails


class Whole:
    """All lines of a cell, up to 1 GiB of them. They are written to a file once they are many.

    Args:
        path: The file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._height, self._left = path, 0, _LARGEST
        self._held: list[str] = []
        self._file: IO[str] | None = None

    def add(self, rank: int, block: str) -> None:
        """Add lines of a rank."""
        if self._path is None or self._left <= 0:
            return
        start = f"rank {rank}: "
        text = f"{start}{block}\n".replace("\n", f"\n{start}", block.count("\n"))
        self._left -= len(text)
        try:
            self._write(text)
        except OSError:  # the disk is full; the cell goes on
            self._path = None
            self.close()

    def _write(self, text: str) -> None:
        assert self._path is not None
        if self._file is None:
            self._held.append(text)
            self._height += height(text)
            if self._height <= _HEAD // 2:
                return
            self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace")
            text = "".join(self._held)
            self._held.clear()
        self._file.write(text)

    def place(self) -> str:
        """Return the words that say where the lines are, up to now."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError:
            self._path = None
        if self._path is None or self._file is None:
            return "not kept"
        return f"all lines are in {self._path}" if self._left > 0 else f"their first GiB is in {self._path}"

    def close(self) -> None:
        """End the file."""
        self._held.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
