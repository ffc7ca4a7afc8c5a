"""Messages under way, as handles: waited for any number of times, or dropped."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from easydist.agreement.calling import calling
from easydist.groups.communicators import Communicators
from easydist.liveness.monitor import Monitor
from easydist.transport.work import TorchWork

_POLL = 0.05
_FOREVER = timedelta(days=365)
_LARGE = 1 << 18
"""Bytes from which a message whose sender dies keeps gloo waiting, whatever is broken."""


class Part:
    """One message, and the memory that it needs until its end.

    Args:
        work: From a backend without a monitor, since any thread may wait for it.
        memory: What is sent, or where it arrives.
    """

    __slots__ = ("memory", "work")

    def __init__(self, work: TorchWork, memory: torch.Tensor) -> None:
        self.work, self.memory = work, memory

    def wait(self) -> None:
        """Wait for its end, with nobody looking after the wait."""
        if self.memory.is_cpu:
            self.work.within(_FOREVER).wait()
        else:
            self.work.wait()

    def wait_watched(self, monitor: Monitor, peer: int) -> None:
        """Wait for its end in a call, whose watchdog ends the wait if it is in vain."""
        monitor.begin_wait()
        try:
            self.wait()
        except RuntimeError as error:
            raise monitor.explain(error, peer) from error
        finally:
            monitor.end_wait()
        monitor.raise_if_broken()


class _Parts:
    """The parts of a transfer, which outlive a handle that is dropped.

    Attributes:
        ended: Set when nothing is under way any more.
        error: What ended it.
        is_aside: True if a thread of its own waits for it.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self.is_large = any(part.memory.is_cpu and part.memory.nbytes >= _LARGE for part in parts)
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.is_aside = False
        if not parts:
            self.ended.set()

    def drain(self, wait: Callable[[Part], None]) -> None:
        """Wait for all parts, and let go of each as it ends."""
        try:
            while self._parts:
                wait(self._parts[0])
                del self._parts[0]
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._parts.clear()
            self.ended.set()


class Transfer:
    """A message under way, with ``wait`` and ``is_completed``.

    A handle that is dropped keeps nothing: the message goes its way, and its memory is free once it has arrived.
    """

    def __init__(
        self,
        comms: Communicators,
        operation: str,
        peer: int,
        parts: Sequence[Part],
        check: Callable[[], None] | None = None,
    ) -> None:
        self._comms, self._operation, self._peer = comms, operation, peer
        self._parts, self._check = _Parts(parts), check
        self._error: BaseException | None = None
        self._is_done = False
        self._abandon = weakref.finalize(self, _aside, self._parts, (id(comms), peer, bool(check)))
        self._abandon.atexit = False

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to wait for."""
        return self._parts.ended.is_set() and self._check is None

    def is_completed(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        if not (self._is_done or self._parts.is_aside):  # gloo tells of an end only those who wait for it
            self._abandon()
        return self._is_done or self._parts.ended.is_set()

    def wait(self) -> None:
        """Block until the message has arrived; a second time it returns, or raises, the same at once.

        Raises:
            RemoteError: The receiver could not take it.
            DisagreementError: The two ranks meant different messages.
            EasydistError: The other rank is lost, or the time is over.
        """
        if self._is_done:
            if self._error is not None:
                raise self._error
            return
        if self.is_empty:
            self._is_done = True
            return
        with calling(self._comms, self._operation, None, self._peer):
            self.wait_inside()

    def wait_inside(self) -> None:
        """The same, inside of a call."""
        try:
            self._drain()
            if self._check is not None:
                self._check()
        except BaseException as error:  # also of an interrupted wait, after which the answer is not there
            self._error, self._is_done = error, True
            raise
        finally:
            self._abandon.detach()
        self._is_done, self._check = True, None

    def _drain(self) -> None:
        parts, monitor = self._parts, self._comms.monitor
        if parts.is_large:
            self._abandon()
        if not parts.is_aside:
            parts.drain(lambda part: part.wait_watched(monitor, self._peer))
            return
        while not parts.ended.wait(_POLL):
            monitor.guard([self._peer])
        if isinstance(parts.error, RuntimeError):
            raise monitor.explain(parts.error, self._peer) from parts.error


_Line = tuple[int, int, bool]
"""Transfers between two ranks in one direction: they end in the order in which they were posted."""

_lines: dict[_Line, queue.SimpleQueue[_Parts | None]] = {}


def _aside(parts: _Parts, line: _Line) -> None:
    """Let a thread wait for what nobody waits for here."""
    if parts.ended.is_set() or parts.is_aside:
        return
    parts.is_aside = True
    if line not in _lines:
        _lines[line] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(_lines[line],), name="easydist-transfers", daemon=True).start()
    _lines[line].put(parts)


def end_lines(comms: Communicators) -> None:
    """Let the threads of a group end that is taken down, once nothing is under way."""
    for line in [line for line in _lines if line[0] == id(comms)]:
        _lines.pop(line).put(None)


def _work(waiting: queue.SimpleQueue[_Parts | None]) -> None:
    while (parts := waiting.get()) is not None:
        with contextlib.suppress(Exception):  # kept for whoever still asks
            parts.drain(Part.wait)
        del parts


os.register_at_fork(after_in_child=_lines.clear)
