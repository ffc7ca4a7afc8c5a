"""The state of a cluster's ranks, read from the pages that they publish: the waits, also hopeless ones, and a table."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from easydist.base import html
from easydist.cli.ranks import awaited_by, placed
from easydist.liveness.page import PageEntry
from easydist.notebook.rank import RankHandle

_COUNTS_ALL = "easydist_shm"
"""A group of this name also counts messages of two ranks, so numbers do not show which rank is behind."""

_COLUMNS = ("rank", "node", "GPU", "pid", "state", "operation", "at", "waits for", "for", "memory")
_TEXTS = ("node", "state", "operation", "at", "waits for")


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
        ranks: The ranks.
    """

    def __init__(self, ranks: Iterable[RankHandle]) -> None:
        self._ranks = {rank.rank: rank for rank in ranks}

    def entries(self) -> dict[int, list[PageEntry]]:
        """Return the groups of each rank."""
        return {number: rank.entries() for number, rank in self._ranks.items()}

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
            group = _SeenGroup(size, numbers, seen, set(self._ranks) - set(numbers.values()))
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
        if group.size == len(self._ranks):
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
        node: The address of its node in a cluster of machines.
        gpus: The GPUs that it was given there.
    """

    rank: int
    pid: int
    state: str
    operation: str = ""
    site: str = ""
    waits_for: tuple[int, ...] = ()
    seconds: float = 0.0
    memory: int = 0
    node: str = ""
    gpus: str = ""

    def cells(self) -> list[str]:
        """Return the row of the table."""
        lasts = f"{self.seconds:.1f} s" if self.operation else ""
        waits, memory = ", ".join(map(str, self.waits_for)), f"{self.memory / 2**20:.0f} MiB" if self.memory else ""
        place = [str(self.rank), self.node, self.gpus, str(self.pid)]
        return [*place, self.state, self.operation, self.site, waits, lasts, memory]


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
        columns = [[title, *cells] for title, cells in self._columns() if title not in ("node", "GPU") or any(cells)]
        widths = [max(map(len, column)) for column in columns]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True))

    def _columns(self) -> list[tuple[str, list[str]]]:
        rows = [rank.cells() for rank in self]
        return [(title, [row[number] for row in rows]) for number, title in enumerate(_COLUMNS)]

    def _repr_html_(self) -> str:
        marked = [row for row, rank in enumerate(self) if rank.state not in ("idle", "runs a cell", "waits")]
        shown = [(title, cells) for title, cells in self._columns() if any(cells)]
        return html.table(
            [title for title, _ in shown], zip(*(cells for _, cells in shown), strict=True), _TEXTS, marked
        )


def look(ranks: Sequence[RankHandle], running: Collection[int], number: int) -> Status:
    """Return the state of the ranks, without asking them.

    Args:
        ranks: The ranks.
        running: Those that run a cell.
        number: The number of the last cell.
    """
    waits = Pages([rank for rank in ranks if not rank.has_ended]).waits(running)
    return Status(_state(rank, waits.get(rank.rank), rank.rank in running, number) for rank in ranks)


def _state(rank: RankHandle, wait: Wait | None, runs: bool, number: int) -> RankStatus:
    if rank.has_ended:
        return RankStatus(rank.rank, rank.pid, rank.end(), node=rank.node, gpus=rank.gpus)
    memory, is_stopped = rank.usage()
    state = "stopped (SIGSTOP)" if is_stopped else "waits" if wait else "runs a cell" if runs else "idle"
    known = RankStatus(rank.rank, rank.pid, state, memory=memory, node=rank.node, gpus=rank.gpus)
    if wait is None:
        return known
    lasts = time.monotonic() - wait.since
    return replace(known, operation=wait.operation, site=where(wait.site, number), waits_for=wait.ranks, seconds=lasts)
