"""One thread per process that ends waits inside C++, where Python cannot look around.

gloo waits without end and without letting signals through. The sentry looks after each wait four times a second, and
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
from types import TracebackType
from typing import Any

from easydist.comms.watch import Watch

_TICK = 0.25
_GRACE = 0.05
"""Seconds in which a wait may end by itself after Ctrl-C."""


class Sentry:
    """Looks after the waits of this process.

    Attributes:
        wakeup: The socket into which the interpreter writes the numbers of the signals that it gets.
    """

    def __init__(self) -> None:
        self._watches: list[weakref.ref[Watch]] = []
        self._signals, self.wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self.wakeup.setblocking(False)
        self._noticed = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="easydist-sentry", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def add(self, watch: Watch) -> None:
        """Look after the waits of one more group."""
        watch.notice = self.notice
        known = [ref for ref in self._watches if ref() not in (None, watch)]
        self._watches = [*known, weakref.ref(watch)]  # never changed: the thread may be reading it

    def notice(self) -> None:
        """Wait until all signals that have come are known to the watches."""
        if threading.current_thread() is not self._thread:
            self._noticed.clear()
            with contextlib.suppress(OSError):
                self.wakeup.send(bytes(1))
            self._noticed.wait(_TICK)

    def watches(self) -> list[Watch]:
        """All groups whose waits it looks after."""
        return [watch for ref in self._watches if (watch := ref())]

    def _run(self) -> None:
        while self._thread is not None:
            ready, _, _ = select.select([self._signals], [], [], _TICK)
            self._look_at_all(bool(ready))  # in a frame of its own, which keeps no group alive while this one sleeps

    def _look_at_all(self, has_signals: bool) -> None:
        waits = {watch: watch.waits for watch in self.watches()}
        interrupted = has_signals and self.take_signals()
        self._noticed.set()
        if interrupted:
            select.select([], [], [], _GRACE)
        for watch, number in waits.items():
            if interrupted and number % 2:
                watch.interrupted(KeyboardInterrupt(), number)
                continue
            watch.publish()
            if number % 2:
                watch.look(number)

    def _stop(self) -> None:
        """End the thread: one that is in C++ when the interpreter ends would abort the process."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            with contextlib.suppress(OSError):
                self.wakeup.send(bytes(1))
            thread.join(2.0)

    def take_signals(self) -> bool:
        """Let the watches know of Ctrl-C, where it has come since this was done last; whether it has."""
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = self._signals.recv(4096)
        if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        for watch in self.watches():
            watch.was_interrupted = True
        return True


class signals_wake_sentry:  # noqa: N801 - a context manager, read as a phrase
    """While this lasts, the sentry hears of signals; they reach Python only after a wait in C++.

    Afterwards too, where nobody else wants to: a call that this process has missed by Ctrl-C is not one it is late for.
    """

    def __init__(self) -> None:
        self._before = -1

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(sentry().wakeup.fileno(), warn_on_full_buffer=False)
            sentry().take_signals()  # those from before

    def __exit__(self, *exc_info: object) -> None:
        if self._before >= 0:
            signal.set_wakeup_fd(self._before)


def _after_fork() -> None:
    """The signals of a child are not its parent's."""
    for known in _sentries.values():
        if (before := signal.set_wakeup_fd(-1)) not in (-1, known.wakeup.fileno()):
            signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_after_fork)
_sentries: dict[int, Sentry] = {}


def sentry() -> Sentry:
    """The sentry of this process, started at the first call; a forked child has its own."""
    found = _sentries.get(pid := os.getpid())
    if found is None:
        found = _sentries[pid] = Sentry()
        if len(_sentries) == 1:
            _tell_of_exceptions()
    return found


def _tell_of_exceptions() -> None:
    """Have an exception that ends this process told to the ranks that wait for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if hasattr(sys, "ps1"):  # an interactive session goes on
            return before(kind, error, trace)
        with contextlib.suppress(Exception):
            for watch in sentry().watches():
                watch.say({"kind": "exception", "text": f"{kind.__name__}: {error}".rstrip(": ")})
        return before(kind, error, trace)

    sys.excepthook = hook
