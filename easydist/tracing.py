"""Traces of calls: every call of a part of the program, and its waits, as a table and as a trace for Perfetto.

Recording costs no exchange: every header carries the time at which its rank came, so each rank knows which rank was
last, and how long all others waited. Only ``gathered`` and ``save`` communicate with other ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, SupportsIndex

from easydist.agreement.notes import Notes, listeners
from easydist.base import html
from easydist.state import communicators, together
from easydist.typing import Group
from easydist.verbs.objects import gather_object

__all__ = ["Trace", "TracedCall", "trace"]

_SHOWN = 10
_TITLES = ("operation", "called at", "group", "calls", "raised", "bytes", "total", "median", "longest", "waited", "for")
_TEXTS = ("operation", "called at", "group", "for")
_PID = 1  # 0 would be the idle process in viewers


class TracedCall(NamedTuple):
    """One call on one rank. Times are nanoseconds since 1970, by the clock of the rank's host."""

    operation: str
    """The verb's name."""
    site: str
    """The file and line of the call."""
    group: str
    """The group's name."""
    rank: int
    """The rank of this process in the group."""
    size: int
    """The number of processes in the group."""
    peer: int | None
    """The only other rank that took part (``send_tensor_dict``, ``recv_tensor_dict``); None if all ranks did."""
    number: int
    """The number of the call in the group, as in errors; 0 in a single process, and for calls between two ranks."""
    start: int
    """The time when it began."""
    end: int
    """The time when it ended."""
    came: tuple[int, ...]
    """The time when each rank was ready to exchange.

    Empty if there was no wait for other ranks, or the times are not known: in a single process, between two ranks, in
    ``broadcast`` and ``reduce`` with ``check=False``, and if a rank never came.
    """
    nbytes: int | None
    """The bytes of this rank's data, which is its tree's leaves, or its encoded objects.

    This counts the data that it sends and, if it receives into its own tree, the data that it receives; 0 if it passes
    no data. None if it is not known (tensor dicts, ``scatter_object_list``, a tree that could not be read), or if the
    call has no data.
    """
    error: str | None
    """The name of the exception type that the call raised; None if it succeeded."""

    @property
    def last(self) -> int | None:
        """The rank that came last."""
        return self.came.index(max(self.came)) if self.came else None

    @property
    def waited(self) -> int | None:
        """The nanoseconds from the time when this rank was ready until the last one was."""
        return self.waited_by(self.rank) if self.came else None

    def waited_by(self, rank: int) -> int:
        """Return the nanoseconds that a rank waited for the last one, as far as the clocks of several hosts agree.

        Args:
            rank: A rank of the call's group.
        """
        came = self.came[rank]
        return max(0, min(max(self.came), self.end) - came)


class Trace:
    """The calls of this process in a ``with`` block; see ``trace``."""

    def __init__(self) -> None:
        self._ended: list[Notes] = []
        self._calls: list[TracedCall] = []

    def __enter__(self) -> Trace:
        listeners.append(self._ended.append)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listeners.remove(self._ended.append)

    @property
    def calls(self) -> list[TracedCall]:
        """The calls of this rank, in the order in which they ended."""
        ended = self._ended[:]
        del self._ended[: len(ended)]
        self._calls += map(_traced, ended)
        return self._calls

    def gathered(self, group: Group = None) -> list[list[TracedCall]]:
        """Return the calls of every rank.

        Law: ``gathered()[r] == calls of rank r``.

        Args:
            group: The ranks that take part; all of them have to call.

        Cost: that of ``gather_object``; a few hundred bytes per call.
        """
        every = gather_object(tuple(map(tuple, self.calls)), weights_only=True, group=group)
        return [[TracedCall(*call) for call in calls] for calls in every]

    def summary(self, every: Sequence[Sequence[TracedCall]] | None = None) -> str:
        """Return a table of operations, call sites and groups, the longest waits first, and a list of the late ranks.

        Args:
            every: All ranks' calls, from ``gathered``; None for this rank's only. In that case the times and bytes of
                the table are this rank's, but the list covers all ranks in this rank's calls.

        Returns:
            The text. ``total``, ``median`` and ``longest`` are the calls' times in ms, ``waited`` is the part of the
            total before the last rank had come, and ``for`` is the rank that caused most of that. A dash means that a
            value is not known.

        Cost: no exchange.
        """
        calls = self.calls if every is None else [call for own in every for call in own]
        spread = f"{len(calls)} calls of this rank" if every is None else f"{len(every)} ranks, {len(calls)} calls"
        return "\n".join([_titled(spread, calls), *_aligned(_columns(calls)), *_waits(calls, every is None)])

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        columns, calls = _columns(self.calls), self.calls
        title, waits = _titled(f"{len(calls)} calls of this rank", calls), "\n".join(_waits(calls, True))
        titles, *rows = zip(*columns, strict=True) if columns else [()]
        shown = [html.text(title), html.table(titles, rows, _TEXTS) if rows else "", html.text(waits) if waits else ""]
        return "".join(shown)

    def save(self, path: str | os.PathLike[str], *, group: Group = None) -> None:
        """Write the calls of every rank as one file for https://ui.perfetto.dev or ``chrome://tracing``.

        Each rank is a track, and each call is a slice with an inner slice for the time until the last rank had come.
        Calls of several threads that overlap are on further tracks of the rank: ``rank 0 (2)``.
        The arguments of a slice are ``site``, ``group``, ``rank`` (in the group), ``call`` (its number), ``bytes``,
        ``waited_us``, ``waited_for`` and ``error``.

        Args:
            path: The file; rank 0 of the group writes it.
            group: The ranks that take part; all of them have to call.

        Raises:
            OSError: The file cannot be written, on rank 0; the others raise ``RemoteError``.

        Cost: that of ``gathered``, and one header exchange.

        Source: the Trace Event Format, JSON object form, complete events.
        """
        with together(group):
            every = self.gathered(group)
            if communicators(group).rank == 0:
                text = json.dumps({"traceEvents": list(_events(every)), "displayTimeUnit": "ms"})
                Path(path).write_text(text, encoding="utf-8")


def trace() -> Trace:
    """Record every call of easydist in a ``with`` block: its site, bytes and times, and the rank that it waited for.

    Each rank records its own calls, without an exchange, so an exception may leave the block. Calls of all threads are
    recorded; calls that easydist's functions make of one another (``synchronize_rng_states`` broadcasts) have their own
    rows. Traces may be nested.

    Example:
        >>> import torch, easydist
        >>> with easydist.trace() as trace:
        ...     total = easydist.reduce(torch.ones(3), "sum")
        >>> [(call.operation, call.nbytes) for call in trace.calls]
        [('reduce', 12)]

    Returns:
        The ``Trace``. Its ``summary()`` is a table, which ``print(trace)`` prints and a notebook shows; its
        ``save(path)`` writes a file for Perfetto.

    Cost: a few microseconds and a few hundred bytes per call.
    """
    return Trace()


def _traced(notes: Notes) -> TracedCall:
    peer = None if notes.peer is None else _plain(notes.peer)
    number = notes.number if notes.peer is None else 0
    return TracedCall(
        notes.operation,
        notes.site,
        notes.group,
        notes.rank,
        notes.size,
        peer,
        number,
        notes.start,
        notes.end,
        tuple(notes.came),
        notes.nbytes,
        notes.error,
    )


def _plain(peer: object) -> int | None:
    """Return the caller's rank as an int; None if it is not an integer."""
    return index(peer) if isinstance(peer, SupportsIndex) else None


def _titled(spread: str, calls: Sequence[TracedCall]) -> str:
    """Return the first line: the number of calls, and the time from the first to the last."""
    if not calls:
        return spread
    seconds = (max(call.end for call in calls) - min(call.start for call in calls)) / 1e9
    return f"{spread} in {seconds:.3f} s; times in ms"


def _columns(calls: Sequence[TracedCall]) -> list[list[str]]:
    """Return the columns of the table, each with its title first, without empty ones."""
    if not calls:
        return []
    by_key: dict[tuple[str, str, str], list[TracedCall]] = {}
    for call in calls:
        by_key.setdefault((call.operation, call.site, call.group), []).append(call)
    groups = sorted(by_key.items(), key=lambda item: (-_waited(item[1]), -sum(map(_nanoseconds, item[1]))))
    several = len({group for _, _, group in by_key}) > 1
    cells = [[operation, site, group if several else "", *_cells(own)] for (operation, site, group), own in groups]
    return [[title, *column] for title, column in zip(_TITLES, zip(*cells, strict=True), strict=True) if any(column)]


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of the table, with the cells of each column padded to the same width."""
    widths = [max(map(len, column)) for column in columns]
    padded = [
        [cell.ljust(width) if column[0] in _TEXTS else cell.rjust(width) for cell in column]
        for column, width in zip(columns, widths, strict=True)
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _cells(calls: Sequence[TracedCall]) -> list[str]:
    """Return the cells of a row after operation, site and group."""
    from statistics import median  # here, because importing it takes longer than the rest of this module

    times = [_nanoseconds(call) for call in calls]
    known = [call.nbytes for call in calls if call.nbytes is not None]
    raised = sum(call.error is not None for call in calls)
    waited = _ms(_waited(calls)) if any(call.came for call in calls) else "–"
    return [
        str(len(calls)),
        str(raised or ""),
        str(sum(known)) if known else "–",
        *map(_ms, (sum(times), median(times), max(times))),
        waited,
        _whom(calls),
    ]


def _whom(calls: Sequence[TracedCall]) -> str:
    """Return the rank that caused most of the waits, and its share of them."""
    shares: dict[int, int] = {}
    for call in calls:
        if call.last is not None:
            shares[call.last] = shares.get(call.last, 0) + (call.waited or 0)
    if not any(shares.values()):
        return ""
    rank = max(shares, key=lambda rank: shares[rank])
    return f"rank {rank} ({shares[rank] / sum(shares.values()):.0%})"


def _waits(calls: Sequence[TracedCall], for_all: bool) -> Iterator[str]:
    """Yield the lines about the ranks that others waited for; ``for_all``: one rank's calls stand for those of all."""
    by_group: dict[str, dict[int, dict[int, int]]] = {}
    for call in calls:
        for rank in range(call.size) if for_all else (call.rank,):
            if call.last is not None and (waited := call.waited_by(rank)):
                row = by_group.setdefault(call.group, {}).setdefault(call.last, {})
                row[rank] = row.get(rank, 0) + waited
    for group, rows in by_group.items():
        yield f"waited for, in group {group}:" if len(by_group) > 1 else "waited for:"
        ordered = _largest(rows, lambda row: sum(row.values()))
        for rank, row in ordered[:_SHOWN]:
            by = [f"rank {waiter} {_ms(waited)}" for waiter, waited in _largest(row, int)]
            yield f"  rank {rank}  {_ms(sum(row.values()))} ms, by {_listed(by)}"
        if len(ordered) > _SHOWN:
            yield f"  … and {len(ordered) - _SHOWN} more ranks"


def _largest(rows: dict[int, Any], key: Callable[[Any], int]) -> list[tuple[int, Any]]:
    return sorted(rows.items(), key=lambda item: (-key(item[1]), item[0]))


def _listed(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return ", ".join([*texts[:_SHOWN], *more])


def _nanoseconds(call: TracedCall) -> int:
    return call.end - call.start


def _waited(calls: Iterable[TracedCall]) -> int:
    return sum(call.waited or 0 for call in calls)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _events(every: Sequence[Sequence[TracedCall]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace file: names of tracks, then slices, in µs from the first call on."""
    yield {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "args": {"name": "easydist"}}
    named = [
        (f"rank {rank}" if number == 1 else f"rank {rank} ({number})", track)
        for rank, calls in enumerate(every)
        for number, track in enumerate(_tracks(calls), 1)
    ]
    for tid, (name, _) in enumerate(named, 1):
        track = {"ph": "M", "pid": _PID, "tid": tid}
        yield {**track, "name": "thread_name", "args": {"name": name}}
        yield {**track, "name": "thread_sort_index", "args": {"sort_index": tid}}
    zero = min((call.start for calls in every for call in calls), default=0)
    for tid, (_, calls) in enumerate(named, 1):
        for call in calls:
            yield _slice(tid, call.operation, "call", call.start - zero, call.end - zero, _arguments(call))
            if call.waited:
                ready = call.came[call.rank] - zero
                yield _slice(tid, f"wait for rank {call.last}", "wait", ready, ready + call.waited, {})


def _tracks(calls: Sequence[TracedCall]) -> list[list[TracedCall]]:
    """Spread a rank's calls over tracks so that those of one track are disjoint or nested, as the format demands.

    Calls of several threads overlap; viewers would drop or shorten them in one track.
    """
    tracks: list[list[TracedCall]] = [[]]
    open_: list[list[int]] = [[]]  # for each track the ends of the calls under way, the innermost last
    for call in sorted(calls, key=lambda call: (call.start, -call.end)):
        for ends in open_:
            while ends and ends[-1] <= call.start:
                ends.pop()
        free = next((i for i, ends in enumerate(open_) if not ends or call.end <= ends[-1]), len(tracks))
        if free == len(tracks):
            tracks.append([])
            open_.append([])
        tracks[free].append(call)
        open_[free].append(call.end)
    return tracks


def _slice(tid: int, name: str, category: str, start: int, end: int, arguments: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": _PID, "tid": tid, **times, "args": arguments}


def _arguments(call: TracedCall) -> dict[str, Any]:
    """Return the known arguments of a call for a viewer."""
    known = {
        "site": call.site,
        "group": call.group,
        "rank": call.rank,
        "peer": call.peer,
        "call": call.number or None,
        "bytes": call.nbytes,
        "waited_us": None if call.waited is None else call.waited / 1e3,
        "waited_for": call.last if call.waited else None,
        "error": call.error,
    }
    return {name: value for name, value in known.items() if value is not None}
