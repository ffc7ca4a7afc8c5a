"""What goes into the protocol of a group, and what comes out of it: plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from easydist.liveness.report import Report


class Why(enum.Enum):
    """Why a wait is in vain."""

    REPORTED = enum.auto()
    ENDED = enum.auto()
    LOST = enum.auto()
    BROKE = enum.auto()
    LATE = enum.auto()


class Cause(NamedTuple):
    """Why a wait is in vain.

    Attributes:
        why: A peer has reported a failure, ended with an exception, or ended; its connection broke; time is over.
        rank: The peer; -1 where time is over.
        report: What it has reported.
        is_earlier: True if it gave up a call that this rank had left before, or has missed.
    """

    why: Why
    rank: int = -1
    report: Report | None = None
    is_earlier: bool = False


class Heard(NamedTuple):
    """What is to be heard of another rank in one look.

    Attributes:
        rank: In the group.
        report: Its failure report.
        is_ours: True if the report is about this group; None: the rank has not been met, and this is the group's store.
        has_ended: Its process has ended.
        has_finished: It has left this rank's call, and sent all of it before.
    """

    rank: int
    report: Report | None = None
    is_ours: bool | None = True
    has_ended: bool = False
    has_finished: bool = False


class Parting(enum.Enum):
    """What a rank that gives up has to do."""

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
    """What a rank tells the others while it meets them.

    Attributes:
        at: The call that it is in.
        attempt: Counts its meetings, so that ranks connect in the same one.
        partner: The only other rank in its call; None: all take part.
        turns: Partners, and how many calls with each it has begun since the last one of all ranks.
    """

    at: float
    attempt: int
    partner: int | None = None
    turns: tuple[tuple[int, int], ...] = ()


class Answer(NamedTuple):
    """What the ranks that were asked have announced.

    Attributes:
        announced: By rank.
        is_passed: True if this meeting is over, and the next one has begun.
    """

    announced: Mapping[int, Announced]
    is_passed: bool = False


class Step(NamedTuple):
    """What a rank does next while it meets the others.

    Attributes:
        do: Write what is ``told`` for the others; read what ``ranks`` have announced; end the wait for ``ranks`` if it
            is in vain; raise what any rank has reported; notice signals; raise, as the others have given the call up;
            say that this rank is in another call; wait a moment.
        told: What is announced.
        ranks: Those asked, or awaited.
    """

    do: Do
    told: Announced = Announced(0.0, 0)
    ranks: Sequence[int] = ()
