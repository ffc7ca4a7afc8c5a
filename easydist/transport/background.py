"""Threads that wait for operations which nobody waits for yet, so that these go on and end by themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

_Drive = Callable[[], object]

_MOST = 4
"""How many threads take operations in their order. More begin where somebody asks about a single one."""


class _Background:
    """The threads of this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Drive] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = self._threads = 0

    def run(self, drive: _Drive) -> None:
        """Let a thread call ``drive``; one after another if there are more than threads."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._threads < _MOST:
                self._threads += 1
                _start(self._serve)
            self._queue.put(drive)

    def _serve(self) -> None:
        while True:
            self._next()  # in a frame of its own, which keeps nothing alive while there is nothing to do
            with self._lock:
                if self._queue.empty():
                    self._idle += 1

    def _next(self) -> None:
        self._queue.get()()


def _start(target: _Drive) -> None:
    threading.Thread(target=target, name="easydist-work", daemon=True).start()


_background = _Background()


def in_background(drive: _Drive) -> None:
    """Let a thread of the pool call ``drive``, which raises nothing."""
    _background.run(drive)


def at_once(drive: _Drive) -> None:
    """Let a thread of its own call ``drive``, which raises nothing."""
    _start(drive)


def _after_fork() -> None:
    global _background
    _background = _Background()


os.register_at_fork(after_in_child=_after_fork)
