"""Which ranks wait for somebody who will not come, from the pages that the ranks publish."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from easydist.cli.ranks import awaited_by, placed
from easydist.liveness.page import Membership, PeerPage

_COUNTS_ALL = "easydist_shm"
"""A group of this name counts messages of two ranks, too, so numbers do not say who is behind."""


class Wait(NamedTuple):
    """A rank that waits.

    Attributes:
        operation: In which operation.
        site: Where that was called.
        ranks: For whom, as far as that is known.
        since: When it began, by the monotonic clock.
        is_vain: True if some of them will not come.
    """

    operation: str
    site: str
    ranks: tuple[int, ...]
    since: float
    is_vain: bool


class Pages:
    """The pages of a cluster's processes.

    Args:
        pids: The process of each rank.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._pages: dict[int, PeerPage] = {}

    def memberships(self) -> dict[int, list[Membership]]:
        """The groups of each rank."""
        for rank, pid in self._pids.items():
            if rank not in self._pages and (page := PeerPage.find(pid)) is not None:
                self._pages[rank] = page
        return {rank: page.memberships() for rank, page in self._pages.items()}

    def waits(self, running: Collection[int]) -> dict[int, Wait]:
        """The ranks that are in a call, and for whom they wait.

        Args:
            running: The ranks that run a cell; others come to no call.
        """
        groups: defaultdict[tuple[str, str, int], dict[int, tuple[int, Membership]]] = defaultdict(dict)
        for rank, memberships in self.memberships().items():
            for told in memberships:
                groups[told.meeting, told.group, told.size][told.rank] = rank, told
        waits: dict[int, Wait] = {}
        for members in groups.values():
            for rank, told in members.values():
                if told.is_in_call and rank in running:
                    waits[rank] = self._wait(told, members, running)
        return waits

    def _wait(self, told: Membership, members: Mapping[int, tuple[int, Membership]], running: Collection[int]) -> Wait:
        known = {number: membership for number, (_, membership) in members.items()}
        numbers = awaited_by(told, known)
        ranks = {members[number][0] for number in numbers if number in members}
        unseen = [number for number in numbers if number not in members]
        if unseen and told.size == len(self._pids):
            ranks |= set(unseen)
            unseen = []
        others = set(self._pids) - {rank for rank, _ in members.values()}
        if told.group == _COUNTS_ALL:
            is_vain = self._is_stuck(told.size, members, others, running)
        else:
            is_vain = any(rank not in running for rank in ranks) or (bool(unseen) and not others & set(running))
        operation, _, site = placed(told.place)
        awaited = ranks | (others if unseen else set())
        return Wait(operation, site, tuple(sorted(awaited)), told.since, is_vain)

    def _is_stuck(
        self, size: int, members: Mapping[int, tuple[int, Membership]], others: set[int], running: Collection[int]
    ) -> bool:
        """True if no rank of a group can move on: all that run the cell wait, and some do not run it."""
        here = [told for rank, told in members.values() if rank in running]
        may_come = others & set(running) if len(members) < size else set()
        return len(here) < size and not may_come and all(told.is_in_call for told in here)


def where(site: str, number: int) -> str:
    """A call's site, for somebody who looks at a notebook.

    Args:
        site: File and line.
        number: Of the cell that ran.

    Example:
        >>> where("<cell 5>:3", 5), where("<cell 2>:3", 5), where("train.py:30", 5)
        ('cell line 3', 'line 3 of cell 2', 'train.py:30')
    """
    match = re.fullmatch(r"<cell (\d+)[^>]*>:(\d+)", site)
    if match is None:
        return site
    return f"cell line {match[2]}" if int(match[1]) == number else f"line {match[2]} of cell {match[1]}"
