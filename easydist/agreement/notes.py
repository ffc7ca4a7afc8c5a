"""What is noted of every call while somebody traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from easydist.groups.communicators import Communicators


class Notes:
    """What is noted of a call while somebody listens, told when the call ends. Times are ``time.time_ns``.

    Attributes:
        operation: The verb's name.
        site: The caller's file and line.
        group: The group's name.
        rank: This process in the group.
        size: How many processes the group has.
        peer: The only other rank that takes part; None: all do.
        number: Counts the calls of the group.
        start: When the call began.
        end: When it ended.
        came: When each rank's header was ready, by its own clock, in the first agreement of the call; empty where there
            was none.
        nbytes: Of this rank's leaves, or of its payload; None where it has neither, or that is not known.
        error: The type of what the call raised.
    """

    __slots__ = (
        "_around",
        "came",
        "end",
        "error",
        "group",
        "nbytes",
        "number",
        "operation",
        "peer",
        "rank",
        "site",
        "size",
        "start",
    )

    def __init__(self, comms: Communicators, operation: str, peer: int | None, site: str) -> None:
        self.start = time.time_ns()
        self.operation, self.site, self.peer = operation, site, peer
        self.group, self.rank, self.size = comms.name, comms.rank, comms.size
        self.came: list[int] = []
        self.nbytes: int | None = None
        self._around, _open.notes = _open.notes, self

    def tell(self, comms: Communicators, error: BaseException | None) -> None:
        """Tell all who listen that the call has ended."""
        self.end, self.number = time.time_ns(), comms.monitor.number
        self.error = None if error is None else type(error).__name__
        _open.notes, self._around = self._around, None
        for listener in (*listeners,):  # another thread may be ending its trace
            listener(self)


class _Open(threading.local):
    """The notes of the innermost call of this thread."""

    notes: Notes | None = None


_open = _Open()
listeners: list[Callable[[Notes], None]] = []
"""Who hears of every call when it ends; empty, unless somebody traces."""


def note_data(nbytes: int | None) -> None:
    """Note how much this rank has, in the first agreement of the innermost call that knows."""
    notes = _open.notes
    if notes is not None and notes.nbytes is None:
        notes.nbytes = nbytes


def note_arrivals(came: list[int]) -> None:
    """Note when the ranks came, in the first agreement of the innermost call."""
    notes = _open.notes
    if notes is not None and not notes.came:
        notes.came = came
