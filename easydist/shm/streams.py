"""Operations under way in shared memory, as generators that yield wherever they would have to wait.

A *stream* is a queue of generators that use the same slots or the same pipe: its head runs until it is blocked, and
the next one runs when the head has ended. A wait for one operation advances all operations of this process, including
those of other communicators, so operations may be waited for in any order; between waits a thread does so
(``progress``). Threads exclude one another by the lock of the streams, which none of them holds while it sleeps.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from easydist.base.wording import reason
from easydist.errors import CollectiveTimeout, DisagreementError, EasydistError, without_frames
from easydist.shm import cycles
from easydist.shm.calls import Calls
from easydist.shm.futex import give_core
from easydist.shm.progress import OWN_THREADS, handles, helper, is_alone, move_all, running, waits
from easydist.shm.slots import NEVER, Need, Pipe, Slots

Guard = Callable[[Sequence[int], float], None]
"""A function that takes the ranks still awaited and the seconds since the wait began; it raises to end the wait."""

Task = tuple[object, Iterator[Need]]
"""The key of a stream and a generator to run in it; the key None is the stream of the steps."""


class AnyRank(NamedTuple):
    """The key of the stream of the messages with a tag from any rank."""

    tag: int


_SPINS = 100
"""The number of checks before a wait sleeps; it yields the core between them."""

_GUARD_EVERY = 0.05
_ASIDE = 0.001
"""The first sleep in seconds while other communicators or threads have operations under way, because their progress
does not wake this wait. Later sleeps take a twentieth of the time in which nothing has moved."""

_UNLOCKED = 1.0
"""Seconds after which a lock does not come free: a signal's exception has struck while this thread took it."""

_SEVERAL = -1
"""In place of the thread that begins all operations: there are several."""

_all: weakref.WeakSet[Streams] = weakref.WeakSet()


class Operation:
    """The handle of one operation, which advances when it begins, and inside ``wait`` and ``is_completed``.

    Args:
        streams: The streams in which its generators run.

    Attributes:
        keep: Objects that have to live until the end.
        left: The number of its generators that have not ended.
        error: The error that ended it early; else None.
        is_own: True if that error is its own, which ``wait`` then raises itself.
        is_collective: False for a message between two ranks.
        polled: The times at which it was first polled, and at which a poll last called the guard.
        describe: Returns the description of a message, see ``calls``; None for a collective.
        has_spun: True if it has had its moment to end without sleeping.
    """

    keep: object = None
    has_spun = False
    describe: Callable[[], tuple[int, int]] | None = None
    left = 0
    error: BaseException | None = None
    is_own, is_collective = False, True
    polled: tuple[float, float] | None = None

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def is_completed(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        if self.left:
            self._streams.poll(self)
        return not self.left

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end.

        Raises:
            CollectiveTimeout: ``timeout`` is over.
            EasydistError: The wait for another operation of the communicator has raised it.
            BaseException: The guard raised it.
        """
        try:
            if self.left and (self.has_spun or not self._streams.spin(self)):
                self._streams.block(self, None if timeout is None else timeout.total_seconds())
        except BaseException as error:  # after giving up, nothing may be written to the caller's tensors
            self.is_own = isinstance(error, Exception)  # for another thread that waits for the same operation
            self._streams.fail(error)
            raise
        if self.error is not None:
            if self.is_own:
                raise self.error
            if isinstance(self.error, EasydistError):  # whichever is waited for first, its error is about all of them
                raise copy.copy(self.error) from self.error
            raise RuntimeError(f"this operation can no longer complete: {self.error!r}") from self.error

    def one_done(self) -> None:
        """Record that one of its generators has ended."""
        self.left -= 1
        if not self.left:
            self.keep = self.describe = None  # which hold the tensors


class _Stream:
    """A queue of generators."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Iterator[Need], Operation]] = deque()
        self.need: Need = (NEVER, ())

    def advance(self) -> bool:
        """Run the generators until one is blocked; return True if anything has moved."""
        before, queue = self.need, self.queue
        while queue:
            task, operation = queue[0]
            need = next(task, None)
            if need is not None:
                self.need = need
                return need is not before
            queue.popleft()
            operation.one_done()
            before = (NEVER, ())
        return True


class Streams:
    """The streams of one communicator.

    Args:
        slots: The memory.
        calls: The calls of the ranks.
        guard: The guard that every wait calls about every 50 ms.

    Attributes:
        error: The error that has ended all operations, so that no further one can begin; else None.
        excludes: Returns a true value while the caller lets no other thread begin an operation.
        guarded: The operation about whose wait the guard was asked last.
    """

    def __init__(self, slots: Slots, calls: Calls, guard: Guard) -> None:
        self._slots, self._calls, self._guard = slots, calls, guard
        self._lock = calls.lock = threading.Lock()
        calls.end = self._drop
        self._streams: dict[object, _Stream] = {}
        self._active: list[_Stream] = []
        self.error: BaseException | None = None
        self.excludes: Callable[[], object] = _never
        self.guarded: Operation | None = None
        self._thread: int | None = None
        _all.add(self)

    def is_idle(self, key: object) -> bool:
        """True if no operation is under way in this stream."""
        return (stream := self._streams.get(key)) is None or not stream.queue

    def is_first(self, key: object, operation: Operation) -> bool:
        """True if this operation is the one that the stream moves."""
        queue = () if (stream := self._streams.get(key)) is None else tuple(stream.queue)  # a copy, as in ``_awaited``
        return bool(queue) and queue[0][1] is operation

    def begin(self, tasks: Sequence[Task], keep: object, patient: bool = False) -> Operation:
        """Queue the generators of one operation, and run them until they are blocked.

        Args:
            tasks: The generators, each with the key of its stream.
            keep: Objects that have to live until the end.
            patient: True to give them a moment to end: the caller waits for them at once.

        Raises:
            RuntimeError: The communicator is closed or broken, or belongs to another process.
        """
        operation = Operation(self)
        if threading.get_ident() != self._thread:
            self._used_by_another()
        with self._lock:
            if self._active:
                self._advance()
            if self.error is not None:
                self.check()
            if self._calls.untold is not None:  # another thread has ended everything under way in the meantime
                self._calls.tell()
            # Only if there is nothing else to move meanwhile.
            spins = _SPINS if patient and not running else 0
            for key, task in tasks:
                if operation.error is None:
                    self._start(key, task, operation, spins)
            if operation.left:
                operation.keep, operation.has_spun, running[self] = keep, spins > 0, None
        if operation.left:
            helper.begun += 1
            if not helper.is_awake:
                helper.wake()
        return operation

    def _start(self, key: object, task: Iterator[Need], operation: Operation, spins: int) -> None:
        """Run a generator until it is blocked, and queue it unless it has ended; on a busy stream, only queue it."""
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        if not stream.queue:
            try:
                need = next(task, None)
                while need is not None and spins:
                    give_core()
                    need, spins = next(task, None), spins - 1
            except DisagreementError as error:  # for its wait, as if it had come later
                self._drop(error)
                operation.error, operation.is_own = error, True
                return
            except BaseException as error:  # a step was left unfinished
                self._fail(error)
                raise
            if need is None:
                return
            stream.need = need
            self._active.append(stream)
        stream.queue.append((task, operation))
        operation.left += 1

    def advance(self) -> bool:
        """Run all streams that can run; return True if anything has moved. Do nothing if another thread is doing it."""
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
        except DisagreementError as error:
            self._drop(error)
            return True
        except Exception as error:  # for the operation's own wait: this may be one for another, or no wait at all
            stream.queue[0][1].is_own = True
            self._fail(error)
            return True
        except BaseException as error:  # a step was left unfinished
            self._fail(error)
            raise
        if not self._active:
            running.pop(self, None)
        return moved

    def poll(self, operation: Operation) -> None:
        """Advance, and call the guard from time to time, because a caller may poll until the end instead of waiting."""
        self.advance()
        now = time.monotonic()
        began, told = operation.polled or (now, now)
        try:
            operation.polled = began, self._tell_guard(operation, began, told, None)
        except BaseException as error:
            operation.is_own = True
            self.fail(error)

    def spin(self, operation: Operation) -> bool:
        """Give an operation a moment to end, without sleeping; return True if it has ended."""
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
        # The helper leaves the operations to a thread that waits.
        waits.append(operation)
        slots.show_waiting(True)
        try:
            while operation.left:
                if slots.sleep(move_all, self._pause(moved, began, limit)):
                    if self.spin(operation):
                        return
                    moved = time.monotonic()
                before, told = told, self._tell_guard(operation, began, told, limit)
                if told > before and self._calls.compares and self._is_stuck(operation):
                    self._find_cycle(operation)
        finally:
            self._calls.cycles.end()
            slots.show_waiting(False)
            waits.remove(operation)

    def _pause(self, moved: float, began: float, limit: float | None) -> float:
        now = time.monotonic()
        alone = len(waits) == 1 and all(streams is self for streams in tuple(running))
        pause = _GUARD_EVERY if alone else min(_GUARD_EVERY, max(_ASIDE, (now - moved) / 20))
        return pause if limit is None else max(0.0, min(pause, began + limit - now))

    def _tell_guard(self, operation: Operation, began: float, told: float, limit: float | None) -> float:
        now = time.monotonic()
        over = limit is not None and now - began >= limit
        if not operation.left or (not over and now - told < _GUARD_EVERY):
            return told
        self._compare()
        ranks = self._awaited(operation)
        if over:
            raise _late(limit, ranks)
        self.guarded = operation
        self._guard(ranks, now - began)
        return now

    def _compare(self) -> None:
        """Compare the ranks' calls.

        Raises:
            DisagreementError: They differ.
        """
        if not self._calls.compares:
            return
        with self._lock:
            self._end_with(self._calls.compare())

    def _used_by_another(self) -> None:
        """Note which thread begins the operations."""
        is_first = self._thread is None and not threading.current_thread().name.startswith(OWN_THREADS)
        self._thread = threading.get_ident() if is_first else _SEVERAL

    def _is_stuck(self, operation: Operation) -> bool:
        """True if this process begins no operation of the communicator until this one has ended."""
        if threading.get_ident() != self._thread:
            handle = handles.get(self._thread or 0)
            if handle is None or operation not in handle.parts:
                return False
        return bool(self.excludes()) or is_alone(self._thread)

    def _find_cycle(self, operation: Operation) -> None:
        """Make sure that this rank and others do not wait for one another forever.

        Raises:
            DisagreementError: They do.
        """
        with self._lock:
            self._advance()
            if not operation.left:
                return
            call = None if operation.describe is None else operation.describe()
            self._end_with(self._calls.cycle(self._flags(operation), call))

    def _end_with(self, error: DisagreementError | None) -> None:
        """End all operations with an error and raise it, if there is one."""
        if error is None:
            return
        self._drop(error)
        try:
            raise error
        finally:
            del error  # a local would keep the frames, and the data of the call, in a cycle

    def _flags(self, operation: Operation) -> list[int]:
        """Return what an operation needs from each rank, and what this rank has begun for it, see ``cycles``."""
        flags, slots = [0] * self._slots.size, self._slots
        for key, stream in self._streams.items():
            if not stream.queue:
                continue
            is_awaited = any(queued is operation for _, queued in stream.queue)
            step, ranks = stream.need
            if isinstance(key, Pipe):
                flags[key.peer] |= cycles.begun(key) | (cycles.need(key) if is_awaited else 0)
            elif key is None:
                late = [rank for rank in ranks if is_awaited and not slots.has_published(rank, step)]
                flags = [flag | cycles.BEGUN | cycles.STEP * (rank in late) for rank, flag in enumerate(flags)]
        return flags

    def _awaited(self, operation: Operation) -> list[int]:
        """Return the ranks that block the streams of an operation."""
        # The copies are made in one step each: another thread may be advancing the streams.
        needs = [stream.need for stream in tuple(self._active) if any(op is operation for _, op in tuple(stream.queue))]
        late = {r for step, ranks in needs for r in ranks if step == NEVER or not self._slots.has_published(r, step)}
        return sorted(late)

    def finish(self, limit: timedelta | None = None) -> None:
        """Wait until the collectives under way have ended.

        Args:
            limit: The time limit of all waits together; None to leave it to the guard.

        Raises:
            BaseException: The guard raised it, or the time is over; the operations have ended, too.
        """
        ends = None if limit is None else time.monotonic() + limit.total_seconds()
        while operation := next((one for one in self._queued() if one.is_collective), None):
            operation.wait(None if ends is None else timedelta(seconds=max(0.0, ends - time.monotonic())))

    def _queued(self) -> list[Operation]:
        # Copies, as in ``_awaited``.
        return [operation for stream in tuple(self._active) for _, operation in tuple(stream.queue)]

    def doze(self, woken: Callable[[], bool], seconds: float) -> bool:
        """Sleep until another rank has moved the operations under way, as ``Slots.sleep`` does."""
        slots = getattr(self, "_slots", None)
        return slots is not None and slots.sleep(woken, seconds)

    def rouse(self) -> None:
        """Wake the threads of this process that sleep for these streams."""
        if (slots := getattr(self, "_slots", None)) is not None:
            slots.rouse()

    def fail(self, error: BaseException) -> None:
        """End all operations under way with an error, and refuse new ones; no other thread moves them any more."""
        if isinstance(error, DisagreementError):  # it has ended the operations already
            return
        is_locked = self._lock.acquire(timeout=_UNLOCKED)
        try:
            self._fail(error)
        finally:
            if is_locked:
                self._lock.release()

    def _drop(self, error: DisagreementError) -> None:
        """End all operations under way with an error that all ranks raise; the next ones can begin."""
        for key, stream in self._streams.items():
            # Waits for mailboxes go on: verbs compare their messages themselves.
            if key is None or isinstance(key, Pipe | AnyRank):
                for _, operation in tuple(stream.queue):
                    operation.error, operation.is_own, operation.left = error, True, 0
                stream.queue.clear()
        self._active = [stream for stream in self._active if stream.queue]
        if not self._active:
            running.pop(self, None)
        self._calls.keep(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error = without_frames(error)
        for stream in self._active:
            for _, operation in tuple(stream.queue):  # a copy, as in ``_awaited``
                operation.error, operation.left = error, 0
            stream.queue.clear()
        self._active = []
        running.pop(self, None)

    def end_in_child(self, error: BaseException) -> None:
        """Do as ``fail`` in a forked child, where a lock that another thread of the parent held stays locked."""
        self._lock = threading.Lock()
        self._fail(error)

    def check(self) -> None:
        """Raise an error if no operation can begin any more.

        Raises:
            RuntimeError: The communicator is closed or broken, or belongs to another process.
        """
        if threading.get_ident() != self._thread:
            self._used_by_another()
        if self.error is not None:
            raise RuntimeError(f"this communicator can no longer be used: {reason(self.error)}") from self.error

    def close(self) -> None:
        """End all operations, and release the memory."""
        self.fail(RuntimeError("it has been closed"))
        helper.release(self)
        self._streams.clear()
        self._calls.close()
        del self._slots


def _late(limit: float | None, ranks: Sequence[int]) -> CollectiveTimeout:
    error = CollectiveTimeout(f"not all ranks came within the timeout of {limit:g} s: ranks {ranks} are missing")
    error.missing = tuple(ranks)
    return error


def _never() -> bool:
    return False


def _after_fork() -> None:
    """Fail all streams in a forked child: the slots belong to the parent, and the child would write as that rank."""
    for streams in tuple(_all):
        streams.end_in_child(RuntimeError("it belongs to the process from which this one was forked"))


os.register_at_fork(after_in_child=_after_fork)
