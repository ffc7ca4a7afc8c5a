"""One thread per process that ends waits inside C++, where Python cannot look around.

gloo waits without end and without letting signals through. The watchdog looks after each wait four times a second, and
at once after Ctrl-C: where the wait is in vain, it breaks the connections, so that gloo returns with an error.
It sleeps in ``select``; a call that ends in time costs it nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

_TICK = 0.25
_GRACE = 0.05
"""Seconds in which a wait may end by itself after Ctrl-C."""


class Watched(Protocol):
    """Whose waits the watchdog looks after; a group's ``Monitor`` is one.

    Attributes:
        waits: Odd while a thread waits in C++.
        was_interrupted: Set at Ctrl-C.
        sync_signals: Set when it is added; waits until all signals that have come are known.
    """

    waits: int
    was_interrupted: bool
    sync_signals: Callable[[], None]

    def interrupted(self, error: BaseException, wait: int) -> None:
        """End the wait of this number because of Ctrl-C."""

    def check_wait(self, wait: int) -> None:
        """End the wait of this number where it is in vain."""

    def publish(self) -> None:
        """Tell ranks of other hosts what they need to know; from time to time."""

    def post_exception(self, text: str) -> None:
        """Tell the others that this process ends with an exception."""


class Watchdog:
    """Looks after the waits of this process.

    Attributes:
        wakeup: The socket into which the interpreter writes the numbers of the signals that it gets.
    """

    def __init__(self) -> None:
        self._monitors: list[weakref.ref[Watched]] = []
        self._signals, self.wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self.wakeup.setblocking(False)
        self._arrivals = select.poll()
        self._arrivals.register(self._signals, select.POLLIN)
        self._noticed = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="easydist-watchdog", daemon=True
        )
        self._thread.start()
        atexit.register(self._stop)

    def add(self, monitor: Watched) -> None:
        """Look after the waits of one more group."""
        monitor.sync_signals = self.sync_signals
        known = [ref for ref in self._monitors if ref() not in (None, monitor)]
        self._monitors = [*known, weakref.ref(monitor)]  # never changed: the thread may be reading it

    def sync_signals(self) -> None:
        """Wait until all signals that have come are known to the monitors."""
        if threading.current_thread() is not self._thread:
            self._noticed.clear()
            with contextlib.suppress(OSError):
                self.wakeup.send(bytes(1))
            self._noticed.wait(_TICK)

    def monitors(self) -> list[Watched]:
        """All groups whose waits it looks after."""
        return [monitor for ref in self._monitors if (monitor := ref())]

    def _run(self) -> None:
        while self._thread is not None:
            ready, _, _ = select.select([self._signals], [], [], _TICK)
            self._check_all(bool(ready))  # in a frame of its own, which keeps no group alive while this one sleeps

    def _check_all(self, has_signals: bool) -> None:
        waits = {monitor: monitor.waits for monitor in self.monitors()}
        interrupted = has_signals and self.take_signals()
        self._noticed.set()
        if interrupted:
            select.select([], [], [], _GRACE)
        for monitor, number in waits.items():
            if interrupted and number % 2:
                monitor.interrupted(KeyboardInterrupt(), number)
                continue
            monitor.publish()
            if number % 2:
                monitor.check_wait(number)

    def _stop(self) -> None:
        """End the thread: one that is in C++ when the interpreter ends would abort the process."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            with contextlib.suppress(OSError):
                self.wakeup.send(bytes(1))
            thread.join(2.0)

    def take_earlier_signals(self) -> None:
        """Before a wait of the main thread, which alone may call this: those that have come belong to no wait."""
        if self._arrivals.poll(0):
            self.take_signals()

    def take_signals(self) -> bool:
        """Tell the monitors of Ctrl-C if it has come since the last look; True if it has."""
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = self._signals.recv(4096)
        if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        for monitor in self.monitors():
            monitor.was_interrupted = True
        return True


class signals_wake_watchdog:  # noqa: N801 - a context manager, read as a phrase
    """While this lasts, the watchdog hears of signals; they reach Python only after a wait in C++.

    Afterwards too, where nobody else wants to: a call that this process has missed by Ctrl-C is not one it is late for.
    """

    _before = -1

    def __enter__(self) -> bool:
        """Begin, in the main thread, which alone hears signals; elsewhere it is False, and nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            return False
        known = watchdog()
        mine = known.wakeup.fileno()
        if (before := signal.set_wakeup_fd(mine, warn_on_full_buffer=False)) != mine:
            self._before = before
        known.take_earlier_signals()
        return True

    def __exit__(self, *exc_info: object) -> None:
        if self._before >= 0:
            signal.set_wakeup_fd(self._before)


def _after_fork() -> None:
    """The signals of a child are not its parent's."""
    for known in _watchdogs.values():
        if (before := signal.set_wakeup_fd(-1)) not in (-1, known.wakeup.fileno()):
            signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_after_fork)
_watchdogs: dict[int, Watchdog] = {}


def watchdog() -> Watchdog:
    """The watchdog of this process, started at the first call; a forked child has its own."""
    found = _watchdogs.get(pid := os.getpid())
    if found is None:
        found = _watchdogs[pid] = Watchdog()
        if len(_watchdogs) == 1:
            _tell_of_exceptions()
    return found


def _tell_of_exceptions() -> None:
    """Have an exception that ends this process told to the ranks that wait for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if hasattr(sys, "ps1"):  # an interactive session goes on
            return before(kind, error, trace)
        with contextlib.suppress(Exception):
            for monitor in watchdog().monitors():
                monitor.post_exception(f"{kind.__name__}: {error}".rstrip(": "))
        return before(kind, error, trace)

    sys.excepthook = hook
