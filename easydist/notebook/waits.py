"""The ranks that wait for others that will not come, found on the pages that the ranks publish."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from easydist.cli.ranks import awaited_by, placed
from easydist.liveness.page import Membership, PeerPage

_COUNTS_ALL = "easydist_shm"
"""A group of this name also counts messages of two ranks, so numbers do not show which rank is behind."""


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


class _Group(NamedTuple):
    """A group, as far as it can be seen.

    Attributes:
        size: The number of its ranks.
        numbers: The cluster's rank of each number in the group.
        told: The published membership of each of them, by its number in the group.
        others: The cluster's ranks that are not known to be in it.
    """

    size: int
    numbers: dict[int, int]
    told: dict[int, Membership]
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

    def memberships(self) -> dict[int, list[Membership]]:
        """Return the groups of each rank."""
        for rank, pid in self._pids.items():
            if rank not in self._pages and (page := PeerPage.find(pid)) is not None:
                self._pages[rank] = page
        return {rank: page.memberships() for rank, page in self._pages.items()}

    def waits(self, running: Collection[int]) -> dict[int, Wait]:
        """Return the waits of the ranks that are in a call.

        Args:
            running: The ranks that run a cell; others join no call.
        """
        groups: defaultdict[tuple[str, str, int], dict[int, tuple[int, Membership]]] = defaultdict(dict)
        for rank, memberships in self.memberships().items():
            for told in memberships:
                groups[told.meeting, told.group, told.size][told.rank] = rank, told
        waits: dict[int, Wait] = {}
        for (_, _, size), members in groups.items():
            numbers = {number: rank for number, (rank, _) in members.items()}
            seen = {number: told for number, (_, told) in members.items()}
            group = _Group(size, numbers, seen, set(self._pids) - set(numbers.values()))
            for number, rank in numbers.items():
                if seen[number].is_in_call and rank in running:
                    waits[rank] = self._wait(seen[number], group, running)
        return waits

    def _wait(self, told: Membership, group: _Group, running: Collection[int]) -> Wait:
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

    def _awaited(self, told: Membership, group: _Group) -> set[int]:
        """Return the ranks for which a rank waits. A group as large as the cluster is in the cluster's order."""
        numbers = awaited_by(told, group.told)
        if group.size == len(self._pids):
            return {group.numbers.get(number, number) for number in numbers}
        return {group.numbers[number] for number in numbers if number in group.numbers}

    def _is_stuck(self, group: _Group, running: Collection[int]) -> bool:
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
