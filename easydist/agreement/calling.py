"""The frame of a verb's call: its number, its site and its clock."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import numpy as np

from easydist.agreement.notes import Notes, listeners
from easydist.base.arguments import integer
from easydist.base.torch_private import backward_id
from easydist.base.wording import counted
from easydist.errors import OverlappingCallError
from easydist.groups.communicators import Communicators
from easydist.liveness.monitor import again
from easydist.typing import Timeout

_NO_SIGNALS: contextlib.AbstractContextManager[bool | None] = contextlib.nullcontext()
_CALL = "call"
R = TypeVar("R")


class calling:  # noqa: N801 - a context manager, read as a phrase
    """The context of one call of a verb, in which the group's monitor knows the call and its time limit.

    Args:
        comms: The group, which the context manager returns.
        operation: The verb's name.
        timeout: The time limit of the call; None is the group's.
        peer: The only other rank that takes part; None if all ranks do.
        site: The file and line of the call; None for those of the caller.
        name: The argument that holds the peer.

    Raises:
        TypeError: ``timeout`` is neither a number of seconds nor a timedelta, or the peer is no integer.
        ValueError: ``timeout`` is not positive, or the peer is not another rank of the group.
        OverlappingCallError: Another call of this process is under way in the group, in another thread or below it. But
            calls that autograd makes in several threads of one backward pass wait for one another.

    Attributes:
        thread: The thread that makes the call.
    """

    __slots__ = (
        "_comms",
        "_given",
        "_name",
        "_notes",
        "_operation",
        "_peer",
        "_signals",
        "_site",
        "_timeout",
        "_turn",
        "thread",
    )
    _is_call = _is_turn = True

    def __init__(
        self,
        comms: Communicators,
        operation: str,
        timeout: Timeout | None = None,
        peer: int | None = None,
        site: str | None = None,
        name: str = "peer",
    ) -> None:
        self._comms, self._operation, self._peer, self._name, self._given = comms, operation, peer, name, site
        self._timeout = None if timeout is None else seconds(timeout, operation)
        self._signals, self.thread, self._turn = _NO_SIGNALS, threading.get_ident(), False

    def __enter__(self) -> Communicators:
        comms = self._comms
        self._site = self._given or (site() if comms.size > 1 or listeners else "")
        self._notes = Notes(comms, self._operation, self._peer, self._site) if listeners else None
        try:
            if self._peer is not None:
                self._peer = self._other_rank(self._peer)
            if comms.size > 1:
                self._begin(comms)
        except BaseException as error:  # Python does not call __exit__ if __enter__ has raised
            if comms.under_way.get(_CALL) is self:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            if self._turn:
                comms.turns.release()
            if self._notes is not None:
                self._notes.tell(comms, error)
            raise
        return comms

    def _other_rank(self, peer: int) -> int:
        """Return the peer as the integer that reports take, which are JSON."""
        peer = integer(f"{self._operation}: {self._name}", peer, "a rank")
        if not 0 <= peer < self._comms.size or peer == self._comms.rank:
            raise ValueError(
                f"{self._operation}: {self._name}={peer} is not another rank of the group, which has "
                f"{counted(self._comms.size)}; this is rank {self._comms.rank}"
            )
        return peer

    def _begin(self, comms: Communicators) -> None:
        comms.demand_own_process()
        if comms.left is not None:  # the others have left the body that this call is in, and would take it for another
            raise again(comms.left[1])
        # Autograd has a thread for each device: calls of one backward pass take turns instead of raising.
        self._turn = backward_id() >= 0 and comms.turns.acquire()
        other = comms.under_way.setdefault(_CALL, self)  # atomic between threads, and for an interrupt
        if other is not self:
            raise OverlappingCallError(self._two_at_once(other))
        # In a call of its own, before this one is numbered: some ranks may only read ``process_group``.
        if comms.founding is not None:
            self._timeout = comms.found(self._operation, self._site, self._timeout)
        if not self._is_call:
            return
        if (untold := comms.monitor.untold) is not None:  # the call before has not ended
            self._tell_of(untold)
            comms.monitor.end(False)
        comms.monitor.begin(self._operation, self._site, self._timeout, self._peer, self._is_turn)
        self._signals = comms.hears_signals(self._peer is not None)
        self._signals.__enter__()
        if comms.monitor.broken is not None or not comms.has_met:
            comms.make_ready()

    def _two_at_once(self, other: calling) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [
            f"{self._operation}: another call of the group is under way in this process",
            f"  {names.get(other.thread)}: {other._operation} at {other._site}",
            f"  {names.get(self.thread)}: {self._operation} at {self._site}",
            "All ranks make the calls of a group in the same order, so calls cannot overlap. Give each thread a "
            "group of its own (torch.distributed.new_group, passed as group=), and make no calls in a signal handler.",
        ]
        return "\n".join(lines)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._comms.size > 1:
            try:
                self._end(kind, error, trace)
            finally:
                # Even if an interrupt strikes in ``_end``: else no further call could begin.
                self._comms.under_way.pop(_CALL, None)
                if self._turn:
                    self._comms.turns.release()
        if self._notes is not None:
            self._notes.tell(self._comms, error)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                self._tell_of(error)
        finally:  # also if a second Ctrl-C came meanwhile
            self._signals.__exit__(kind, error, trace)
            # Before the error reaches the caller: nothing may write to its tensors after that.
            if self._comms.monitor.broken is not None:
                self._comms.stop()
            if self._comms.monitor.untold is None:
                self._comms.monitor.end(error is None or self._has_sent_all(error))

    def _has_sent_all(self, error: BaseException) -> bool:
        """True if no other rank waits for data of this one, although its call ends with an error."""
        monitor = self._comms.monitor
        is_past_exchange = not (monitor.is_awaited or monitor.is_fresh or monitor.broken)
        return is_past_exchange or getattr(error, "raised_in", None) is self._comms.mark

    def _tell_of(self, error: BaseException) -> None:
        """Report an error that ended the call on this rank alone to the others, if they may still wait for it."""
        monitor = self._comms.monitor
        if monitor.tells_of(isinstance(error, Exception), getattr(error, "raised_in", None) is self._comms.mark):
            monitor.untold = error  # until it is told, which may fail, too, where the stack is full
            monitor.ended_by(error)
            monitor.untold = None


class waiting(calling):  # noqa: N801 - as above
    """The context of a wait for a message that was begun before. The other rank makes no call for it."""

    __slots__ = ()
    _is_turn = False


class founding(calling):  # noqa: N801 - a context manager, read as a phrase
    """The context in which a group exists: its ranks make it now if they have not made it yet. It is no call."""

    __slots__ = ()
    _is_call = False

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing: ``found`` has ended its own call."""


def seconds(timeout: Timeout, operation: str) -> float:
    """Return a timeout in seconds.

    Raises:
        TypeError: It is neither a number of seconds nor a timedelta.
        ValueError: It is not positive.
    """
    value = in_seconds(timeout, operation)
    if not value > 0:
        raise ValueError(f"{operation}: timeout={timeout!r} is not positive")
    return value


def in_seconds(timeout: Timeout, operation: str) -> float:
    """Return a timeout of any sign in seconds.

    Raises:
        TypeError: It is neither a number of seconds nor a timedelta. NumPy's durations have units of their own.
    """
    value: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool | np.timedelta64) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{operation}: timeout= takes seconds or a datetime.timedelta, got {timeout!r}")
    return float(value)


def site() -> str:
    """Return the file and line of the first caller outside of easydist and the folders that count as inside."""
    if (given := _given.get()) is not None:
        return given
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_inside):
        frame = frame.f_back
    return _site_text(frame.f_code.co_filename, frame.f_lineno)


async def in_thread(function: Callable[[], R]) -> R:
    """Call a function in a thread, as ``asyncio.to_thread`` does.

    The site of its calls is the line that awaits; in a task of its own, the line that runs the event loop.
    """
    context = contextvars.copy_context()
    context.run(_given.set, site())
    return await asyncio.get_running_loop().run_in_executor(None, context.run, function)


_given: contextvars.ContextVar[str | None] = contextvars.ContextVar("site", default=None)
"""The site of calls in a thread whose stack does not show it."""

_inside: tuple[str, ...] = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(asyncio.__file__) + os.sep,
    contextlib.__file__,
    logging.__file__,
)


def as_inside(folder: str, counts: bool) -> None:
    """Add or remove a folder that counts as inside: the site of a call is the line that called into such files."""
    global _inside
    _inside = tuple(path for path in _inside if path != folder) + ((folder,) if counts else ())


@functools.lru_cache(maxsize=1024)
def _site_text(path: str, line: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(path)
        path = path if relative.startswith("..") else relative
    return f"{path}:{line}"
