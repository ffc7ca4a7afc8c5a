"""Circles of ranks that wait for one another in ``split``, as they write it to a store.

The rule is that of ``easydist.shm.cycles``: a circle counts once each of its ranks has looked at it again. A rank
counts its looks only while it sees a circle, so that ranks that wait for a while write nothing more.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed import Store

from easydist.comms.failures import UNMADE, CommDisagreement
from easydist.liveness.stored import decoded, in_store
from easydist.liveness.timed_store import TimedStore
from easydist.shm.cycles import Looks, circle_of, reached

_LOOK_EVERY = 0.25
"""Seconds between two looks."""

_FORM = {"call": str, "ranks": [int], "name": str, "looks": int, "different": str}


class Splits:
    """The waits of one rank in ``split``: they end if ranks for which it waits have passed lists that differ.

    Args:
        store: The store of the communicator that is split.
        rank: The rank of this process in it.
        size: Its number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = TimedStore(store), rank, size
        self._mine: dict[str, Any] = {}
        self._looks, self._look_at = Looks(), 0.0
        self._seen = ""  # the last circle; its ranks may find it first, and go
        self._heard: set[str] = set()

    @contextlib.contextmanager
    def waiting(self, ranks: Sequence[int], name: str) -> Iterator[None]:
        """Show the others for which ranks this one waits, and with which list.

        Args:
            ranks: The list.
            name: The name of the new communicator.
        """
        self._mine = {"call": os.urandom(8).hex(), "ranks": [*ranks], "name": name, "different": ""}
        self._seen = ""
        self._write()
        try:
            yield
        finally:
            if not self._mine["different"]:
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._store.delete(f"split/{self._rank}")

    def _write(self) -> None:
        self._store.set(f"split/{self._rank}", json.dumps(self._mine | {"looks": self._looks.count}))

    def look(self) -> None:
        """Look at the lists of the others, from time to time.

        Raises:
            CommDisagreement: Ranks with different lists wait for one another.
        """
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY
        known = {rank: told for rank in range(self._size) if (told := self._of(rank)) is not None}
        waiting = {rank: told for rank, told in known.items() if not told["different"]}
        if circle := self._circle_in(waiting):
            self._seen = "different/" + "-".join(known[rank]["call"] for rank in circle)
            if self._looks.are_enough(circle, {rank: (told["call"], told["looks"]) for rank, told in known.items()}):
                self._store.set_first(self._seen, _text(known, circle))
            self._write()
        for found in filter(None, [self._seen, *self._ended(known)]):
            if (text := self._store.get(found)) is not None:
                self._mine["different"] = found
                self._heard.add(found)
                self._write()  # it stays: a rank of the list that comes later hears of it, too
                raise CommDisagreement(text.decode())

    def _ended(self, known: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """Return the circles because of which ranks have ended their wait for this one, before it came."""
        awaited = [told for rank, told in known.items() if rank in self._mine["ranks"] and self._rank in told["ranks"]]
        return [told["different"] for told in awaited if told["different"] not in self._heard]

    def _of(self, rank: int) -> dict[str, Any] | None:
        text = self._store.get(key := f"split/{rank}", rank)
        told: dict[str, Any] | None = None if text is None else decoded(in_store(key), text, _FORM)
        return told

    def _circle_in(self, known: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Return the ranks of the first circle for which this rank waits, in order; it may be one of them."""

        def waits(one: int, other: int) -> bool:
            if one not in known or other not in known:
                return False
            return other in known[one]["ranks"] and known[one]["ranks"] != known[other]["ranks"]

        for rank in sorted(reached(self._rank, self._size, waits)):
            if circle := circle_of(rank, self._size, waits):
                return sorted(circle)
        return []


def _text(known: Mapping[int, Mapping[str, Any]], circle: Sequence[int]) -> str:
    rows = [f"  rank {rank}: split({known[rank]['ranks']}, {known[rank]['name']!r})" for rank in circle]
    head = "split: ranks wait for one another forever, since their lists differ"
    return "\n".join([head, *rows, "Every member has to pass the same list, in the same order.", UNMADE])
