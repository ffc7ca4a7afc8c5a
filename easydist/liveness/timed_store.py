"""A store whose answers may never come: while the process that keeps it is stopped, asking would block in C++.

One thread per process asks. Whoever wants an answer waits for it a moment; until it has come, nobody waits for another.
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
"""Seconds between two looks of whoever waits for a key: the store's own wait cannot be interrupted."""


class TimedStore:
    """A ``torch.distributed`` store, for whoever must not be blocked by it.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unanswered: Future[Any] | None = None

    @property
    def is_silent(self) -> bool:
        """True if it has been asked, and has not answered in time."""
        return self._unanswered is not None and not self._unanswered.done()

    def check(self, keys: Sequence[str]) -> bool:
        """True if all these keys have been set, as far as it answers.

        Raises:
            RuntimeError: The store is gone.
        """
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes | None:
        """What stands under a key; None where nothing does, or where it does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def compare_set(self, key: str, expected: str, text: str) -> bytes | None:
        """Write under a key if ``expected`` stands there (empty: if nothing does); later, where it does not answer.

        Returns:
            What stands there then; None where it does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        return self._ask(lambda: self._store.compare_set(key, expected, text), is_lasting=True)

    def set(self, key: str, text: str) -> None:
        """Write under a key; later, where it does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        self._ask(lambda: self._store.set(key, text), is_lasting=True)

    def append(self, log: str, text: str) -> None:
        """Add an entry to a log, whose entries are keys that count from 1; later, where it does not answer.

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
"""Seconds that the thread has at exit to get the answer to what was asked."""


@functools.cache
def _questions(pid: int) -> _Questions:
    """Where the thread that asks hears what to ask, in the process ``pid``; a forked child has its own."""
    questions: _Questions = SimpleQueue()
    thread = threading.Thread(target=_answer, args=(questions,), name="easydist-store", daemon=True)
    thread.start()
    atexit.register(_end, questions, thread)
    return questions


def _end(questions: _Questions, thread: threading.Thread) -> None:
    """End the thread: one that is in C++ when the interpreter ends would abort the process."""
    questions.put(None)
    thread.join(_FAREWELL)


def _answer(questions: _Questions) -> None:
    while _answer_next(questions):  # in a frame of its own, which keeps no store alive while there is nothing to ask
        pass


def _answer_next(questions: _Questions) -> bool:
    """Ask the next question; False if none will come any more."""
    if (asked := questions.get()) is None:
        return False
    answer, question = asked
    try:
        answer.set_result(question())
    except RuntimeError as error:
        answer.set_exception(error)
    return True
