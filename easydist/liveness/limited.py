"""Calls with a time limit into C++ code that waits for a store: it blocks as long as the store's process is stopped.

torch's own limits do not hold there: ``get`` and the constructor of a ``TCPStore`` wait for an answer for ever. So each
such call is made in a thread, for which the caller waits. A thread whose call does not return is left to itself, and
ends if the call ever does, but no longer when the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")

_FAREWELL = 2.0
"""Seconds that the threads have at exit to finish the pending calls."""

_NAME = "easydist-store"
"""The name of the threads that make calls of stores."""

_TICK = 0.05
"""Seconds between two checks while a call is under way."""

_HOLD = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""The signal that holds a thread at exit."""

_KEPT = 2
"""The most threads that are kept for later calls."""


class NoAnswerError(RuntimeError):
    """The error of a call that has not returned in time: the store's process is stopped, or cannot be reached."""


_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class CppThread(threading.Thread):
    """A thread that waits in C++, perhaps until the interpreter ends.

    It would abort the process if it returned to Python then. So at exit, after all other steps, it is made to sleep
    until the process has ended.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


class Caller:
    """A thread that makes calls one after another; it ends with this object."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        CppThread(functools.partial(_serve, self._calls), _NAME).start()
        self.end = weakref.finalize(self, self._calls.put, None)
        self.end.atexit = False
        _running.add(self)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call after those that have been begun before; return its future result."""
        answer = Future[T]()
        self._calls.put((answer, call))
        return answer


_running: weakref.WeakSet[Caller] = weakref.WeakSet()
_idle: dict[int, list[Caller]] = {}
"""The threads without a call, by process: a forked child has its own."""


def idle_caller() -> Caller:
    """Return a thread that makes no call now; give it back with ``release``."""
    try:
        return _idle.setdefault(os.getpid(), []).pop()
    except IndexError:
        return Caller()


def release(caller: Caller) -> None:
    """Give back a thread whose calls have all returned."""
    if len(kept := _idle.setdefault(os.getpid(), [])) < _KEPT:
        kept.append(caller)


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
        while (left := deadline - time.monotonic()) > 0 and wait([answer], min(left, _TICK)).not_done:
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


@atexit.register
def _at_exit() -> None:
    """End the threads that serve; any thread that is then still in C++ never returns."""
    for caller in list(_running):
        caller.end()
    deadline, threads = time.monotonic() + _FAREWELL, _alive()
    for thread in threads:
        if thread.name == _NAME:
            thread.join(max(0.0, deadline - time.monotonic()))
    if threads := _alive():
        _hold(threads)


def _alive() -> list[CppThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, CppThread)]


def _hold(threads: Sequence[CppThread]) -> None:
    c = ctypes.CDLL(None)
    # pause(2) itself handles the signal: a handler in Python would need the interpreter.
    c.signal(_HOLD, ctypes.cast(c.pause, ctypes.c_void_p))
    for thread in threads:
        if thread.is_alive():  # the calls above have let go of the interpreter
            signal.pthread_kill(cast(int, thread.ident), _HOLD)


def _serve(calls: _Calls) -> None:
    while _serve_next(calls):  # in its own frame, so that the sleeping thread keeps no store alive
        pass


def _serve_next(calls: _Calls) -> bool:
    """Make the next call of the queue; return False at its end."""
    if (asked := calls.get()) is None:
        return False
    answer, call = asked
    try:
        answer.set_result(call())
    except BaseException as error:  # the caller raises it, and this thread serves others
        answer.set_exception(error)
    return True
