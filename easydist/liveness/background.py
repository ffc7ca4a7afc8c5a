"""Background threads, which wait in C++ as long as another process needs.

gloo reports the end of an operation only to a wait, and a store blocks as long as its process is stopped: torch's own
limits do not hold there, as ``get`` and the constructor of a ``TCPStore`` wait for an answer forever. So each such wait
is a call in a thread. Operations of several steps go through a pool. Messages between two ranks end in the order in
which they were sent, and may take as long as the other rank needs, so each queue of such messages has its own thread. A
call to a store has a time limit (``within``), for which its caller waits. A thread whose call does not return is left
to itself: it ends if the call ever does, but no longer when the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import (
    Future,
    TimeoutError as Unanswered,  # the builtin one from Python 3.11 on
)
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")
_Job = Callable[[], object]
_Jobs = SimpleQueue[_Job | None]

_MOST = 4
"""The number of threads in the pool."""

_KEPT = 2
"""The most threads that are kept for later calls with a time limit."""

_TICK = 0.05
"""Seconds between two checks while such a call is under way."""

_FAREWELL = 2.0
"""Seconds that the threads have at exit to finish the pending calls."""

_HOLD = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""The signal that holds a thread at exit."""

_OF_GLOO = "pt_gloo_runloop"
"""The name of gloo's threads that run operations."""


class CppThread(threading.Thread):
    """A thread that waits in C++, perhaps until the interpreter ends.

    It would abort the process if it returned to Python then. So at exit, after all other steps, it is made to sleep
    until the process has ended.
    """

    def __init__(self, target: _Job, name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


class Caller:
    """Threads that make calls in the order in which they were added, and end once this object is freed.

    It takes no lock, so it may be used during garbage collection, which can happen anywhere.

    Args:
        name: The name of the threads.
        most: The most threads; each starts with one of the first calls.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name, self._starts = name, iter(range(most))
        self._jobs: _Jobs = SimpleQueue()
        self.threads: list[CppThread] = []
        self.end = weakref.finalize(self, self._jobs.put, None)
        self.end.atexit = False
        _callers.add(self)

    def add(self, job: _Job) -> None:
        """Let a thread make a call, which raises nothing."""
        self._jobs.put(job)
        if next(self._starts, None) is not None:
            self.threads.append(thread := CppThread(functools.partial(_serve, self._jobs), self._name))
            thread.start()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Add a call; return its future result."""
        answer = Future[T]()
        self.add(functools.partial(_answer, answer, call))
        return answer


def _serve(jobs: _Jobs) -> None:
    while _serve_next(jobs):  # in its own frame, so that an idle thread keeps nothing alive
        pass


def _serve_next(jobs: _Jobs) -> bool:
    """Make the next call of the queue; return False at its end."""
    if (job := jobs.get()) is None:
        jobs.put(None)  # for the next thread
        return False
    job()
    return True


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # the caller raises it, and this thread makes other calls
        answer.set_exception(error)


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()
_lines: weakref.WeakKeyDictionary[object, dict[Hashable, Caller]] = weakref.WeakKeyDictionary()
_idle: list[Caller] = []
"""The threads without a call, for calls with a time limit."""


def _new_caller(most: int = 1) -> Caller:
    return Caller("easydist-work", most)


_pool = _new_caller(_MOST)


def in_background(drive: _Job) -> None:
    """Let a thread of the pool call ``drive``, which raises nothing; queue it if all are busy."""
    _pool.add(drive)


def at_once(drive: _Job) -> None:
    """Start a thread that calls ``drive``, which raises nothing."""
    _new_caller().add(drive)


def in_line(owner: object, name: Hashable, drive: _Job) -> None:
    """Append ``drive``, which raises nothing, to a queue with its own thread, which calls the functions in order.

    Args:
        owner: The owner of the queue. When it is freed, the thread ends once the queue is empty.
        name: The name of the queue among those of its owner.
        drive: The function to call.
    """
    lines = _lines.setdefault(owner, {})
    (lines.get(name) or lines.setdefault(name, _new_caller())).add(drive)


class NoAnswerError(RuntimeError):
    """The error of a call that has not returned in time: the store's process is stopped, or cannot be reached."""


def idle_caller() -> Caller:
    """Return a thread that makes no call now; give it back with ``release``."""
    try:
        return _idle.pop()
    except IndexError:
        return Caller("easydist-call")


def release(caller: Caller) -> None:
    """Give back a thread whose calls have all returned."""
    if len(_idle) < _KEPT:
        _idle.append(caller)


def within(
    seconds: float,
    call: Callable[[], T],
    check: Callable[[], None] | None = None,
    discard: Callable[[T], object] | None = None,
) -> T:
    """Return the result of a call that may block in C++.

    Args:
        seconds: The time limit.
        call: The call.
        check: A function to call while the call is under way; it may raise to give the call up.
        discard: Gets the result if the call returns after it was given up.

    Raises:
        NoAnswerError: The call has not returned in time.
    """
    caller, deadline = idle_caller(), time.monotonic() + seconds
    context = contextvars.copy_context()
    answer = caller.begin(lambda: context.run(call))
    try:
        while (left := deadline - time.monotonic()) > 0 and not _is_done(answer, min(left, _TICK)):
            if check is not None:
                check()
        if not answer.done():
            raise NoAnswerError(f"the store has not answered within {seconds:.3g} s")
    except BaseException:
        if discard is not None:
            answer.add_done_callback(lambda late: late.exception() or discard(late.result()))
        raise
    release(caller)
    return answer.result()


def _is_done(answer: Future[Any], seconds: float) -> bool:
    """Wait for so many seconds at most; return True if the call has returned or raised."""
    with contextlib.suppress(Unanswered):
        answer.exception(seconds)  # in two thirds of the time of ``concurrent.futures.wait``
    return answer.done()


@atexit.register
def _at_exit() -> None:
    """Let messages and calls under way end; a thread that is still in C++ then never returns."""
    until = time.monotonic() + _FAREWELL
    callers = [caller for caller in list(_callers) if caller is not _pool]  # its operations may need other ranks
    for caller in callers:
        caller.end()
    for caller in callers:
        for thread in caller.threads:
            thread.join(max(0.0, until - time.monotonic()))
    _let_gloo_threads_finish()
    if threads := [thread for thread in threading.enumerate() if isinstance(thread, CppThread)]:
        _hold(threads)


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


def _hold(threads: Sequence[CppThread]) -> None:
    c = ctypes.CDLL(None)
    # pause(2) itself handles the signal: a handler in Python would need the interpreter.
    c.signal(_HOLD, ctypes.cast(c.pause, ctypes.c_void_p))
    for thread in threads:
        if thread.is_alive():  # the calls above have let go of the interpreter
            signal.pthread_kill(cast(int, thread.ident), _HOLD)


def _after_fork() -> None:
    global _pool
    _pool = _new_caller(_MOST)
    _lines.clear()
    _idle.clear()
    _callers.clear()


os.register_at_fork(after_in_child=_after_fork)
