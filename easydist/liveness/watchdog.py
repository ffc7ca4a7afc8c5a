"""The watchdog: one thread per process that ends waits inside C++, during which Python cannot check anything.

gloo waits without limit and does not let signals through. The watchdog checks each wait four times a second, and at
once after Ctrl-C: if the wait cannot succeed, it breaks the connections, so that gloo returns with an error.
It sleeps in ``poll``, which takes descriptors of any number; a call that ends in time costs it nothing. A check that
fails itself, for want of a descriptor or because of a value in the store that means nothing, ends the wait, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar

_TICK = 0.25
_GRACE = 0.05
"""Seconds in which a wait may end by itself after Ctrl-C."""


F = TypeVar("F", bound=Callable[..., Any])


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

    def failed(self, error: Exception, wait: int) -> None:
        """End the wait of this number because of an error in checking it."""

    def publish(self) -> None:
        """Publish this rank's state for ranks of other hosts; called from time to time."""

    def post_exception(self, text: str) -> None:
        """Report to the others that this process ends with an exception."""


class Watchdog:
    """The monitor of all waits in C++ of this process.

    Attributes:
        wakeup_fd: The descriptor into which the interpreter writes the numbers of the signals that it gets.
        arrivals: Polls for such numbers.
    """

    def __init__(self) -> None:
        self._monitors: list[weakref.ref[Watched]] = []
        self._looks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._signals, self._wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        self.wakeup_fd = self._wakeup.fileno()
        self.arrivals = select.poll()
        self.arrivals.register(self._signals, select.POLLIN)
        self._noticed = threading.Event()
        self._due = 0.0
        self._replaced = -1  # the descriptor of another library, such as asyncio, in place of which ours hears signals
        self._lock = threading.RLock()  # held while signals are taken, or a group is added
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="easydist-watchdog", daemon=True
        )
        self._thread.start()
        atexit.register(self._stop)

    def add(self, monitor: Watched) -> None:
        """Monitor the waits of one more group."""
        monitor.sync_signals = self.sync_signals
        with self._lock:
            known = [ref for ref in self._monitors if ref() not in (None, monitor)]
            self._monitors = [*known, weakref.ref(monitor)]  # a new list: the thread may be reading the old one

    def look_regularly(self, look: Callable[[], None]) -> None:
        """Call a method four times a second for as long as its object exists; its errors are ignored."""
        with self._lock:
            self._looks = [*(ref for ref in self._looks if ref() is not None), weakref.WeakMethod(look)]

    def sync_signals(self) -> None:
        """Wait until all signals that have come are known to the monitors."""
        if threading.current_thread() is not self._thread:
            self._noticed.clear()
            with contextlib.suppress(OSError):
                self._wakeup.send(bytes(1))
            self._noticed.wait(_TICK)

    def monitors(self) -> list[Watched]:
        """Return the monitors that still exist."""
        return [monitor for ref in self._monitors if (monitor := ref())]

    def _run(self) -> None:
        arrivals = select.poll()  # its own: a poll object serves one thread at a time
        arrivals.register(self._signals, select.POLLIN)
        while self._thread is not None:
            ready = arrivals.poll(1000 * max(0.0, self._due - time.monotonic()))
            self._check_all(bool(ready))  # in its own frame, so that the sleeping thread keeps no group alive

    def _check_all(self, has_signals: bool) -> None:
        # Before any check: a wait that ends during the checks has another number by then, and is left alone.
        waits = {monitor: monitor.waits for monitor in self.monitors()}
        interrupted = has_signals and self.take_signals()
        self._noticed.set()
        if interrupted:
            time.sleep(_GRACE)
        elif time.monotonic() < self._due:  # other signals end no wait: a profiler may send a thousand a second
            return
        self._due = time.monotonic() + _TICK
        for monitor, number in waits.items():
            try:
                self._check(monitor, number, interrupted)
            except Exception as error:  # whatever it is, this thread lives on: all waits of the process depend on it
                if number % 2:
                    with contextlib.suppress(Exception):
                        monitor.failed(error, number)
        for ref in self._looks:
            with contextlib.suppress(Exception):
                if (look := ref()) is not None:
                    look()

    def _check(self, monitor: Watched, number: int, interrupted: bool) -> None:
        if interrupted and number % 2:
            monitor.interrupted(KeyboardInterrupt(), number)
            return
        monitor.publish()
        if number % 2:
            monitor.check_wait(number)

    def _stop(self) -> None:
        """End the thread: if it were in C++ when the interpreter ends, it would abort the process."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            with contextlib.suppress(OSError):
                self._wakeup.send(bytes(1))
            thread.join(2.0)

    def begin_hearing(self) -> int:
        """Hear of signals; return the descriptor of another library in place of which that is, or -1."""
        with self._lock:  # no signal is taken until it is known who else has to hear of it
            before = signal.set_wakeup_fd(self.wakeup_fd, warn_on_full_buffer=False)
            if before == self.wakeup_fd:
                return -1
            self._replaced = before
            return before

    def end_hearing(self, before: int) -> None:
        """Let another library hear of signals again."""
        signal.set_wakeup_fd(before)
        self.take_signals()
        with self._lock:
            self._replaced = -1

    def take_signals(self) -> bool:
        """Set ``was_interrupted`` on the monitors if Ctrl-C has come since the last look; return True if so."""
        numbers = b""
        with self._lock, contextlib.suppress(OSError):
            numbers = self._signals.recv(4096)
            if self._replaced >= 0 and (heard := numbers.replace(b"\0", b"")):
                os.write(self._replaced, heard)  # asyncio's handlers run by that alone
        if signal.SIGINT not in numbers or not _is_interrupting(signal.getsignal(signal.SIGINT)):
            return False
        for monitor in self.monitors():
            monitor.was_interrupted = True
        return True


def interrupting(handler: F) -> F:
    """Mark a handler of SIGINT that raises KeyboardInterrupt, as Python's own does: it ends waits in C++, too."""
    vars(handler)["interrupts_waits"] = True
    return handler


def _is_interrupting(handler: object) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "interrupts_waits", False)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, in which the others are told that this rank leaves a call.

    Otherwise a second one, soon after the first, could come in between: the others would wait for this rank, whose next
    call would not connect again. Nothing changes outside of the main thread, or if a handler of SIGINT does not raise.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.get_ident() != threading.main_thread().ident or not _is_interrupting(handler):
        yield
        return
    came: list[int] = []

    @interrupting
    def defer(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


class signals_wake_watchdog:  # noqa: N801 - a context manager, read as a phrase
    """The context in which the watchdog receives signals; Python itself handles them only after a wait in C++.

    Unless something else had set a wakeup descriptor, the watchdog receives them afterwards, too: if Ctrl-C makes this
    process miss a call, it is not late for that call.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = -1  # not in ``__enter__``: a caller that Ctrl-C ends just there leaves the context, too

    def __enter__(self) -> bool:
        """Begin, in the main thread, which alone hears signals; elsewhere it is False, and nothing changes."""
        if threading.get_ident() != threading.main_thread().ident:
            return False
        known = watchdog()
        if (before := known.begin_hearing()) >= 0:
            self._before = before
        if known.arrivals.poll(0):  # earlier signals, which must not end this wait
            known.take_signals()
        return True

    def __exit__(self, *exc_info: object) -> None:
        if self._before >= 0:
            watchdog().end_hearing(self._before)


def _after_fork() -> None:
    """Stop a forked child from waking its parent's watchdog on the child's signals."""
    global _starting, _watchdog
    _starting = threading.RLock()
    if _watchdog is not None and (before := signal.set_wakeup_fd(-1)) not in (-1, _watchdog.wakeup_fd):
        signal.set_wakeup_fd(before)
    _watchdog = None


os.register_at_fork(after_in_child=_after_fork)
_watchdog: Watchdog | None = None
_starting = threading.RLock()
"""The lock that is held while the watchdog is started."""


def watchdog() -> Watchdog:
    """Return the watchdog of this process, started at the first call; a forked child has its own."""
    return _watchdog or _started()


def _started() -> Watchdog:
    global _watchdog
    with _starting:  # two threads may come at once
        if _watchdog is None:
            _watchdog = Watchdog()
            _tell_of_exceptions()
        return _watchdog


@functools.cache  # a forked child has its parent's hook
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
