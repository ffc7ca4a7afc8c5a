"""The watchdog: one thread per process that ends waits inside C++, during which Python cannot check anything.

gloo waits without limit and does not let signals through. The watchdog checks each wait four times a second, and at
once after Ctrl-C: if the wait cannot succeed, it breaks the connections, so that gloo returns with an error.
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
from typing import Protocol

_TICK = 0.25
_GRACE = 0.05
"""Seconds in which a wait may end by itself after Ctrl-C."""


class Watched(Protocol):
    """An object with waits that the watchdog monitors, such as a group's ``Monitor``.

    Attributes:
        waits: A counter that is odd while a thread waits in C++.
        was_interrupted: The flag that the watchdog sets at Ctrl-C.
        sync_signals: The function that waits until all signals that have come are known; ``Watchdog.add`` sets it.
    """

    waits: int
    was_interrupted: bool
    sync_signals: Callable[[], None]

    def interrupted(self, error: BaseException, wait: int) -> None:
        """End the wait of this number because of Ctrl-C."""

    def check_wait(self, wait: int) -> None:
        """End the wait of this number if it cannot succeed."""

    def publish(self) -> None:
        """Publish this rank's state for ranks of other hosts; called from time to time."""

    def post_exception(self, text: str) -> None:
        """Report to the others that this process ends with an exception."""


class Watchdog:
    """The monitor of all waits in C++ of this process.

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
        """Monitor the waits of one more group."""
        monitor.sync_signals = self.sync_signals
        known = [ref for ref in self._monitors if ref() not in (None, monitor)]
        self._monitors = [*known, weakref.ref(monitor)]  # a new list: the thread may be reading the old one

    def sync_signals(self) -> None:
        """Wait until all signals that have come are known to the monitors."""
        if threading.current_thread() is not self._thread:
            self._noticed.clear()
            with contextlib.suppress(OSError):
                self.wakeup.send(bytes(1))
            self._noticed.wait(_TICK)

    def monitors(self) -> list[Watched]:
        """Return the monitors that still exist."""
        return [monitor for ref in self._monitors if (monitor := ref())]

    def _run(self) -> None:
        while self._thread is not None:
            ready, _, _ = select.select([self._signals], [], [], _TICK)
            self._check_all(bool(ready))  # in its own frame, so that the sleeping thread keeps no group alive

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
        """End the thread: if it were in C++ when the interpreter ends, it would abort the process."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            with contextlib.suppress(OSError):
                self.wakeup.send(bytes(1))
            thread.join(2.0)

    def take_earlier_signals(self) -> None:
        """Handle the signals that came before a wait, so that they do not end it; only for the main thread."""
        if self._arrivals.poll(0):
            self.take_signals()

    def take_signals(self) -> bool:
        """Set ``was_interrupted`` on the monitors if Ctrl-C has come since the last look; return True if so."""
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = self._signals.recv(4096)
        if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        for monitor in self.monitors():
            monitor.was_interrupted = True
        return True


class signals_wake_watchdog:  # noqa: N801 - a context manager, read as a phrase
    """The context in which the watchdog receives signals; Python itself handles them only after a wait in C++.

    Unless something else had set a wakeup descriptor, the watchdog receives them afterwards, too: if Ctrl-C makes this
    process miss a call, it is not late for that call.
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
    """Stop a forked child from waking its parent's watchdog on the child's signals."""
    for known in _watchdogs.values():
        if (before := signal.set_wakeup_fd(-1)) not in (-1, known.wakeup.fileno()):
            signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_after_fork)
_watchdogs: dict[int, Watchdog] = {}


def watchdog() -> Watchdog:
    """Return the watchdog of this process, started at the first call; a forked child has its own."""
    found = _watchdogs.get(pid := os.getpid())
    if found is None:
        found = _watchdogs[pid] = Watchdog()
        if len(_watchdogs) == 1:
            _tell_of_exceptions()
    return found


def _tell_of_exceptions() -> None:
    """Install a hook that reports an exception that ends this process to the ranks that wait for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The others may end at once, and the launcher then ends this process: first print the traceback. But a hook of
        # somebody else may take its time, as a debugger does.
        prints = before is sys.__excepthook__
        if prints:
            before(kind, error, trace)
        if not hasattr(sys, "ps1"):  # an interactive session continues after the exception
            with contextlib.suppress(Exception):
                for monitor in watchdog().monitors():
                    monitor.post_exception(f"{kind.__name__}: {error}".rstrip(": "))
        if not prints:
            before(kind, error, trace)

    sys.excepthook = hook
