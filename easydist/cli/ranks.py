"""The ranks on this host, read from the pages of their processes without involving these, and a process's stacks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from easydist.liveness import stacks
from easydist.liveness.page import PageEntry, PeerPage

if TYPE_CHECKING:
    import psutil

_FAILED = "no stack: "
_NONE = f"{_FAILED}pip install py-spy, or start the job with {stacks.VARIABLE}=SIGUSR2"
_SECONDS = 10.0
"""The time limit of a request for stacks."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of one group.

    Attributes:
        entry: The entry on the page of its process.
        pid: The pid of its process.
        parent: The process that started it, usually the launcher.
        command: Its command line.
        cpu: Percent of one core since the previous look; 0 at the first.
        memory: Resident bytes.
        status: The state of the process, as psutil names it: ``"running"``, ``"sleeping"``, ``"stopped"``, …
        seconds: The time since it entered its call, or left the last one.
        host: The address of its host; empty if that is this one.
    """

    entry: PageEntry
    pid: int
    parent: int
    command: str
    cpu: float
    memory: int
    status: str
    seconds: float
    host: str = ""

    def at(self, host: str) -> Rank:
        """Return the same rank, labelled with its host."""
        return replace(self, host=host)

    @property
    def process(self) -> tuple[str, int]:
        """A key of its process."""
        return self.host, self.pid

    @property
    def group(self) -> tuple[str, str, int]:
        """A key of the group, distinct from groups of the same name in other jobs."""
        told = self.entry
        return told.meeting or f"{self.parent} {self.host}", told.group, told.size


class LocalRanks:
    """The ranks of the user's processes on this host.

    Args:
        job: The pid of a rank or of a process that has started ranks, such as a launcher, or a part of the ranks'
            command line. The groups of their jobs are included, as far as they share ranks. None: all processes.

    Example:
        >>> LocalRanks(0).look()  # no process
        []
    """

    silent: Sequence[str] = ()
    """Hosts that did not answer: this one always does."""

    def __init__(self, job: int | str | None = None) -> None:
        self._job = job
        self._processes: dict[int, psutil.Process] = {}

    def look(self) -> list[list[Rank]]:
        """Return the ranks of each group, in ascending order. CPU percentages are those since the previous look."""
        rows = grouped(self._found())
        return rows if self._job is None else self._of_job(rows)

    def stack(self, rank: Rank) -> str:
        """Return the stacks of a rank's threads, or the reason why there are none."""
        return stack_of(rank.pid)

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def _of_job(self, groups: list[list[Rank]]) -> list[list[Rank]]:
        """Return the groups of the selected processes, and those that share ranks with them."""
        asked = {rank.pid for ranks in groups for rank in ranks if self._is_asked(rank)}
        found = [job for job in jobs(groups) if any(rank.pid in asked for ranks in job for rank in ranks)]
        return [ranks for job in found for ranks in job]

    def _found(self) -> list[Rank]:
        import psutil

        own = {pid: process for pid in psutil.pids() if (process := self._process(pid)) is not None}
        self._processes = own
        found: list[Rank] = []
        for process in own.values():
            with contextlib.suppress(psutil.Error):  # it has ended
                found += _ranks_of(process)
        return found

    def _process(self, pid: int) -> psutil.Process | None:
        """Return the process if it belongs to this user, as the same object each time, which measures the CPU."""
        import psutil

        with contextlib.suppress(psutil.Error):
            process = self._processes.get(pid) or psutil.Process(pid)
            return process if process.is_running() and process.uids().real == os.getuid() else None
        return None

    def _is_asked(self, rank: Rank) -> bool:
        import psutil

        if isinstance(self._job, str):
            return self._job in rank.command
        with contextlib.suppress(psutil.Error):
            return self._job in (rank.pid, *(parent.pid for parent in psutil.Process(rank.pid).parents()))
        return False


def grouped(found: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks of each group, in ascending order."""
    groups: defaultdict[tuple[str, str, int], list[Rank]] = defaultdict(list)
    for rank in found:
        groups[rank.group].append(rank)
    return [sorted(ranks, key=lambda rank: rank.entry.rank) for _, ranks in sorted(groups.items())]


def _ranks_of(process: psutil.Process) -> list[Rank]:
    if (page := PeerPage.find(process.pid)) is None:
        return []
    now = time.monotonic()
    with process.oneshot():
        command = " ".join(process.cmdline())
        parent, memory, status = process.ppid(), process.memory_info().rss, process.status()
    cpu = process.cpu_percent()
    return [
        Rank(told, process.pid, parent, command, cpu, memory, status, max(0.0, now - told.since))
        for told in page.entries()
    ]


def jobs(groups: Iterable[list[Rank]]) -> list[list[list[Rank]]]:
    """Return the groups of each job: those that share processes with each other."""
    found: list[tuple[set[tuple[str, int]], list[list[Rank]]]] = []
    for ranks in groups:
        processes = {rank.process for rank in ranks}
        same = [job for job in found if job[0] & processes]
        found = [job for job in found if job not in same]
        found.append(
            (processes.union(*(job[0] for job in same)), [*(group for job in same for group in job[1]), ranks])
        )
    return [job for _, job in found]


def awaited(ranks: Iterable[Rank]) -> dict[int, list[int]]:
    """Return the ranks for which each rank of a group waits, by rank; an empty list for one that waits for none.

    A rank waits for the visible ranks that have not begun its call, and for the ranks that are not visible.

    Args:
        ranks: The visible ranks of the group.
    """
    known = {rank.entry.rank: rank.entry for rank in ranks}
    return {rank: awaited_by(told, known) for rank, told in known.items()}


def awaited_by(told: PageEntry, known: Mapping[int, PageEntry]) -> list[int]:
    """Return the ranks for which one rank of a group waits.

    Args:
        told: The rank.
        known: The visible ranks, by their number in the group.
    """
    if not told.is_in_call:
        return []
    if told.peer is not None:
        peer = known.get(told.peer)
        return [] if peer is not None and peer.is_in_call and peer.peer == told.rank else [told.peer]
    return [rank for rank in range(told.size) if rank not in known or known[rank].number < told.number]


def as_json(groups: Iterable[list[Rank]]) -> list[dict[str, Any]]:
    """Return groups as values for JSON."""
    return [_group_as_json(ranks) for ranks in groups]


def _group_as_json(ranks: list[Rank]) -> dict[str, Any]:
    told, waits = ranks[0].entry, awaited(ranks)
    rows = [_rank_as_json(rank, waits[rank.entry.rank]) for rank in ranks]
    return {"group": told.group, "meeting": told.meeting, "size": told.size, "ranks": rows}


def _rank_as_json(rank: Rank, waits_for: list[int]) -> dict[str, Any]:
    told = rank.entry
    operation, call, site = placed(told.place)
    return {
        "rank": told.rank,
        "pid": rank.pid,
        **({"host": rank.host} if rank.host else {}),
        "parent": rank.parent,
        "command": rank.command,
        "cpu": rank.cpu,
        "memory": rank.memory,
        "status": rank.status,
        "is_in_call": told.is_in_call,
        "operation": operation,
        "call": call,
        "site": site,
        "waits_for": waits_for,
        "seconds": round(rank.seconds, 3),
    }


def placed(place: str) -> tuple[str, int, str]:
    """Return operation, call number and site of a place.

    Example:
        >>> placed("gather, call 3, at train.py:30")
        ('gather', 3, 'train.py:30')
        >>> placed("")
        ('', 0, '')
    """
    what, _, site = place.partition(", at ")
    operation, _, number = what.partition(", call ")
    return operation, int(number) if number.isdecimal() else 0, site


def stack_of(pid: int) -> str:
    """Return the stacks of a process's threads, or the reason why there are none.

    py-spy stops the process for some milliseconds, if the system allows this user to trace it. Otherwise the process
    gets a signal, if it handles that one (``easydist.liveness.stacks``).

    Args:
        pid: The process.

    Source: https://github.com/benfred/py-spy
    """
    told = _by_spy(pid)
    if told.startswith(_FAILED) and (page := PeerPage.find(pid)) is not None and (agreed := page.stacks()) is not None:
        return stacks.ask(pid, *agreed, _SECONDS) or told
    return told


def _by_spy(pid: int) -> str:
    folder = os.path.dirname(sys.executable)  # the environment may not be activated
    spy = shutil.which("py-spy", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if spy is None:
        return _NONE
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{_FAILED}py-spy did not answer within {_SECONDS:.0f} s"
    return done.stdout if done.returncode == 0 else f"{_FAILED}{done.stderr.strip()}"
