"""Ranks that wait for one another in different calls: a message between two of them is awaited, and never comes.

A rank in a call of two waits until its partner has begun to send, or to receive, a message. A rank begins no message
while it is in another call. So if the partner is in a call of all ranks, which needs this rank, both wait forever; and
so do ranks that wait for one another in a circle of calls of two. Each two ranks number their messages, so there is no
doubt, however long a message is on its way: the partner knows whether it has begun that one.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping

from easydist.liveness.page import Held, MessageWait, OwnPage
from easydist.liveness.peer import Peer
from easydist.liveness.stored import decoded, in_store

SEND, RECEIVE = range(2)
"""The kinds of messages. One that has come early is counted once its call begins: its sender waits for that, too."""

MOST = 256
"""The most ranks of a circle that is looked for, so that a report can name their waits."""

Seen = tuple[MessageWait, Held] | None
LookUp = Callable[[int], Seen]
"""A function of a rank; it returns the wait of that rank, and which other wait it holds up."""

ReadKey = Callable[[str, int | None], bytes | None]
"""A function that reads a key of the store, which one rank has written if that is given; None if it is not set."""

WriteKey = Callable[[str, str], None]
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
        is_told: True if the store has a wait of this rank.
    """

    def __init__(self, rank: int, page: OwnPage | None, entry: int) -> None:
        self._rank, self._page, self._entry = rank, page, entry
        self.begun = Counter[tuple[int, int]]()
        self.wait: MessageWait | None = None
        self.is_told = False
        self._held: Held = None
        self._lock = threading.Lock()  # the watchdog looks at waits in C++ while this rank may begin the next one

    def begin(self, kind: int, rank: int) -> MessageWait:
        """Count a message, and return the wait for the other rank's part in it.

        Args:
            kind: ``SEND`` or ``RECEIVE``.
            rank: The other rank.
        """
        self.begun[kind, rank] += 1
        return MessageWait(rank, 1 - kind, self.begun[kind, rank])

    def calls(self) -> dict[int, int]:
        """Return how many messages the calls of this rank have begun since the ranks were connected, by rank.

        Two ranks have the same number as soon as each has received all that the other one has sent.
        """
        calls = dict[int, int]()
        for (_, rank), count in self.begun.items():
            calls[rank] = calls.get(rank, 0) + count
        return calls

    def show(self, wait: MessageWait) -> None:
        """Let the others see this wait until the call ends."""
        with self._lock:
            self.wait, self._held = wait, None
            if self._page is not None:
                self._page.wait(self._entry, wait)

    def end(self) -> None:
        """End the wait before the call ends."""
        if self.wait is not None:
            self.show(MessageWait(self.wait.partner, 0, 0))
        self.wait = None

    def is_in(self, circle: object) -> bool:
        """True if this rank's wait is one of a circle that another rank has found."""
        return isinstance(circle, list) and self.wait is not None and [self._rank, *self.wait] in circle

    def needs_me(self, peers: Mapping[int, Peer], number: int) -> int | None:
        """Return a rank that waits for this one, and so does not come to this call of all ranks; None if none does."""
        waiting = (rank for rank, peer in peers.items() if self.holds(rank, peer.waits()) and _is_before(peer, number))
        return next(waiting, None)

    def holds(self, rank: int, seen: Seen) -> bool:
        """True if this rank has not begun the message for which another one waits."""
        if seen is None or seen[0].partner != self._rank:
            return False
        return seen[0].number > self.begun[seen[0].kind, rank]

    def circle(self, look_up: LookUp) -> dict[int, MessageWait]:
        """Return the waits of the circle in which this rank waits, by rank, if it is the lowest of them; else none.

        Each rank of a circle shows for which message the rank before it waits, if it has not begun that one. This stays
        true for as long as it waits itself, so once all show it, nothing can move.
        """
        mine = self.wait
        if mine is None or not (ranks := self._seen(mine, look_up)):
            return {}
        seen = {self._rank: (mine, self._held), **{rank: look_up(rank) for rank in ranks[1:]}}
        before = ranks[-1]
        if not self.holds(before, seen[before]) or not self._show_held(mine, before, seen[before]):
            return {}
        all_show_it = all(_is_held(one, seen[one], seen[two]) for one, two in itertools.pairwise(ranks))
        found = {rank: one[0] for rank, one in seen.items() if one is not None}
        return found if self._rank == min(ranks) and all_show_it and self._seen(mine, look_up) == ranks else {}

    def _seen(self, mine: MessageWait, look_up: LookUp) -> list[int]:
        """Return the ranks that wait for one another in a circle, from this one on; none if they are in none."""
        ranks, partner = [self._rank], mine.partner
        while partner != self._rank:
            if partner in ranks or len(ranks) == MOST or (seen := look_up(partner)) is None:
                return []
            ranks.append(partner)
            partner = seen[0].partner
        return ranks

    def _show_held(self, mine: MessageWait, rank: int, seen: Seen) -> bool:
        """Show that this rank holds up another one; False if its own wait has ended meanwhile."""
        assert seen is not None
        with self._lock:
            if self.wait is not mine:
                return False
            if (held := (rank, seen[0].number, seen[0].kind)) != self._held:
                self._held = held
                if self._page is not None:
                    self._page.holds(self._entry, rank, seen[0])
        return True

    # In the store, for ranks that do not see one another's pages.

    def tell(self, write: WriteKey, call: Callable[[], tuple[int, int]]) -> None:
        """Tell for which message this rank waits, in a phase and after a call of all ranks, which ``call`` returns."""
        if (mine := self.wait) is None:
            return
        text = json.dumps([*call(), *mine, *(self._held or (-1, 0, 0))])
        if self.wait is mine:  # else the next call has begun, which may have another number
            self.is_told = True
            write(f"waits/{self._rank}", text)
            write(f"awaited/{mine.partner}", str(self._rank))

    def told(self, read: ReadKey, rank: int, phase: int) -> tuple[int, Seen] | None:
        """Return the last call of all ranks of another rank, and the wait of which it has told after that."""
        if not (text := read(key := f"waits/{rank}", rank)):
            return None
        told_phase, number, *wait = decoded(in_store(key), text, (int,) * 8)
        held = None if wait[3] < 0 else (wait[3], wait[4], wait[5])
        return (number, (MessageWait(*wait[:3]), held)) if told_phase == phase else None

    def needs_me_from_afar(self, read: ReadKey, ranks: Container[int], phase: int, number: int) -> int | None:
        """Return the rank that has told this one last that it waits for it, if it does so instead of coming here."""
        if (text := read(key := f"awaited/{self._rank}", None)) is None:
            return None
        rank: int = decoded(in_store(key), text, int)
        told = self.told(read, rank, phase) if rank in ranks else None
        return rank if told is not None and told[0] < number and self.holds(rank, told[1]) else None

    def untell(self, write: WriteKey) -> None:
        """Take back what the store has: a later group may use the same one."""
        if self.is_told:
            self.is_told = False
            write(f"waits/{self._rank}", "")


def _is_held(rank: int, seen: Seen, after: Seen) -> bool:
    """True if the rank after another one shows that it holds up the wait in which that is seen."""
    return seen is not None and after is not None and after[1] == (rank, seen[0].number, seen[0].kind)


def _is_before(peer: Peer, number: int) -> bool:
    """True if a rank has not come to a call of all ranks. Asked after its wait was seen, it had not come then."""
    last = peer.number()
    return last is not None and last < number
