"""One call of a verb: what the watch has to know of it, and what is noted of it for whoever traces."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from easydist.comms import Communicators
from easydist.typing import Timeout

_NO_SIGNALS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class calling:  # noqa: N801 - a context manager, read as a phrase
    """One call of a verb: while it lasts, the group's watch knows which it is, and when its time is over.

    Args:
        comms: The group; what the context manager gives.
        operation: The verb's name.
        timeout: How long the call may take; None is the group's.
        peer: The only other rank that takes part; None: all do.
    """

    __slots__ = ("_comms", "_notes", "_operation", "_peer", "_signals", "_timeout")

    def __init__(
        self, comms: Communicators, operation: str, timeout: Timeout | None = None, peer: int | None = None
    ) -> None:
        self._comms, self._operation, self._peer = comms, operation, peer
        self._timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if self._timeout is not None and self._timeout <= 0:
            raise ValueError(f"{operation}: timeout={timeout!r} leaves no time")

    def __enter__(self) -> Communicators:
        comms = self._comms
        site = _site() if comms.size > 1 or listeners else ""
        self._notes = Notes(comms, self._operation, self._peer, site) if listeners else None
        if comms.size > 1:
            comms.demand_own_process()
            self._signals = _NO_SIGNALS
            try:
                comms.watch.begin(self._operation, site, self._timeout, self._peer)
                self._signals = comms.hears_signals(self._peer is not None)
                self._signals.__enter__()
                if comms.watch.broken is not None or not comms.has_met:
                    comms.make_ready()
            except BaseException as error:  # Python does not call __exit__ where __enter__ has raised
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return comms

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._comms.size > 1:
            self._tell_of(error)
            self._signals.__exit__(kind, error, trace)
            if self._comms.watch.broken is not None:
                self._comms.stop()
            self._comms.watch.end(error is None or getattr(error, "raised_in", None) is self._comms)
        if self._notes is not None:
            self._notes.tell(self._comms, error)

    def _tell_of(self, error: BaseException | None) -> None:
        """Tell the others of what ended the call on this rank alone, if they may still wait for it."""
        watch = self._comms.watch
        if error is None or getattr(error, "raised_in", None) is self._comms:
            return
        if watch.is_awaited or not isinstance(error, Exception):
            watch.ended_by(error)


def _site() -> str:
    """File and line of the caller outside of easydist."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return _site_text(frame.f_code.co_filename, frame.f_lineno)


_INSIDE = (os.path.dirname(__file__) + os.sep, contextlib.__file__)


@functools.lru_cache(maxsize=1024)
def _site_text(path: str, line: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(path)
        path = path if relative.startswith("..") else relative
    return f"{path}:{line}"


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
        self.end, self.number = time.time_ns(), comms.watch.number
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
