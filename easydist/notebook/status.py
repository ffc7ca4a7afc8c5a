"""The state of a cluster's ranks: a table, as text and as HTML."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from easydist.base import html

_COLUMNS = ("rank", "pid", "state", "operation", "at", "waits for", "for", "memory")
_TEXTS = ("state", "operation", "at", "waits for")


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
    from easydist.notebook.waits import Pages, where

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
