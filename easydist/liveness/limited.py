"""Calls with a time limit into C++ code that waits for a store: it blocks as long as the store's process is stopped.

torch's own limits do not hold there: ``get`` and the constructor of a ``TCPStore`` wait for an answer forever. So each
such call is made in a thread, for which the caller waits.
"""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from easydist.liveness.background import Caller

T = TypeVar("T")

_TICK = 0.05
"""Seconds between two checks while a call is under way."""

_KEPT = 2
"""The most threads that are kept for later calls."""


class NoAnswerError(RuntimeError):
    """The error of a call that has not returned in time: the store's process is stopped, or cannot be reached."""


_idle: list[Caller] = []
"""The threads without a call."""

os.register_at_fork(after_in_child=_idle.clear)


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
