"""Background threads that wait for operations, so that these advance and end before their caller waits for them.

Operations of several steps go through a pool. Messages between two ranks end in the order in which they were sent, and
may take as long as the other rank needs, so each queue of such messages has its own thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from queue import SimpleQueue

from easydist.liveness.limited import CppThread

_Drive = Callable[[], object]

_MOST = 4
"""The number of threads in the pool. If a caller asks about one operation, that operation gets an extra thread."""

_FAREWELL = 2.0
"""Seconds for which the end of the process waits for messages under way."""

_OF_GLOO = "pt_gloo_runloop"
"""The name of gloo's threads that run operations."""


class _Background:
    """The thread pool of this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Drive] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = self._threads = 0

    def run(self, drive: _Drive) -> None:
        """Let a thread call ``drive``; queue it if all threads are busy."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._threads < _MOST:
                self._threads += 1
                _start(self._serve)
            self._queue.put(drive)

    def _serve(self) -> None:
        while True:
            self._next()  # in its own frame, so that an idle thread keeps nothing alive
            with self._lock:
                if self._queue.empty():
                    self._idle += 1

    def _next(self) -> None:
        self._queue.get()()


def _start(target: _Drive) -> threading.Thread:
    thread = CppThread(target, "easydist-work")
    thread.start()
    return thread


_background = _Background()


def in_background(drive: _Drive) -> None:
    """Let a thread of the pool call ``drive``, which raises nothing."""
    _background.run(drive)


def at_once(drive: _Drive) -> None:
    """Start a thread that calls ``drive``, which raises nothing."""
    _start(drive)


class _Line:
    """A thread with a queue of functions to call."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[_Drive | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = _start(self._serve)

    def _serve(self) -> None:
        while (drive := self.waiting.get()) is not None:
            drive()
            del drive  # so that an idle thread keeps nothing alive

    def end(self, seconds: float) -> None:
        """End the thread once the queue is empty; wait for that at most this long."""
        self.waiting.put(None)
        if self._thread is not None:
            self._thread.join(seconds)


_lines: dict[tuple[int, Hashable], _Line] = {}


def in_line(owner: object, name: Hashable, drive: _Drive) -> None:
    """Append ``drive``, which raises nothing, to a queue with its own thread, which calls the functions in order.

    It takes no lock, so it may be called during garbage collection, which can happen anywhere.

    Args:
        owner: The owner of the queue. When it is freed, the thread ends once the queue is empty.
        name: The name of the queue among those of its owner.
        drive: The function to call.
    """
    key, line = (id(owner), name), _Line()
    if (known := _lines.setdefault(key, line)) is line:
        line.start()
        weakref.finalize(owner, _end_line, key).atexit = False
    known.waiting.put(drive)


def _end_line(key: tuple[int, Hashable]) -> None:
    if (line := _lines.pop(key, None)) is not None:  # a forked child has none
        line.waiting.put(None)


def _end_all_lines() -> None:
    """Let messages under way arrive before the process ends."""
    until = time.monotonic() + _FAREWELL
    for line in list(_lines.values()):
        line.end(max(0.0, until - time.monotonic()))


def _let_gloo_threads_finish() -> None:
    """Wait until gloo's threads have released the tensors of operations that have ended.

    That needs the interpreter if Python has dropped such a tensor: a thread that comes too late aborts the process.
    """
    until = time.monotonic() + _FAREWELL
    while _are_running(_OF_GLOO) and time.monotonic() < until:
        pass


def _are_running(name: str) -> bool:
    """True if threads of this name want to run after a moment in which they could; False if the system cannot tell."""
    time.sleep(0.001)
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if f"({name}) R" in stat.read_text():
                return True
    return False


atexit.register(_let_gloo_threads_finish)
atexit.register(_end_all_lines)


def _after_fork() -> None:
    global _background
    _background = _Background()
    _lines.clear()


os.register_at_fork(after_in_child=_after_fork)
