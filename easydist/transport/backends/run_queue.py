"""Operations of several steps, one after another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

from easydist.transport.work import TorchWork


class _Operation:
    """A collective of several steps."""

    def __init__(self, queue: RunQueue, steps: Iterator[TorchWork]) -> None:
        self._queue = queue
        self.steps, self.step = steps, TorchWork()
        self.is_done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end; ``timeout`` is for each of the messages."""
        self._queue.run(self, timeout)

    def is_completed(self) -> bool:
        """True if it has ended; it moves on inside ``wait``."""
        return self.is_done


class RunQueue:
    """Operations of which one runs at a time, in the order in which they began: whoever waits for one ends all before.

    So all ranks take the same steps in the same order, whatever the order in which each of them waits.

    Example:
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

    def begin(self, steps: Iterator[TorchWork]) -> TorchWork:
        """Queue an operation, and let it go as far as it gets without waiting, if it is the first.

        Args:
            steps: Begins a step each time that it is asked for the next one.

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
        return TorchWork([operation])

    def run(self, last: _Operation, timeout: timedelta | None) -> None:
        """Wait until ``last`` has ended."""
        with self._lock:
            if not last.is_done:
                self._check()
                self._advance(last, timeout)

    def _advance(self, last: _Operation | None, timeout: timedelta | None) -> None:
        """Run operations up to ``last``; None: as far as they get without waiting."""
        try:
            while self._queue and not (last and last.is_done):
                first = self._queue[0]
                if last is not None:
                    first.step.within(timeout).wait()
                elif not first.step.is_completed():
                    return
                if (step := next(first.steps, None)) is None:
                    first.is_done = True
                    self._queue.popleft()
                else:
                    first.step = step
        except BaseException as error:  # in the middle of a step
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """End everything that is under way, and refuse what comes."""
        self._error = error
        self._queue.clear()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"this communicator cannot be used any more: {self._error}") from self._error
