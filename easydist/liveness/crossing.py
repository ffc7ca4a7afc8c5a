"""Ranks that wait for one another in different calls: a message between two of them is awaited, and never comes.

A rank in a call of two waits until its partner has begun to send, or to receive, a message. A rank begins no message
while it is in another call. So if the partner is in a call of all ranks, which needs this rank, both wait for ever; and
so do ranks that wait for one another in a circle of calls of two. Each two ranks number their messages, so there is no
doubt, however long a message is on its way: the partner knows whether it has begun that one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from easydist.liveness.page import OwnPage, Wait
from easydist.liveness.peer import Peer

SEND, RECEIVE = range(2)

LookUp = Callable[[int], Wait | None]
"""A function of a rank; it returns the wait of that rank."""


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


def _is_before(peer: Peer, number: int) -> bool:
    """True if a rank has not come to a call of all ranks. Asked after its wait was seen, it had not come then."""
    last = peer.number()
    return last is not None and last < number
