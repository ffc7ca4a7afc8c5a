"""Results that are kept for the next calls with the same key: in all caches whose results the callers make."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class _Kept(Generic[V]):
    """The result of a key, and when it was used last."""

    __slots__ = ("key", "used", "value")

    def __init__(self, key: Hashable, used: int, value: V) -> None:
        self.key, self.used, self.value = key, used, value


class Recent(Generic[V]):
    """The results of the keys that were used last. A key without a result takes no place.

    Any thread may use it. Once it is full, a new key replaces the quarter that was used longest ago, so that a program
    in which no key comes twice does not search for the oldest one each time.

    Args:
        most: The most results to keep.

    Example:
        >>> kept = Recent(2)
        >>> for key in "abac":
        ...     if kept.find(key) is None:
        ...         kept.keep(key, key.upper())
        >>> kept.find("a"), kept.find("c"), kept.find("b")
        ('A', 'C', None)

    Cost: one hash of the key for ``find``, and another one for ``keep``.
    """

    __slots__ = ("_kept", "_most", "_tick")

    def __init__(self, most: int) -> None:
        self._kept: dict[Hashable, _Kept[V]] = {}
        self._most, self._tick = most, itertools.count().__next__

    def find(self, key: Hashable) -> V | None:
        """Return the result of a key; None if there is none."""
        if (kept := self._kept.get(key)) is None:
            return None
        kept.used = self._tick()
        return kept.value

    def keep(self, key: Hashable, value: V) -> None:
        """Keep the result of a key, in place of an earlier one."""
        if len(self._kept) >= self._most and key not in self._kept:
            # Not the items: a tuple for each may begin a collection of garbage, in which other threads change the dict.
            oldest = sorted(self._kept.values(), key=operator.attrgetter("used"))
            for one in oldest[: -(-self._most // 4)]:
                self._kept.pop(one.key, None)
        self._kept[key] = _Kept(key, self._tick(), value)
