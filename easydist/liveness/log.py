"""Logs in a store, to which ranks append: to read what all of them have written takes four questions.

So ranks that meet do not ask for the key of each other rank: W of them would ask W² times. A log has the keys
``log/1``, ``log/2``, … in the order of the entries, and a counter, ``log``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from easydist.errors import WireError
from easydist.liveness.timed_store import POLL, TimedStore, Written

AT_ONCE = 1000
"""The most entries to ask for at once; fewer if the store has not answered in time."""

_MOST_LOOKS = 50_000
"""The looks a second of all ranks together that a store has to answer; it can answer some more."""

_LONGEST = 0.05
"""The longest pause for the sake of the processor, in seconds: a tenth of a core would go into looks otherwise."""

_WITHDRAWN = b"\0withdrawn"


def pause(size: int, waited: float) -> float:
    """Return the seconds until the next look of each of ``size`` ranks that have waited so long for entries."""
    return max(POLL, size / _MOST_LOOKS, min(_LONGEST, waited / 50))


class LogEntry(NamedTuple):
    """One entry of a log.

    Attributes:
        key: Its key in the store.
        by: The rank that has written it; None if another program has.
        text: Its text.
    """

    key: str
    by: int | None
    text: bytes


class Log:
    """One process's view of a log. Several threads may read it.

    Args:
        name: The name of the log.
        refused: The texts of the errors that ``news`` has raised, each once. A view that begins again gets those of the
            view before.

    Example:
        >>> from torch.distributed import HashStore
        >>> store, log, other = TimedStore(HashStore()), Log("log"), Log("log")
        >>> log.append(store, 1, "first")
        >>> list(other.news(store))
        [LogEntry(key='log/1', by=1, text=b'first')]
        >>> list(other.news(store))
        []
    """

    def __init__(self, name: str, refused: set[str] | None = None) -> None:
        self._name, self._lock = name, threading.Lock()
        self._refused = set() if refused is None else refused
        self._count, self._at_once = 0, AT_ONCE
        self._unwritten: set[int] = set()
        self._unread = deque[tuple[int, Written]]()
        self._last: dict[int, tuple[int, bytes | WireError]] = {}

    def append(self, store: TimedStore, rank: int, text: str) -> None:
        """Append an entry; later, if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        store.append(self._name, rank, text)

    def withdraw(self, store: TimedStore, rank: int) -> None:
        """Let a rank count as one that has written nothing; as ``append``."""
        self.append(store, rank, _WITHDRAWN.decode())

    def last(self, store: TimedStore) -> dict[int, bytes]:
        """Return the last entry of each rank, as far as the store answers. Entries of other programs do not count.

        Raises:
            RuntimeError: The store is gone.
            WireError: The last entry of a rank is not signed with this process's job key.
        """
        self._sort(store)
        return {rank: text for rank in sorted(self._last) if (text := self._text_of(rank)) is not None}

    def last_of(self, store: TimedStore, rank: int) -> bytes | None:
        """Do as ``last`` for one rank."""
        self._sort(store)
        return self._text_of(rank)

    def has_withdrawn(self, rank: int) -> bool:
        """True if a rank had written entries and counts as one that has written nothing, as of the last ``last``."""
        return self._last.get(rank, (0, b""))[1] == _WITHDRAWN

    def _text_of(self, rank: int) -> bytes | None:
        _, text = self._last.get(rank, (0, _WITHDRAWN))
        if isinstance(text, WireError):
            raise WireError(*text.args)
        return None if text == _WITHDRAWN else text

    def _sort(self, store: TimedStore) -> None:
        try:
            self._ask_for_all(store)
        finally:
            with self._lock:
                while self._unread:
                    number, (by, text) = self._unread[0]
                    # An older entry may have been written later.
                    if by is not None and number > self._last.get(by, (0, b""))[0]:
                        self._last[by] = number, text
                    self._unread.popleft()  # after that: Ctrl-C may come in between

    def news(self, store: TimedStore) -> Iterator[LogEntry]:
        """Yield the entries that this process has not read yet, as far as the store answers.

        Raises:
            RuntimeError: The store is gone.
            WireError: An entry is not signed with this process's job key. It counts as read.
        """
        gone = None
        try:
            self._ask_for_all(store)
        except RuntimeError as error:
            gone = error
        while (entry := self._next()) is not None:
            yield entry
        if gone is not None:
            raise gone

    def _next(self) -> LogEntry | None:
        while self._unread:
            with contextlib.suppress(IndexError):  # another thread may have taken it
                number, (by, text) = self._unread.popleft()
                if not isinstance(text, WireError):
                    return LogEntry(f"{self._name}/{number}", by, text)
                self.refuse(text)
        return None

    def refuse(self, error: WireError) -> None:
        """Raise the error about an entry, once."""
        if (text := str(error)) not in self._refused:
            self._refused.add(text)
            raise error

    def _ask_for_all(self, store: TimedStore) -> None:
        while self._ask(store):
            pass

    def _ask(self, store: TimedStore) -> bool:
        """Take in entries; return True if there may be more."""
        with self._lock:
            new, missing = range(self._count + 1, self._count + 1 + self._at_once), sorted(self._unwritten)
            asked, others = missing[: self._at_once], missing[self._at_once :]
            found = store.entries(self._name, new, asked)
            if found is None:  # the more is asked for, the longer it takes
                self._at_once = max(1, self._at_once // 2)
                return False
            count, entries = found
            # In this order: after Ctrl-C in between an entry comes twice, rather than never.
            self._unread.extend([(number, one) for number, one in entries.items() if one is not None])
            self._unwritten = {*others, *(number for number, one in entries.items() if one is None)}
            self._count, self._at_once = count, min(2 * self._at_once, AT_ONCE)
            return count == new[-1]
