"""The rules by which the ranks of a group keep their calls in step, give one up, and reconnect.

The module does no I/O and uses no clock and no thread. Events come in as method calls, with the time as a number and
observations about other ranks as ``Heard``. The results are values: the cause for which a wait cannot succeed
(``Cause``), the duties of a rank that gives up (``Parting``), and the steps of a meeting (``Step``). ``Monitor`` and
``groups/`` carry them between ranks; ``tests/protocol`` runs the same code in a simulated world.
``docs/design/liveness.md`` states the rules.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping

from easydist.errors import EasydistError
from easydist.liveness.events import Announced, Do, Replies, Step
from easydist.liveness.rules import CallProtocol

CONNECTED = 120.0
"""Seconds within which ranks that have all come are connected."""

SHORTEST = 0.05
"""The shortest limit for connecting, in seconds: gloo treats a limit of zero as no limit."""

NOTHING = Announced(-1.0, 0)

Meeting = Generator[Step, Replies | None, list[Announced]]
"""The steps of a meeting, of which only ``ASK`` is answered. Returns the announcements of all ranks: the same call."""


class GroupProtocol(CallProtocol):
    """One rank's state in the protocol of a group, including how the ranks meet and reconnect."""

    def was_left_before(self) -> bool:
        """True if the other rank of this call had begun and left it before the ranks met last."""
        if self.peer is None or not self._met:
            return False
        other = self._met[self.peer]
        number = math.ceil(other.at) - 1 if other.partner is not None else math.ceil(other.at)
        ahead = other.turn_with(self.rank).after(self._turn)
        is_left = ahead > 0 or (ahead == 0 and other.partner != self.rank)
        return number > self.number or (number == self.number and other.partner is not None and is_left)

    def begin_meeting(self) -> EasydistError | None:
        """Make the phase odd; return the error that broke the old connections."""
        broken, self.broken = self.broken, None
        self.phase |= 1
        self._meetings += 1
        return broken

    def meeting(self) -> Meeting:
        """Meet all ranks in one call: announce this rank's call, and follow any later one that another rank announces.

        A rank that was interrupted in a call that the others have not reached yet is ahead of them.
        """
        told, last, others = NOTHING, self.at, self._told_nothing()
        while True:
            if told.at < last:
                told = Announced(last, self._meetings, self._partner, self._told_turns())
                yield Step(Do.ANNOUNCE, told)
            replies = yield Step(Do.ASK, ranks=[rank for rank, one in others.items() if one.at < told.at])
            if replies is not None and replies.is_passed:  # the others have connected without this rank, and meet again
                self.phase += 2
                told, last, others = NOTHING, max(last, told.at), self._told_nothing()
                continue
            others |= replies.announced if replies else {}
            yield Step(Do.GUARD, ranks=[rank for rank, one in others.items() if one.at < told.at])
            others = self._still_there(others)
            last = max(one.at for one in others.values())
            if told.at < last:
                yield Step(Do.LISTEN)  # they may have given up the call in which this rank is
                yield from self._follow(last)
            elif min(one.at for one in others.values()) < told.at:
                yield Step(Do.PAUSE)
            elif behind := _behind(others | {self.rank: told}):
                yield Step(Do.GIVE_UP if self.rank in behind else Do.PAUSE)
                others |= dict.fromkeys(behind, NOTHING)
            elif self._looks:  # a rank has ended: connecting would fail, and the next look says so
                yield Step(Do.PAUSE)
            else:
                yield Step(Do.LISTEN)
                if self._still_there(others) == others:
                    self._met = [others.get(rank, told) for rank in range(self.size)]
                    return self._met

    def _told_turns(self) -> tuple[tuple[int, int, int | None], ...]:
        return tuple((rank, *self._turn_with(rank)) for rank in {**(self._before or {}), **self._turns})

    def _told_nothing(self) -> dict[int, Announced]:
        return {rank: NOTHING for rank in range(self.size) if rank != self.rank}

    def _still_there(self, others: Mapping[int, Announced]) -> dict[int, Announced]:
        """Return the announcements, reset for ranks that have left again: they come back with their next call."""
        return {rank: one if one.meetings > self._over.get(rank, 0) else NOTHING for rank, one in others.items()}

    def _follow(self, at: float) -> Generator[Step, Replies | None, None]:
        """Move on to the later call that others are in; give up instead unless Ctrl-C made this rank miss it.

        A call of two is given up in any case: the other rank has left it before the call of all that this one has
        missed, and would take what is sent now for a message of a later call.
        """
        is_between = self.at > self.number
        if at > math.ceil(self.at):
            yield Step(Do.NOTICE)
            if is_between or not self.was_interrupted:
                yield Step(Do.GIVE_UP)
        self.number = math.ceil(at) - is_between
        self.at = self.number + 0.5 * is_between
        self._has_followed = True
        yield Step(Do.MOVE)

    def connect_limit(self, now: float) -> float:
        """Return the seconds that connecting may take; it takes almost none unless a rank has left again.

        A rank whose attempt to connect fails hears nothing meanwhile. With all its time it would come to the next call
        only when the others, whose limit is the same, give that one up in turn. So it takes half.
        """
        return min(max((self._ends_at - now) / 2, SHORTEST), CONNECTED)

    def end_meeting(self) -> None:
        """Make the phase even: the ranks are connected, and the others wait for this rank's next message."""
        self.broken = self._left_at = None
        if self._partner is None:
            self._before = {}
        self.phase += 1
        self.is_awaited = True


def _behind(told: Mapping[int, Announced]) -> list[int]:
    """Return the ranks in a call with one partner that has left that call and gone on; they raise first."""
    return [rank for rank, one in told.items() if one.partner is not None and _is_past(rank, one, one.partner, told)]


def _is_past(rank: int, one: Announced, partner: int, told: Mapping[int, Announced]) -> bool:
    other = told[partner]
    ahead = other.turn_with(rank).after(one.turn_with(partner))
    return other.partner is None or ahead > 0 or (ahead == 0 and other.partner != rank)
