"""The notes about each call while a trace is running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from easydist.groups.communicators import Communicators


class Notes:
    """The notes about one call, which listeners get when the call ends. Times are ``time.time_ns``.

    Attributes:
        operation: The verb's name.
        site: The caller's file and line.
        group: The group's name.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        peer: The only other rank that takes part; None if all ranks do.
        number: The number of the call in the group.
        start: The time when the call began.
        end: The time when it ended.
        came: The time when each rank's header was ready, by that rank's clock, in the first agreement of the call;
            empty if there was none.
        nbytes: The bytes of this rank's leaves, or of its payload; None if it has neither, or they are not known.
        error: The name of the exception type that the call raised; None if it raised none.
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
        """Pass the notes to all listeners at the end of the call."""
        self.end, self.number = time.time_ns(), comms.monitor.number
        self.error = None if error is None else type(error).__name__
        _open.notes, self._around = self._around, None
        for listener in (*listeners,):  # a copy, because another thread may be ending its trace
            listener(self)


class _OpenNotes(threading.local):
    """The notes of the innermost call of this thread."""

    notes: Notes | None = None


_open = _OpenNotes()
listeners: list[Callable[[Notes], None]] = []
"""The functions that get the notes of every call; empty unless a trace is running."""


def note_data(nbytes: int | None) -> None:
    """Note the bytes of this rank's data in the innermost call; the first known number stays."""
    notes = _open.notes
    if notes is not None and notes.nbytes is None:
        notes.nbytes = nbytes


def note_arrivals(came: list[int]) -> None:
    """Note when the ranks came in the first agreement of the innermost call."""
    notes = _open.notes
    if notes is not None and not notes.came:
        notes.came = came
