"""Operations under way in shared memory, each a generator that yields where it would have to wait.

A *stream* is a queue of generators that use the same slots or the same pipe: its head runs until it is blocked, and
the next one runs when the head has ended. There is no thread: whoever waits for one operation moves all operations of
this process on, those of other communicators too, so that the order in which operations are waited for is free.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from easydist.errors import CollectiveTimeout
from easydist.shm.futex import give_core
from easydist.shm.slots import NEVER, Need, Slots

Guard = Callable[[Sequence[int], float], None]
"""Called with the ranks still awaited and the seconds since the wait began; raises to end the wait."""

_SPINS = 100
"""How often a wait looks before it sleeps, giving the core to others in between."""

_GUARD_EVERY = 0.05
_ASIDE = 0.001
"""Seconds of sleep where something may move on that does not wake it (another communicator, another thread): at first
this, later a twentieth of the time in which nothing has moved."""

_running: dict[Streams, None] = {}
"""Those with an operation under way, of all communicators of this process."""

_waits: list[Operation] = []
"""What the threads of this process wait for."""

_all: weakref.WeakSet[Streams] = weakref.WeakSet()


class Operation:
    """What a backend hands out for one operation; moves on inside ``wait`` and ``is_completed``, and when it begins.

    Args:
        streams: Where its generators run.

    Attributes:
        keep: Whatever has to live until the end.
        left: How many of its generators have not ended.
        error: What has ended it before.
    """

    __slots__ = ("_streams", "error", "keep", "left")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.keep: object = None
        self.left = 0
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        if self.left:
            self._streams.advance()
        return not self.left

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end.

        Raises:
            CollectiveTimeout: ``timeout`` is over.
            BaseException: What the guard raised.
        """
        try:
            if self.left and not self._streams.spin(self):
                self._streams.block(self, None if timeout is None else timeout.total_seconds())
        except BaseException as error:  # given up: nothing may be written to the caller's tensors from now on
            self._streams.fail(error)
            raise
        if self.error is not None:
            raise RuntimeError(f"this operation cannot end any more: {self.error!r}") from self.error

    def one_done(self) -> None:
        """One of its generators has ended."""
        self.left -= 1
        if not self.left:
            self.keep = None


class _Stream:
    """A queue of generators."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Iterator[Need], Operation]] = deque()
        self.need: Need = (NEVER, ())

    def advance(self) -> bool:
        """Run what can run; True if anything has moved."""
        before, queue = self.need, self.queue
        while queue:
            task, operation = queue[0]
            self.need = next(task, None) or (NEVER, ())
            if self.need[1]:
                return self.need is not before
            queue.popleft()
            operation.one_done()
            before = (NEVER, ())
        return True


class Streams:
    """All streams of one communicator.

    Args:
        slots: The memory.
        guard: Called from every wait about every 50 ms.
    """

    def __init__(self, slots: Slots, guard: Guard) -> None:
        self._slots, self._guard = slots, guard
        self._lock = threading.Lock()
        self._streams: dict[object, _Stream] = {}
        self._active: list[_Stream] = []
        self._error: BaseException | None = None
        _all.add(self)

    def begin(self, tasks: Sequence[tuple[object, Iterator[Need]]], keep: object) -> Operation:
        """Queue the generators of one operation, and run them as far as they get.

        Args:
            tasks: Each with the key of its stream; None is the stream of the steps.
            keep: Whatever has to live until the end.

        Raises:
            RuntimeError: The communicator is closed, broken, or another process's.
        """
        self.check()
        operation = Operation(self)
        with self._lock:
            if self._active:
                self._advance()
            for key, task in tasks:
                self._start(key, task, operation)
            if operation.left:
                operation.keep, _running[self] = keep, None
        return operation

    def _start(self, key: object, task: Iterator[Need], operation: Operation) -> None:
        """Run a generator as far as it gets, and queue it where it has not ended; behind others of its stream."""
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        if not stream.queue:
            try:
                need = next(task, None)
            except BaseException as error:  # in the middle of a step
                self.fail(error)
                raise
            if need is None:
                return
            stream.need = need
            self._active.append(stream)
        stream.queue.append((task, operation))
        operation.left += 1

    def advance(self) -> bool:
        """Run whatever can run; True if anything has moved. Does nothing while another thread does it."""
        if not self._lock.acquire(False):
            return False
        try:
            return self._advance()
        finally:
            self._lock.release()

    def _advance(self) -> bool:
        moved = False
        try:
            for stream in tuple(self._active):
                moved = stream.advance() or moved
                if not stream.queue:
                    self._active.remove(stream)
        except BaseException as error:  # in the middle of a step
            self.fail(error)
            raise
        if not self._active:
            _running.pop(self, None)
        return moved

    def spin(self, operation: Operation) -> bool:
        """Give an operation a moment to end without sleeping; True if it has."""
        for _ in range(_SPINS):
            self.advance()
            if not operation.left:
                return True
            give_core()
        return False

    def block(self, operation: Operation, limit: float | None) -> None:
        """Wait for an operation without using the core."""
        slots, began = self._slots, time.monotonic()
        told = moved = began
        _waits.append(operation)
        try:
            while operation.left:
                if slots.sleep(self._move_all, self._pause(moved, began, limit)):
                    if self.spin(operation):
                        return
                    moved = time.monotonic()
                told = self._tell_guard(operation, began, told, limit)
        finally:
            _waits.remove(operation)

    def _move_all(self) -> bool:
        moved = self.advance()
        for streams in tuple(_running):
            if streams is not self:
                moved = streams.advance() or moved
        return moved

    def _pause(self, moved: float, began: float, limit: float | None) -> float:
        now = time.monotonic()
        alone = len(_waits) == 1 and all(streams is self for streams in _running)
        pause = _GUARD_EVERY if alone else min(_GUARD_EVERY, max(_ASIDE, (now - moved) / 20))
        return pause if limit is None else max(0.0, min(pause, began + limit - now))

    def _tell_guard(self, operation: Operation, began: float, told: float, limit: float | None) -> float:
        now = time.monotonic()
        over = limit is not None and now - began >= limit
        if not operation.left or (not over and now - told < _GUARD_EVERY):
            return told
        ranks = self._awaited(operation)
        if over:
            late = CollectiveTimeout(f"not all ranks came within {limit:g} s: ranks {ranks} are missing")
            late.missing = tuple(ranks)
            raise late
        self._guard(ranks, now - began)
        return now

    def _awaited(self, operation: Operation) -> list[int]:
        """The ranks that keep the streams of an operation from moving."""
        needs = [stream.need for stream in self._active if any(op is operation for _, op in stream.queue)]
        late = {r for step, ranks in needs for r in ranks if step == NEVER or not self._slots.has_published(r, step)}
        return sorted(late)

    def fail(self, error: BaseException) -> None:
        """End everything that is under way, and refuse what comes."""
        self._error = error
        for stream in self._active:
            for _, operation in stream.queue:
                operation.error, operation.left = error, 0
            stream.queue.clear()
        self._active = []
        _running.pop(self, None)

    def check(self) -> None:
        """Raise if nothing can begin any more.

        Raises:
            RuntimeError: The communicator is closed, broken, or another process's.
        """
        if self._error is not None:
            raise RuntimeError(f"this communicator cannot be used any more: {self._error}") from self._error

    def close(self) -> None:
        """End everything, and let go of the memory."""
        self.fail(RuntimeError("it has been closed"))
        del self._slots


def _after_fork() -> None:
    """The slots are the parent's: a child that went on would speak in its name."""
    _waits.clear()
    for streams in tuple(_all):
        streams.fail(RuntimeError("it belongs to the process from which this one was forked"))


os.register_at_fork(after_in_child=_after_fork)
