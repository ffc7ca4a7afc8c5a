"""The inputs and outputs of a group's protocol, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from easydist.liveness.report import NO_TURN, Report, Turn


class Why(enum.Enum):
    """The reasons why a wait cannot succeed."""

    REPORTED = enum.auto()
    ENDED = enum.auto()
    LOST = enum.auto()
    LEFT = enum.auto()
    BROKE = enum.auto()
    UNREACHABLE = enum.auto()
    LATE = enum.auto()


class Cause(NamedTuple):
    """The cause for which a wait cannot succeed.

    Attributes:
        why: A peer has reported a failure, ended with an exception, ended, or left the group; its connection broke, or
            its host does not answer; or time is over.
        rank: The rank of the peer; -1 if time is over.
        report: The peer's failure report.
        is_earlier: True if the peer gave up a call that this rank had left before, or has missed.
    """

    why: Why
    rank: int = -1
    report: Report | None = None
    is_earlier: bool = False


class Heard(NamedTuple):
    """The observations about another rank in one look.

    Attributes:
        rank: The rank in the group.
        report: Its failure report.
        is_ours: True if the report is about this group; None if the rank has not been met: its report is from the
            group's store.
        has_ended: True if its process has ended.
        has_finished: True if it has left this rank's call after sending all its data.
        has_left: True if it has left the group, so that it sends nothing more.
        blocks: True if this wait needs data that had not come from it before the look.
    """

    rank: int
    report: Report | None = None
    is_ours: bool | None = True
    has_ended: bool = False
    has_finished: bool = False
    has_left: bool = False
    blocks: bool = False


class Parting(enum.Enum):
    """The duties of a rank that gives up."""

    NOTHING = enum.auto()
    DISCONNECT = enum.auto()
    TELL = enum.auto()
    """Leave a failure report, and disconnect."""


class Do(enum.Enum):
    """The kinds of steps of a meeting."""

    ANNOUNCE = enum.auto()
    ASK = enum.auto()
    GUARD = enum.auto()
    LISTEN = enum.auto()
    NOTICE = enum.auto()
    GIVE_UP = enum.auto()
    MOVE = enum.auto()
    PAUSE = enum.auto()


class Announced(NamedTuple):
    """The announcement of a rank to the others during a meeting.

    Attributes:
        at: The call that the rank is in.
        meetings: The number of its meetings so far, so that ranks connect in the same one.
        partner: The only other rank in its call; None if all ranks take part.
        turns: The partners, each with the fields of the ``Turn`` of the last call with it.
    """

    at: float
    meetings: int
    partner: int | None = None
    turns: tuple[tuple[int, int, int | None], ...] = ()

    def turn_with(self, partner: int) -> Turn:
        """Return the number of the last call with a partner."""
        return next((Turn(since, before) for rank, since, before in self.turns if rank == partner), NO_TURN)


class Replies(NamedTuple):
    """The announcements of the ranks that were asked.

    Attributes:
        announced: The announcements by rank.
        is_passed: True if this meeting is over, and the next one has begun.
    """

    announced: Mapping[int, Announced]
    is_passed: bool = False


class Step(NamedTuple):
    """The next step of a rank that meets the others.

    Attributes:
        do: In the order of ``Do``: write ``told`` for the others; read the announcements of ``ranks``; end the wait for
            ``ranks`` if it cannot succeed; raise the failure that any rank has reported; notice signals; raise, because
            the others have given the call up; record that this rank is in another call; wait a moment.
        told: The announcement to write.
        ranks: The ranks to ask, or to wait for.
    """

    do: Do
    told: Announced = Announced(0.0, 0)
    ranks: Sequence[int] = ()
