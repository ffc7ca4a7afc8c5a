"""The state of a cluster's ranks, read from the pages that they publish: the waits, also in vain, and a table."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from easydist.base import html
from easydist.cli.ranks import awaited_by, placed
from easydist.liveness.page import PageEntry, PeerPage

_COUNTS_ALL = "easydist_shm"
"""A group of this name also counts messages of two ranks, so numbers do not show which rank is behind."""

_COLUMNS = ("rank", "pid", "state", "operation", "at", "waits for", "for", "memory")
_TEXTS = ("state", "operation", "at", "waits for")


class Wait(NamedTuple):
    """The wait of a rank.

    Attributes:
        operation: The operation in which it waits.
        site: The place of the call in the source.
        ranks: The awaited ranks, as far as they are known.
        since: The time at which it began, on the monotonic clock.
        is_vain: True if some of them will not come.
        missing: The ranks that will not come, as far as they are known.
    """

    operation: str
    site: str
    ranks: tuple[int, ...]
    since: float
    is_vain: bool
    missing: tuple[int, ...]


class _SeenGroup(NamedTuple):
    """A group, as far as it can be seen.

    Attributes:
        size: The number of its ranks.
        numbers: The cluster's rank of each number in the group.
        told: The published entry of each of them, by its number in the group.
        others: The cluster's ranks that are not known to be in it.
    """

    size: int
    numbers: dict[int, int]
    told: dict[int, PageEntry]
    others: set[int]

    @property
    def everyone(self) -> set[int]:
        """The ranks in it. Ranks that cannot be seen are included only if they can be determined."""
        seen = set(self.numbers.values())
        return seen | self.others if len(seen) + len(self.others) == self.size else seen


class Pages:
    """The pages of a cluster's processes.

    Args:
        pids: The process of each rank.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._pages: dict[int, PeerPage] = {}

    def entries(self) -> dict[int, list[PageEntry]]:
        """Return the groups of each rank."""
        for rank, pid in self._pids.items():
            if rank not in self._pages and (page := PeerPage.find(pid)) is not None:
                self._pages[rank] = page
        return {rank: page.entries() for rank, page in self._pages.items()}

    def waits(self, running: Collection[int]) -> dict[int, Wait]:
        """Return the waits of the ranks that are in a call.

        Args:
            running: The ranks that run a cell; others join no call.
        """
        groups: defaultdict[tuple[str, str, int], dict[int, tuple[int, PageEntry]]] = defaultdict(dict)
        for rank, entries in self.entries().items():
            for told in entries:
                groups[told.meeting, told.group, told.size][told.rank] = rank, told
        waits: dict[int, Wait] = {}
        for (_, _, size), members in groups.items():
            numbers = {number: rank for number, (rank, _) in members.items()}
            seen = {number: told for number, (_, told) in members.items()}
            group = _SeenGroup(size, numbers, seen, set(self._pids) - set(numbers.values()))
            for number, rank in numbers.items():
                if seen[number].is_in_call and rank in running:
                    waits[rank] = self._wait(seen[number], group, running)
        return waits

    def _wait(self, told: PageEntry, group: _SeenGroup, running: Collection[int]) -> Wait:
        awaited = self._awaited(told, group)
        absent = {rank for rank in group.everyone if rank not in running}
        if told.group == _COUNTS_ALL:
            is_vain = self._is_stuck(group, running)
        else:
            unseen = [number for number in awaited_by(told, group.told) if number not in group.numbers]
            is_vain = bool(awaited & absent) or (bool(unseen) and not group.others & set(running))
        operation, _, site = placed(told.place)
        missing = awaited & absent or absent
        return Wait(operation, site, tuple(sorted(awaited)), told.since, is_vain, tuple(sorted(missing)))

    def _awaited(self, told: PageEntry, group: _SeenGroup) -> set[int]:
        """Return the ranks for which a rank waits. A group as large as the cluster is in the cluster's order."""
        numbers = awaited_by(told, group.told)
        if group.size == len(self._pids):
            return {group.numbers.get(number, number) for number in numbers}
        return {group.numbers[number] for number in numbers if number in group.numbers}

    def _is_stuck(self, group: _SeenGroup, running: Collection[int]) -> bool:
        """True if no rank of a group can continue: all that run the cell wait, and some do not run it."""
        here = [told for number, told in group.told.items() if group.numbers[number] in running]
        may_come = group.others & set(running) if len(group.told) < group.size else set()
        return len(here) < group.size and not may_come and all(told.is_in_call for told in here)


def where(site: str, number: int) -> str:
    """Describe a call's site for the reader of a notebook.

    Args:
        site: The file and line.
        number: The number of the cell that ran.

    Example:
        >>> where("<cell 5>:3", 5), where("<cell 2>:3", 5), where("train.py:30", 5)
        ('cell line 3', 'line 3 of cell 2', 'train.py:30')
    """
    match = re.fullmatch(r"<cell (\d+)[^>]*>:(\d+)", site)
    if match is None:
        return site
    return f"cell line {match[2]}" if int(match[1]) == number else f"line {match[2]} of cell {match[1]}"


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank.

    Attributes:
        rank: Its number.
        pid: The pid of its process.
        state: ``"idle"``, ``"runs a cell"``, ``"waits"``, ``"stopped"``, or the end of its process.
        operation: Its current call; empty if there is none.
        site: The place of the call in the source.
        waits_for: The ranks for which it waits there.
        seconds: The duration of the call so far.
        memory: Resident bytes.
    """

    rank: int
    pid: int
    state: str
    operation: str = ""
    site: str = ""
    waits_for: tuple[int, ...] = ()
    seconds: float = 0.0
    memory: int = 0

    def cells(self) -> list[str]:
        """Return the row of the table."""
        lasts = f"{self.seconds:.1f} s" if self.operation else ""
        waits, memory = ", ".join(map(str, self.waits_for)), f"{self.memory / 2**20:.0f} MiB" if self.memory else ""
        return [str(self.rank), str(self.pid), self.state, self.operation, self.site, waits, lasts, memory]


class Status(list[RankStatus]):
    """The state of a cluster's ranks at one moment, shown as a table.

    Example:
        >>> Status(
        ...     [RankStatus(0, 4711, "waits", "gather", "cell line 3", (1,), 2.0, 2**28), RankStatus(1, 4712, "idle")]
        ... )
        rank  pid   state  operation  at           waits for  for    memory
        0     4711  waits  gather     cell line 3  1          2.0 s  256 MiB
        1     4712  idle
    """

    def __repr__(self) -> str:
        rows = [list(_COLUMNS), *(rank.cells() for rank in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        marked = [row for row, rank in enumerate(self) if rank.state not in ("idle", "runs a cell", "waits")]
        columns = zip(*(rank.cells() for rank in self), strict=True)
        shown = [(title, cells) for title, cells in zip(_COLUMNS, columns, strict=True) if any(cells)]
        return html.table(
            [title for title, _ in shown], zip(*(cells for _, cells in shown), strict=True), _TEXTS, marked
        )


def look(pids: Sequence[int], running: Sequence[int], ended: dict[int, str], number: int) -> Status:
    """Return the state of the ranks, without asking them.

    Args:
        pids: The process of each rank.
        running: The ranks that run a cell.
        ended: The description of each ended process.
        number: The number of the last cell.
    """
    waits = Pages({rank: pid for rank, pid in enumerate(pids) if rank not in ended}).waits(running)
    now, rows = time.monotonic(), Status()
    for rank, pid in enumerate(pids):
        if rank in ended:
            rows.append(RankStatus(rank, pid, ended[rank]))
            continue
        memory, is_stopped = _process(pid)
        wait = waits.get(rank)
        state = "stopped (SIGSTOP)" if is_stopped else "waits" if wait else "runs a cell" if rank in running else "idle"
        if wait is None:
            rows.append(RankStatus(rank, pid, state, memory=memory))
        else:
            site = where(wait.site, number)
            rows.append(RankStatus(rank, pid, state, wait.operation, site, wait.ranks, now - wait.since, memory))
    return rows


def _process(pid: int) -> tuple[int, bool]:
    """Return the resident bytes, and True if the process is stopped."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.memory_info().rss, process.status() == psutil.STATUS_STOPPED
    return 0, False
