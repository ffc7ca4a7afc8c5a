"""The output of a cell's ranks, line by line; equal lines of several ranks are shown once."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from easydist.notebook.failures import named

_PATIENCE = 0.15
"""Seconds for which a line waits for the same line of other ranks."""

_TOGETHER = 0.05
"""Seconds within which lines count as simultaneous, and are shown in rank order."""

_FURTHER = 50
"""The number of a rank's lines to search for an equal one."""

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
        own.write(text)
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


class _Line(NamedTuple):
    stream: str
    text: str


class Output:
    r"""Merges the output of one cell's ranks.

    Args:
        ranks: The ranks that run the cell. Figures and progress bars of the first one are shown.
        sink: The target of the output.

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

    def __init__(self, ranks: Sequence[int], sink: Sink) -> None:
        self._ranks, self._sink = list(ranks), sink
        self._lead = self._ranks[0]
        self._lines: dict[int, deque[tuple[float, _Line]]] = {rank: deque() for rank in ranks}
        self._partial: dict[tuple[int, str], str] = {}
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
        *lines, rest = (self._partial.pop(key, "") + text).split("\n")
        for line in lines:
            self._add(rank, name, line, now)
        if rest:
            self._partial[key] = rest
            if rank == self._lead and any(mark in rest for mark in _REWRITES):
                self._progress(name, rest)
        self.flush(now)

    def _add(self, rank: int, name: str, line: str, now: float) -> None:
        if not any(mark in line for mark in _REWRITES):
            self._lines[rank].append((now, _Line(name, line)))
        elif rank == self._lead:
            self._progress(name, line)
            self._end_bar()

    def _progress(self, name: str, text: str) -> None:
        """Show the last state of a progress bar in place of the previous one."""
        last = [part for part in text.replace("\x1b[A", "").split("\r") if part.strip()]
        if last and last[-1] != self._last_bar:
            if self._bar != name:
                self._end_bar()
            self._bar, self._last_bar = name, last[-1]
            self._sink.write(name, f"\r{named([self._lead])}: {last[-1]}")

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._sink.write(self._bar, "\n")
            self._bar = None

    def flush(self, now: float) -> None:
        """Write the lines that all ranks have written, and those that have waited long enough.

        Args:
            now: The time; infinity writes all lines.
        """
        while (ranks := self._next(now)) is not None:
            line = [self._lines[rank].popleft()[1] for rank in ranks][-1]
            self._end_bar()
            self._sink.write(line.stream, f"{named(ranks)}: {line.text}\n")

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

    def _is_further_down(self, line: _Line, heads: Sequence[int]) -> bool:
        """True if another rank has written the same line after others, which must be written first."""
        others = [lines for rank, lines in self._lines.items() if rank not in heads]
        return any(line == later for lines in others for _, later in itertools.islice(lines, 1, _FURTHER))

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

    def close(self) -> None:
        """End the cell: write the remaining lines, and the values."""
        for (rank, name), text in self._partial.items():
            if not any(mark in text for mark in _REWRITES):
                self._lines[rank].append((0.0, _Line(name, text)))
        self._partial.clear()
        self.flush(_END)
        self._end_bar()
        self._show_others()
        self._show_results()

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
            text = left[first].get("text/plain", "")
            same = [rank for rank in sorted(left) if left[rank].get("text/plain", "") == text]
            bundle = left[first]
            for rank in same:
                del left[rank]
            if set(bundle) <= {"text/plain"}:
                self._sink.write("stdout", "".join(f"{named(same)}: {line}\n" for line in text.splitlines()))
            else:
                self._sink.write("stdout", f"{named(same)}:\n")
                self._sink.show("display_data", {"data": bundle})
