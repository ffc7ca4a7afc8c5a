"""Ranks that wait for one another in different calls: a message between two of them is awaited, and never comes.

A rank in a call of two waits until its partner has begun to send, or to receive, a message. A rank begins no message
while it is in another call. So if the partner is in a call of all ranks, which needs this rank, both wait for ever; and
so do ranks that wait for one another in a circle of calls of two. Each two ranks number their messages, so there is no
doubt, however long a message is on its way: the partner knows whether it has begun that one.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Container, Mapping

from easydist.liveness.page import OwnPage, Wait
from easydist.liveness.peer import Peer
from easydist.liveness.stored import decoded, in_store

SEND, RECEIVE = range(2)

LookUp = Callable[[int], Wait | None]
"""A function of a rank; it returns the wait of that rank."""

Read = Callable[[str, int | None], bytes | None]
"""A function that reads a key of the store, which one rank has written if that is given; None if it is not set."""

Write = Callable[[str, str], None]
"""A function that sets a key of the store."""


class Crossing:
    """One rank's messages to and from the others, and its wait for one of them.

    Args:
        rank: The rank of this process in the group.
        page: The page of this process; None if it has none.
        entry: The group's entry on it.

    Attributes:
        begun: The messages that this rank has begun since the ranks were connected, by kind and rank.
        wait: Its wait in the present call; None if it waits for no message.
    """

    def __init__(self, rank: int, page: OwnPage | None, entry: int) -> None:
        self._rank, self._page, self._entry = rank, page, entry
        self.begun = Counter[tuple[int, int]]()
        self.wait: Wait | None = None

    def begin(self, kind: int, rank: int) -> Wait:
        """Count a message, and return the wait for the other rank's part in it.

        Args:
            kind: ``SEND`` or ``RECEIVE``.
            rank: The other rank.
        """
        self.begun[kind, rank] += 1
        return Wait(rank, 1 - kind, self.begun[kind, rank])

    def show(self, wait: Wait) -> None:
        """Let the others see this wait until the call ends."""
        self.wait = wait
        if self._page is not None:
            self._page.wait(self._entry, wait)

    def end(self) -> None:
        """End the wait before the call ends."""
        if self.wait is not None:
            self.show(Wait(self.wait.partner, 0, 0))
        self.wait = None

    def is_in(self, circle: object) -> bool:
        """True if this rank's wait is one of a circle that another rank has found."""
        return isinstance(circle, list) and self.wait is not None and [self._rank, *self.wait[:3]] in circle

    def needs_me(self, peers: Mapping[int, Peer], number: int) -> int | None:
        """Return a rank that waits for this one, and so does not come to this call of all ranks; None if none does."""
        waiting = (rank for rank, peer in peers.items() if self.holds(rank, peer.waits()) and _is_before(peer, number))
        return next(waiting, None)

    def holds(self, rank: int, wait: Wait | None) -> bool:
        """True if this rank has not begun the message for which another one waits."""
        return wait is not None and wait.partner == self._rank and wait.number > self.begun[wait.kind, rank]

    def circle(self, look_up: LookUp) -> list[int]:
        """Return the ranks of the circle in which this one waits, if it is the lowest of them; else none.

        Each rank of a circle shows which rank before it waits for a message that it has not begun. It does so for as
        long as it waits itself, so once all show it, nothing can move.
        """
        ranks = self._seen(look_up)
        if not ranks or self.wait is None or not self.holds(before := ranks[-1], look_up(before)):
            return []
        if self.wait.held != before:
            self.show(self.wait._replace(held=before))
        waits = {rank: look_up(rank) for rank in ranks[1:]}
        all_show_it = all((wait := waits[two]) and wait.held == one for one, two in itertools.pairwise(ranks))
        return ranks if self._rank == min(ranks) and all_show_it and self._seen(look_up) == ranks else []

    def _seen(self, look_up: LookUp) -> list[int]:
        """Return the ranks that wait for one another in a circle, from this one on; none if they are in none."""
        ranks, wait = [self._rank], self.wait
        while wait is not None and wait.partner not in ranks:
            ranks.append(wait.partner)
            wait = look_up(wait.partner)
        return ranks if wait is not None and wait.partner == self._rank else []

    # In the store, for ranks that do not see one another's pages.

    def tell(self, write: Write, phase: int, number: int) -> None:
        """Tell for which message this rank waits, in this phase and after this call of all ranks."""
        if self.wait is not None:
            write(f"waits/{self._rank}", json.dumps([phase, number, *self.wait]))
            write(f"awaited/{self.wait.partner}", str(self._rank))

    def told(self, read: Read, rank: int, phase: int) -> tuple[int, Wait] | None:
        """Return the last call of all ranks of another rank, and the wait of which it has told after that."""
        if (text := read(key := f"waits/{rank}", rank)) is None:
            return None
        told_phase, number, *wait = decoded(in_store(key), text, (int,) * 6)
        return (number, Wait(*wait)) if told_phase == phase else None

    def needs_me_from_afar(self, read: Read, ranks: Container[int], phase: int, number: int) -> int | None:
        """Return the rank that has told this one last that it waits for it, if it does so instead of coming here."""
        if (text := read(key := f"awaited/{self._rank}", None)) is None:
            return None
        rank: int = decoded(in_store(key), text, int)
        told = self.told(read, rank, phase) if rank in ranks else None
        return rank if told is not None and told[0] < number and self.holds(rank, told[1]) else None


def _is_before(peer: Peer, number: int) -> bool:
    """True if a rank has not come to a call of all ranks. Asked after its wait was seen, it had not come then."""
    last = peer.number()
    return last is not None and last < number
