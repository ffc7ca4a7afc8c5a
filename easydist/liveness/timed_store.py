"""A store with a time limit on each answer: while the process that serves it is stopped, a call blocks in C++.

One thread per process makes the calls. The caller waits a moment for the answer; until it has come, no further call
waits.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import (
    Future,
    TimeoutError as NoAnswer,  # the builtin one from Python 3.11 on
)
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from easydist.liveness.rules import PATIENCE

T = TypeVar("T")

POLL = 0.005
"""Seconds between two looks for a key: the store's own wait cannot be interrupted."""


class TimedStore:
    """A ``torch.distributed`` store that never blocks the caller for long.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unanswered: Future[Any] | None = None

    @property
    def is_silent(self) -> bool:
        """True if the store has not answered in time, and still has not."""
        return self._unanswered is not None and not self._unanswered.done()

    def check(self, keys: Sequence[str]) -> bool:
        """True if all these keys have been set, and the store answers.

        Raises:
            RuntimeError: The store is gone.
        """
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set, or the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def compare_set(self, key: str, expected: str, text: str) -> bytes | None:
        """Set a key if its value is ``expected`` (empty: if it is not set); later, if the store does not answer.

        Returns:
            The value of the key afterwards; None if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        return self._ask(lambda: self._store.compare_set(key, expected, text), is_lasting=True)

    def set(self, key: str, text: str) -> None:
        """Set a key; later, if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        self._ask(lambda: self._store.set(key, text), is_lasting=True)

    def append(self, log: str, text: str) -> None:
        """Append an entry to a log, which has the keys ``log/1``, ``log/2``, …; later, if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        self._ask(lambda: self._store.set(f"{log}/{self._store.add(log, 1)}", text), is_lasting=True)

    def _ask(self, question: Callable[[], T], is_lasting: bool = False) -> T | None:
        was_silent, answer = self.is_silent, Future[T]()
        if is_lasting or not was_silent:
            _questions(os.getpid()).put((answer, question))
        if was_silent:
            return None
        try:
            return answer.result(PATIENCE)
        except NoAnswer:
            self._unanswered = answer
            return None


_Questions = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

_FAREWELL = 2.0
"""Seconds that the thread has at exit to finish the pending calls."""


@functools.cache
def _questions(pid: int) -> _Questions:
    """Return the queue of the thread that calls the store in the process ``pid``; a forked child has its own."""
    questions: _Questions = SimpleQueue()
    thread = threading.Thread(target=_answer, args=(questions,), name="easydist-store", daemon=True)
    thread.start()
    atexit.register(_end, questions, thread)
    return questions


def _end(questions: _Questions, thread: threading.Thread) -> None:
    """End the thread: if it were in C++ when the interpreter ends, it would abort the process."""
    questions.put(None)
    thread.join(_FAREWELL)


def _answer(questions: _Questions) -> None:
    while _answer_next(questions):  # in its own frame, so that the sleeping thread keeps no store alive
        pass


def _answer_next(questions: _Questions) -> bool:
    """Make the next call of the queue; return False at its end."""
    if (asked := questions.get()) is None:
        return False
    answer, question = asked
    try:
        answer.set_result(question())
    except RuntimeError as error:
        answer.set_exception(error)
    except Exception as error:  # a store written in Python may raise anything, and this thread serves all groups
        answer.set_exception(RuntimeError(f"the store has failed: {error!r}"))
    return True
