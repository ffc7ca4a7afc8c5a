"""A queue of operations of several steps, which run one after another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

from easydist.transport.work import ENDED, Begun, Pending, wait


class _Operation:
    """A collective of several steps."""

    def __init__(self, queue: RunQueue, steps: Iterator[Begun]) -> None:
        self._queue, self.steps = queue, steps
        self.step: Begun = ENDED
        self.is_done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end; ``timeout`` limits each message."""
        self._queue.run(self, timeout)

    def is_completed(self) -> bool:
        """True if it has ended; it advances inside ``wait``."""
        return self.is_done


class RunQueue:
    """Operations that run one at a time, in the order in which they began; a wait for one also ends all before it.

    So all ranks take the same steps in the same order, in whichever order each of them waits.

    Example:
        >>> from easydist.comms import TorchWork
        >>> queue = RunQueue()
        >>> def steps():
        ...     yield TorchWork()
        ...     print("the second step")
        >>> queue.begin(steps()).wait()
        the second step
    """

    def __init__(self) -> None:
        self._queue: deque[_Operation] = deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def begin(self, steps: Iterator[Begun]) -> Pending:
        """Queue an operation; if it is the first, run it until it would have to wait.

        Args:
            steps: An iterator that begins a step at each ``next``.

        Raises:
            RuntimeError: An earlier operation has failed, or ``fail`` was called.
        """
        self._check()
        operation = _Operation(self, steps)
        self._queue.append(operation)
        if self._lock.acquire(blocking=False):
            try:
                self._advance(None, None)
            finally:
                self._lock.release()
        return operation

    def run(self, last: _Operation, timeout: timedelta | None) -> None:
        """Wait until ``last`` has ended."""
        with self._lock:
            if not last.is_done:
                self._check()
                self._advance(last, timeout)

    def _advance(self, last: _Operation | None, timeout: timedelta | None) -> None:
        """Run operations up to ``last``; with None, until one would have to wait."""
        try:
            while self._queue and not (last and last.is_done):
                first = self._queue[0]
                if last is None and not first.step.is_completed():
                    return
                wait(first.step, timeout)  # also if it has completed: it may have failed
                if (step := next(first.steps, None)) is None:
                    first.is_done = True
                    self._queue.popleft()
                else:
                    first.step = step
        except BaseException as error:  # a step was left unfinished
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Drop all operations under way, and refuse new ones with this error."""
        self._error = error
        self._queue.clear()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"this communicator can no longer be used: {self._error}") from self._error
