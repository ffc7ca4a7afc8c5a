"""Logs in a store, to which ranks append: to read what all of them have written takes three questions at most.

So ranks that meet do not ask for the key of each other rank: W of them would ask W² times. A log has the keys
``log/1``, ``log/2``, … in the order of the entries, and a counter, ``log``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from easydist.liveness.stored import damaged, in_store
from easydist.liveness.timed_store import POLL, TimedStore

_MOST_LOOKS = 50_000
"""The looks a second of all ranks together that a store has to answer; it can answer some more."""

_WITHDRAWN = "\0withdrawn"


class Entry(NamedTuple):
    """One entry of a log.

    Attributes:
        key: Its key in the store.
        by: The rank that has written it; None if another program has.
        text: Its text.
    """

    key: str
    by: int | None
    text: bytes


def pause(size: int) -> float:
    """Return the seconds between two looks of each of ``size`` ranks that wait for entries."""
    return max(POLL, size / _MOST_LOOKS)


class Log:
    """One process's view of a log.

    Args:
        store: The store.
        name: The name of the log.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = TimedStore(HashStore())
        >>> log, other = Log(store, "log"), Log(store, "log")
        >>> log.append(1, "first")
        >>> list(other.news())
        [Entry(key='log/1', by=1, text=b'first')]
        >>> list(other.news())
        []
    """

    def __init__(self, store: TimedStore, name: str) -> None:
        self._store, self._name = store, name
        self._count, self._unread = 0, dict[int, bytes | None]()
        self._last: dict[int, bytes] = {}

    def append(self, rank: int, text: str) -> None:
        """Append an entry; later, if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        self._store.append(self._name, rank, text)

    def withdraw(self, rank: int) -> None:
        """Let a rank count as one that has written nothing; as ``append``."""
        self.append(rank, _WITHDRAWN)

    def last(self) -> Mapping[int, bytes]:
        """Return the last entry of each rank, as far as the store answers.

        Raises:
            RuntimeError: The store is gone.
            WireError: An entry is damaged, or not signed with this process's job key.
        """
        for key, rank, text in self.news():
            if rank is None:
                raise damaged(in_store(key), text)
            self._last[rank] = text
            if text == _WITHDRAWN.encode():
                del self._last[rank]
        return self._last

    def news(self) -> Iterator[Entry]:
        """Yield the entries that this process has not read yet, as far as the store answers.

        Raises:
            RuntimeError: The store is gone.
            WireError: An entry is not signed with this process's job key. It counts as read.
        """
        missing = [number for number, value in self._unread.items() if value is None]
        self._count, values = self._store.entries(self._name, self._count, missing)
        self._unread |= values
        for number, value in tuple(self._unread.items()):
            if value is not None:
                del self._unread[number]
                key, (rank, _, sealed) = f"{self._name}/{number}", value.partition(b" ")
                by = int(rank) if rank.isdigit() else None
                yield Entry(key, by, self._store.opened(key, value if by is None else sealed, by))
