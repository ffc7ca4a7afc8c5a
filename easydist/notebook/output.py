"""The output of a cell's ranks, line by line; equal lines of several ranks are shown once."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from easydist.base.wording import named
from easydist.notebook.lines import Flood, Line, Shown, Whole, height

_PATIENCE = 0.15
"""Seconds for which a line waits to be shown together with the same line of other ranks."""

_COLLECT = 0.05
"""Seconds for which text is collected before it goes to the page."""

_TOGETHER = 0.05
"""Seconds within which lines count as simultaneous, and are shown in rank order."""

_LONGEST = 10_000
"""The number of characters without a line break that count as a line."""

_HELD = 20_000
"""The most lines of a rank that wait for those of others: a program in C writes a million in one message."""

_END = float("inf")
"""The time at which no line waits any more."""

_REWRITES = ("\r", "\x1b[A")
"""The marks of a progress bar's line."""


class Sink(Protocol):
    """The target of output."""

    def write(self, stream: str, text: str) -> None:
        """Write to ``"stdout"`` or ``"stderr"``."""

    def show(self, kind: str, content: Mapping[str, Any]) -> None:
        """Show rich output: the content of a ``display_data``, ``update_display_data`` or ``clear_output`` message."""


class Notebook:
    """The output of the running cell; outside of IPython, that of the program."""

    def write(self, stream: str, text: str) -> None:
        """Write to ``"stdout"`` or ``"stderr"``."""
        other, own = (sys.stderr, sys.stdout) if stream == "stdout" else (sys.stdout, sys.stderr)
        other.flush()
        try:
            own.write(text)
        except UnicodeEncodeError as error:  # the output of a program need not be UTF-8
            own.write(text.encode(error.encoding, "replace").decode(error.encoding))
        own.flush()

    def show(self, kind: str, content: Mapping[str, Any]) -> None:
        """Show rich output."""
        from IPython.core.getipython import get_ipython
        from IPython.display import clear_output, display

        if get_ipython() is None:
            if kind != "clear_output":
                self.write("stdout", f"{content['data'].get('text/plain', '')}\n")
        elif kind == "clear_output":
            clear_output(wait=content.get("wait", False))
        else:
            names = content.get("transient") or {}
            options = {"display_id": names["display_id"]} if "display_id" in names else {}
            update = {"update": True} if kind == "update_display_data" else {}
            display(content["data"], metadata=content.get("metadata"), raw=True, **options, **update)


class Output:
    r"""Merges the output of one cell's ranks.

    A line is shown once if several ranks write it at the same place among their lines. Those that come to it later are
    counted, and named at the end.

    Args:
        ranks: The ranks that run the cell. Figures and progress bars of the first one are shown.
        sink: The target of the output.
        file: The file for all lines if they are too many to show; None: they are not kept.

    Example:
        >>> class Printed:
        ...     def write(self, stream, text):
        ...         print(text, end="")
        >>> output = Output([0, 1, 2], Printed())
        >>> output.stream(0, "stdout", "epoch 1\nloss 0\n")
        >>> output.stream(1, "stdout", "epoch 1\nloss 1\n")
        >>> output.stream(2, "stdout", "epoch 1\nloss 1\n")
        ranks 0–2: epoch 1
        >>> output.close()
        rank 0: loss 0
        ranks 1–2: loss 1
    """

    def __init__(self, ranks: Sequence[int], sink: Sink, file: Path | None = None) -> None:
        self._ranks, self._sink = list(ranks), sink
        self._lead = self._ranks[0]
        self._lines: dict[int, deque[tuple[float, Line]]] = {rank: deque() for rank in ranks}
        self._counts: dict[int, Counter[Line]] = {rank: Counter() for rank in ranks}
        self._partial: dict[tuple[int, str], str] = {}
        self._page, self._again = Shown(ranks), Counter[int]()
        self._flood, self._whole = Flood(), Whole(file)
        self._collected: list[Line] = []
        self._written_at = 0.0
        self._results: dict[int, Mapping[str, Any]] = {}
        self._shown: dict[int, list[tuple[str, Mapping[str, Any]]]] = {rank: [] for rank in ranks}
        self._bar: str | None = None
        self._last_bar = ""

    def stream(self, rank: int, name: str, text: str) -> None:
        """Take text that a rank has written.

        Args:
            rank: The rank.
            name: ``"stdout"`` or ``"stderr"``.
            text: The text.
        """
        now, key = time.monotonic(), (rank, name)
        block, end, rest = (self._partial.pop(key, "") + text).replace("\r\n", "\n").rpartition("\n")
        if end:
            self._take(rank, name, block, now)
        if len(rest) > _LONGEST and not _rewrites(rest):
            self._take(rank, name, rest, now)
        elif rest:
            self._partial[key] = rest[-_LONGEST:]
            if rank == self._lead and _rewrites(rest):
                self._progress(name, rest)
        self.flush(now)

    def _take(self, rank: int, name: str, block: str, now: float) -> None:
        """Take whole lines."""
        self._whole.add(rank, block)
        lines = [block] if self._flood.is_on else block.split("\n")
        while lines and not self._flood.is_on:
            for line in lines[:_HELD]:
                self._add(rank, name, line, now)
            del lines[:_HELD]
            if len(self._lines[rank]) >= _HELD:
                self.flush(_END)
        if lines:
            self._flood.take(rank, name, "\n".join(lines))

    def _add(self, rank: int, name: str, line: str, now: float) -> None:
        if not _rewrites(line):
            self._lines[rank].append((now, (name, line)))
            self._counts[rank][name, line] += 1
        elif rank == self._lead:
            self._progress(name, line)
            self._end_bar()

    def _pop(self, rank: int) -> Line:
        _, line = self._lines[rank].popleft()
        counts = self._counts[rank]
        counts[line] -= 1
        if not counts[line]:
            del counts[line]
        return line

    def _progress(self, name: str, text: str) -> None:
        """Show the last state of a progress bar in place of the previous one."""
        last = [part for part in text.replace("\x1b[A", "").split("\r") if part.strip()]
        if last and last[-1] != self._last_bar:
            if self._bar != name:
                self._end_bar()
            self._bar, self._last_bar = name, last[-1]
            self._collected.append((name, f"\r{named([self._lead])}: {last[-1]}"))

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._collected.append((self._bar, "\n"))
            self._bar = None

    def flush(self, now: float) -> None:
        """Write the lines that all ranks have written, and those that have waited long enough.

        Args:
            now: The time; infinity writes all lines.
        """
        if now < _END and self._flood.fall(now):
            self._end_flood()
        while (ranks := self._next(now)) is not None:
            self._show(ranks, [self._pop(rank) for rank in ranks][-1])
        if self._collected and now - self._written_at >= _COLLECT:
            self._write_collected()

    def _show(self, ranks: list[int], line: Line) -> None:
        """Show a line of these ranks, except of those that come later to one that is on the page."""
        if len(ranks) < len(self._ranks):
            again = [rank for rank in ranks if self._page.follow(rank, line)]
            self._again.update(again)
            ranks = [rank for rank in ranks if rank not in again]
        if ranks:
            self._page.add(ranks, line)
            self._end_bar()
            self._collected.append((line[0], f"{named(ranks)}: {line[1]}\n"))
            if self._flood.rise(height(line[1])):
                self._begin_flood()

    def _write_collected(self) -> None:
        """Write the collected text, as few pieces as the streams allow."""
        collected, self._collected = self._collected, []
        while collected:
            stream = collected[0][0]
            count = next((i for i, line in enumerate(collected) if line[0] != stream), len(collected))
            self._sink.write(stream, "".join(text for _, text in collected[:count]))
            del collected[:count]
        self._written_at = time.monotonic()

    def _begin_flood(self) -> None:
        for rank in self._ranks:
            while self._lines[rank]:
                self._flood.take(rank, *self._pop(rank))
        self._collected.append(("stdout", f"… too many lines to show, {self._whole.place()}; the last ones follow …\n"))

    def _end_flood(self) -> None:
        """Show how many lines are left out, and the last ones."""
        left_out, tails = self._flood.end()
        self._collected.append(("stdout", f"… {left_out:,} lines are not shown here, {self._whole.place()} …\n"))
        self._page.clear()
        for rank, lines in tails.items():
            for name, line in lines:
                self._add(rank, name, line, 0.0)

    def _next(self, now: float) -> list[int] | None:
        """Return the ranks whose first line must be written next; None if all lines can still wait."""
        heads = {rank: lines[0] for rank, lines in self._lines.items() if lines}
        blocked: list[int] | None = None
        first = min((came for came, _ in heads.values()), default=now)
        is_due = now - first >= _PATIENCE
        for came, line in heads.values():
            same = [rank for rank, head in heads.items() if head[1] == line]
            if len(same) < len(self._ranks) and not (is_due and (came - first < _TOGETHER or now == _END)):
                continue
            if not self._is_further_down(line, same):
                return same
            blocked = blocked or same
        return blocked

    def _is_further_down(self, line: Line, heads: Sequence[int]) -> bool:
        """True if another rank has written the same line after others, which must be written first."""
        return any(line in counts for rank, counts in self._counts.items() if rank not in heads)

    def result(self, rank: int, content: Mapping[str, Any]) -> None:
        """Take the value of the last expression on a rank."""
        self._results[rank] = content["data"]

    def display(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Take rich output of a rank. The first rank's is shown at once."""
        if rank != self._lead:
            self._shown[rank].append((kind, content))
            return
        self._shown[rank].append((kind, {}))
        self._write_all(rank)
        self._sink.show(kind, content)

    def _write_all(self, rank: int) -> None:
        """Write a rank's earlier lines before it shows something."""
        while self._lines[rank]:
            self.flush(_END)
        self._end_bar()
        self._write_collected()

    def close(self) -> None:
        """End the cell: write the remaining lines, and the values."""
        for (rank, name), text in self._partial.items():
            if not _rewrites(text):
                self._take(rank, name, text, 0.0)
        self._partial.clear()
        self.flush(_END)
        if self._flood.is_on:
            self._end_flood()
            self.flush(_END)
        self._end_bar()
        self._name_followers()
        self._write_collected()
        self._whole.close()
        self._show_others()
        self._show_results()

    def _name_followers(self) -> None:
        """Say which ranks have come later to lines that are on the page, one line for each number of lines."""
        for count in sorted(set(self._again.values())):
            ranks = [rank for rank, own in self._again.items() if own == count]
            lines = "one more line, equal to one" if count == 1 else f"{count:,} more lines, equal to lines"
            self._collected.append(("stdout", f"{named(ranks)}: {lines} above\n"))

    def _show_others(self) -> None:
        """If the first rank has shown nothing, show the output of the next one. Say how much is omitted."""
        rest = {rank: shown for rank, shown in self._shown.items() if shown and rank != self._lead}
        if not self._shown[self._lead] and rest:
            first = min(rest)
            self._sink.write("stdout", f"{named([first])}:\n")
            for kind, content in rest.pop(first):
                self._sink.show(kind, content)
        elif self._shown[self._lead] and all(len(s) == len(self._shown[self._lead]) for s in rest.values()):
            return  # the usual case: the same code has shown the same on all ranks
        if rest:
            self._sink.write("stdout", f"{named(rest)}: figures and other rich output, shown by %%ranks {min(rest)}\n")

    def _show_results(self) -> None:
        left = dict(self._results)
        while left:
            first = min(left)
            bundle = left[first]  # figures differ, though their text is the same
            same = [rank for rank in sorted(left) if left[rank] == bundle]
            for rank in same:
                del left[rank]
            if set(bundle) <= {"text/plain"}:
                lines = bundle.get("text/plain", "").splitlines()
                self._sink.write("stdout", "".join(f"{named(same)}: {line}\n" for line in lines))
            else:
                self._sink.write("stdout", f"{named(same)}:\n")
                self._sink.show("display_data", {"data": bundle})


def _rewrites(text: str) -> bool:
    """True if the text is a progress bar's."""
    return any(mark in text for mark in _REWRITES)
