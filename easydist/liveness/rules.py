"""The pure rules by which a rank judges its observations of the others during its calls, and gives a call up."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType

from easydist.errors import EasydistError
from easydist.liveness.events import Announced, Cause, Heard, Parting, Why
from easydist.liveness.report import EXCEPTION, INTERRUPT, NO_TURN, Report, Turn

GRACE = 1.5
"""Seconds after the loss of its connection in which a process has to end or to post its failure report."""

UNMET_GRACE = 0.5
"""The same for a process that has not been met: its end cannot be seen, and its report was in the store before."""

LISTEN_EVERY = 1.0
"""Seconds between two looks for the reports of ranks on other hosts."""

IDLE = 0.05
"""Seconds without a call after which this process may have missed reports of its peers."""

APART = 0.05
"""Seconds since the last call began after which others may have come to the current one, and given it up."""

PATIENCE = 0.5
"""Seconds within which a store answers, if it answers at all."""

NOT_IN_TIME = float("inf")

_NONE: Mapping[int, int] = MappingProxyType({})

_LOOKS, _LOOKS_OF_TWO = 2, 5
"""The looks at a rank that has ended, or left, until the wait is hopeless; the second is for calls of two ranks."""

Explaining = Generator[float, tuple[float, bool, Iterable[Heard]], Cause]
"""Yields the seconds left for looking. Takes the time, True if the store is silent, and the observations.

Returns the cause for which a connection broke.
"""


class CallProtocol:
    """One rank's state in the protocol of a group: its calls, and its observations of the others.

    Args:
        rank: The rank of this process in the group.
        size: The number of processes in the group.

    Attributes:
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        number: The number of calls of all ranks so far; calls between only two ranks are not counted.
        at: The number of the call that began last; halfway between two numbers for a call between only two ranks.
        phase: Becomes odd whenever the ranks begin to reconnect, and even once they are connected; it never falls.
        peer: The only other rank that takes part in the call; None if all ranks do.
        broken: The error that ended the group's exchanges; None while all is well.
        was_interrupted: True if Ctrl-C has come since the last call ended: this rank may have missed a call.
        is_awaited: True if others wait for the data that this rank sends in its call.
        is_fresh: True if nothing of this rank's call has been exchanged yet.
        is_one_way: True if a call of all ranks leaves out the headers, so that this rank may not need all others.
        is_promised: True if the other rank of a call of two has posted all that this one waits for.
        waits: A counter that rises at the beginning and at the end of every wait in C++; even outside of waits.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.number, self.at, self.phase, self.waits = 0, 0.0, 0, 0
        self.peer: int | None = None
        self.broken: EasydistError | None = None
        self.was_interrupted = False
        self.is_awaited, self.is_fresh, self.is_promised = False, True, False
        self.is_one_way = False
        self._has_followed = False  # True if this rank, in its call, has moved on to the later call of the others
        self._partner: int | None = None  # the same as peer, but not reset while the call reconnects all ranks
        # The turn of the call with the partner; and for each partner ``Turn.since`` and ``Turn.before``.
        self._turn, self._turns = NO_TURN, dict[int, int]()
        self._before: Mapping[int, int] | None = _NONE
        self._meetings, self._met = 0, list[Announced]()
        self._over = dict[int, int]()  # for each rank the number of the last meeting that it has left
        self._left_at: float | None = None
        self._looks = dict[int, int]()  # for each rank that has ended or left, the looks at it in this call
        self._seen_left: set[int] = set()
        self._limit = self._began = self._ended = self._exchanged = 0.0
        self._extended, self._is_limit_given = 0.0, False
        self._deadline = self._warn_at = self._listen_at = NOT_IN_TIME

    # Calls.

    def begin_call(
        self,
        now: float,
        limit: float,
        warn_after: float,
        peer: int | None = None,
        is_turn: bool = True,
        begun: Mapping[int, int] = _NONE,
    ) -> bool:
        """Begin a call; return True if this rank may have missed reports of the others (see ``missed``).

        Args:
            now: The current time.
            limit: The seconds that the call may take.
            warn_after: The seconds after which its wait is logged.
            peer: The only other rank that takes part; None if all ranks do.
            is_turn: False if ``peer`` makes no call that belongs to this one.
            begun: For each rank, the messages begun with it since the ranks were connected; for calls of all ranks.
        """
        self.peer = self._partner = peer
        if self._looks:
            self._looks.clear()
        self.is_fresh, self.is_promised, self._has_followed = True, False, False
        self.is_one_way = False
        self._limit, self._began, self._warn_at, self._listen_at = limit, now, now + warn_after, now + LISTEN_EVERY
        if peer is None:
            self._turns.clear()
            self._before = begun if self.broken is None else None  # after an error, ranks leave out calls
            number = self.number + 1
            # At once, as an exception may strike between two lines: the others wait for a call that is counted.
            self.number, self.at, self.is_awaited, self._deadline = number, float(number), True, now + limit
        else:
            self.at = self.number + 0.5
            self.is_awaited, self._deadline = False, now + limit
            self._turns[peer] = self._turns.get(peer, 0) + is_turn
            self._turn = self._turn_with(peer)
        return self.broken is None and (self.was_interrupted or now - self._ended > IDLE)

    def _turn_with(self, partner: int) -> Turn:
        """Return the number of the last call with a partner."""
        before = None if self._before is None else self._before.get(partner, 0)
        return Turn(self._turns.get(partner, 0), before)

    def end_call(self, now: float) -> None:
        """End the call."""
        self._deadline = self._warn_at = NOT_IN_TIME
        self._ended, self.was_interrupted = now, False

    def time_left(self, now: float) -> float | None:
        """Return the seconds until the call's time is over; None outside of calls."""
        return None if self._deadline == NOT_IN_TIME else max(0.0, self._ends_at - now)

    @property
    def _ends_at(self) -> float:
        return self._deadline if self._is_limit_given else max(self._deadline, self._extended)

    def exchanged(self, now: float) -> float:
        """Record that the headers of all ranks have arrived; return the seconds since the previous such call began.

        If that is more than ``APART``, a rank may have waited and given up before the last one came: the headers that
        it had sent arrive all the same. No rank can have left the previous call before this one began it. When its
        headers arrived is not known to a process that was stopped then. The clock is the monotonic one, because the
        wall clock may be set in between.
        """
        before, self._exchanged = self._exchanged, self._began
        return now - before

    def listens_after(self, now: float, apart: float, seems_late: bool) -> bool:
        """True if this rank also has to read the reports of other hosts from the store.

        Args:
            now: The current time.
            apart: The result of ``exchanged``.
            seems_late: True if a rank came late by the wall clocks of the hosts, which may be wrong.
        """
        return seems_late or apart > LISTEN_EVERY or now - self._began > APART

    def tells_of(self, is_exception: bool, is_shared: bool) -> bool:
        """True if this rank has to report the error that ends its call to the others.

        Args:
            is_exception: True if the error is an ``Exception``; Ctrl-C is not.
            is_shared: True if all ranks raise the error.
        """
        return not is_shared and (self.is_awaited or not is_exception)

    # Looks at the other ranks.

    def hinges_on_signals(self, report: Report | None) -> bool:
        """True if the meaning of a report may depend on whether Ctrl-C has reached this process.

        The caller then has to make sure that this is known before it judges the report.
        """
        return report is not None and self._is_interrupt_of_this_call(report)

    def judge(self, heard: Heard) -> Cause | None:
        """Return the cause that a rank's report is for this rank's call; None if it is none."""
        report = heard.report
        if report is None:
            return None
        if report.kind == EXCEPTION:
            return Cause(Why.ENDED, heard.rank, report)
        is_earlier, is_reconnecting = self._is_earlier(report), self.phase % 2 == 1
        if report.is_final:
            return None if heard.is_ours is False else Cause(Why.REPORTED, heard.rank, report)
        is_ours = is_reconnecting or report.number < self.at + 1 if heard.is_ours is None else heard.is_ours
        if not self._is_of_this_phase(report) or not is_ours:
            return None
        if is_reconnecting and is_earlier:  # the report is about an attempt to reconnect that ended before this one
            self._over[heard.rank] = max(report.meetings, self._over.get(heard.rank, 0))
            return None
        return Cause(Why.REPORTED, heard.rank, report, is_earlier)

    def _is_of_this_phase(self, report: Report) -> bool:
        """True unless the ranks have reconnected since the report; a rank may also have left while they connected."""
        if report.phase == self.phase - 1 and self._met:
            return report.meetings >= self._met[report.by].meetings
        return report.phase >= self.phase

    def _is_earlier(self, report: Report) -> bool:
        """True if a report is about an earlier call, or about a call that this rank missed because of Ctrl-C."""
        if self._is_interrupt_of_this_call(report):
            return self.was_interrupted and not self._has_followed
        return report.number < self.at or (report.number == self.at and self._is_of_others(report))

    def _is_interrupt_of_this_call(self, report: Report) -> bool:
        return report.kind == INTERRUPT and report.number == self.at and not self._is_of_others(report)

    def _is_of_others(self, report: Report) -> bool:
        """True if a report is about a call of another pair of ranks, or about an earlier call of this rank's pair."""
        if report.peer is None or self._partner is None:
            return False
        return {report.by, report.peer} != {self.rank, self._partner} or self._turn.after(report.turn) > 0

    @property
    def phases(self) -> tuple[int, ...]:
        """The phases with reports about the current connections: a rank may have left while the others connected."""
        return (self.phase,) if self.phase % 2 or not self.phase else (self.phase, self.phase - 1)

    def may_matter(self, report: Report) -> bool:
        """True unless a report is about old connections."""
        return report.is_final or report.phase >= self.phase - 1

    def look(self, heard: Iterable[Heard]) -> Cause | None:
        """Return the cause for which the wait cannot succeed, by the observations of the others; None if there is none.

        Args:
            heard: The observations of the awaited ranks, and of those that have given up this call or an earlier one.
        """
        return _first((None if self._left_after(one) else self.judge(one)) or self._end_of(one) for one in heard)

    def _left_after(self, heard: Heard) -> bool:
        """True if a rank has left the group for good after sending all its data of this rank's call.

        It has left outside of calls, or in a later call of two. Numbers of calls say so only if all ranks count all
        calls: those of communicators, and messages of groups of torch, are not counted, or on some ranks only. Data
        that this wait still needs at the next look says the opposite in any case. A rank that had given up a call
        before it left has not come back to that one.
        """
        report = heard.report
        if report is None or not report.is_final:
            return False
        if heard.blocks:
            if heard.rank in self._seen_left:
                return False
            self._seen_left.add(heard.rank)
        return _since(report) > self.at and report.number % 1 > 0  # not in a call of all ranks

    def _end_of(self, heard: Heard) -> Cause | None:
        """Return the loss of a peer if it had already ended, or left the group, at earlier looks.

        One look is not enough: data that the peer sent before that may have arrived since. A peer that has left still
        delivers messages that it has posted for this rank alone, and calls of two ranks have no numbers by which to
        know whether it has posted one; so they look more often.
        """
        why = Why.LOST if heard.has_ended else Why.LEFT if heard.has_left and not self.is_promised else None
        if why is None:
            return None
        self._looks[heard.rank] = looks = self._looks.get(heard.rank, 0) + 1
        enough = _LOOKS_OF_TWO if why is Why.LEFT and self.peer is not None else _LOOKS
        return Cause(why, heard.rank) if looks >= enough else None

    def listens(self, now: float) -> bool:
        """True if it is time to read the reports of other hosts from the store."""
        if now < self._listen_at:
            return False
        self._listen_at = now + LISTEN_EVERY
        return True

    def is_late(self, now: float) -> bool:
        """True if the call's time is over."""
        return now >= self._ends_at

    @property
    def limit(self) -> float:
        """The seconds that the call may take, extended by the time in bodies."""
        return self._limit if self._is_limit_given else max(self._limit, self._extended - self._began)

    def extend(self, now: float) -> None:
        """Let the group's limit count from now on, because an awaited rank is in a body that may take any time.

        A limit that the call has set itself stays as it is. The deadline is not changed: another thread may be ending
        the call, and for the next one, which begins later, this extension has no effect.
        """
        self._extended = now + self._limit

    def warns(self, now: float, warn_after: float) -> bool:
        """True if it is time to log the wait."""
        if now < self._warn_at:
            return False
        self._warn_at = now + warn_after
        return True

    def missed(self, heard: Iterable[Heard]) -> Cause | None:
        """Return the cause for reconnecting without an error, or None if there is no need to reconnect.

        The cause is that others have left a call that this rank had ended or missed.
        """
        cause = _first(self.judge(one) for one in heard)
        return cause if cause is not None and cause.is_earlier else None

    def check(self, heard: Iterable[Heard]) -> Cause | None:
        """Return the cause for which another rank has given the call up; None if none has."""
        return _first(self.judge(one) for one in heard if not self._has_sent_all(one))

    def _has_sent_all(self, heard: Heard) -> bool:
        """True if a rank completed this call before it gave up a later one, or left the group for good."""
        report = heard.report
        if report is None or report.kind != EXCEPTION:
            return self._left_after(heard) or (report is not None and _since(report) >= self.at + 1)
        return heard.has_finished and (report.left is None or report.left > self.at)

    def explaining(self, rank: int, is_met: bool, now: float) -> Explaining:
        """Find out why the connection to a rank broke.

        Args:
            rank: The rank of the peer.
            is_met: True if its process can be observed.
            now: The current time.
        """
        grace = GRACE if is_met else UNMET_GRACE
        deadline = now + grace
        while now < deadline:
            now, is_cut_off, heard = yield deadline - now
            # Its report may still come: a rank is not lost because the store is stopped. The grace begins again with
            # the first look at which the store answers. Outside of calls there is no limit by which to give up.
            if is_cut_off and self._deadline != NOT_IN_TIME:
                if self.is_late(now):
                    return Cause(Why.LATE)
                deadline = NOT_IN_TIME
            else:
                deadline = min(deadline, now + grace)
            if (cause := _first(self._explanation(one, rank) for one in heard)) is not None:
                return cause
        return Cause(Why.BROKE, rank)

    def _explanation(self, heard: Heard, rank: int) -> Cause | None:
        if (cause := self.judge(heard)) is not None:
            return cause
        why = Why.LOST if heard.has_ended else Why.LEFT if heard.has_left else None
        is_about = heard.rank == rank or not heard.has_finished
        return Cause(why, heard.rank) if why is not None and is_about else None

    # Giving up.

    @property
    def number_of_report(self) -> float:
        """The call that a report of this rank is about: its current call; outside of calls, half a call after it."""
        return self.number + 0.5 if self._deadline == NOT_IN_TIME else self.at

    @property
    def origin(self) -> tuple[int | None, Turn, int, float | None]:
        """The last fields of a report of this rank: partner, turn, meetings, and the call in which it has left."""
        is_between = self._deadline != NOT_IN_TIME and self._partner is not None
        return (self._partner if is_between else None), self._turn, self._meetings, self._left_at

    def leave(self, error: EasydistError, wait: int | None = None) -> Parting:
        """Leave the group's exchanges.

        Args:
            error: The reason.
            wait: The wait in C++ for which to leave: do nothing if it has ended. None to leave in any case.
        """
        if self.broken is not None or wait not in (None, self.waits):
            return Parting.NOTHING
        if error.call is not None and error.call > self.number:  # as if this rank had made that call, too
            self.number, self.at = error.call, float(error.call)
            self._turns.clear()
            self._before = None
        for rank in self._waited_for_me(error.circle):  # as if this rank had made the call of that one, too
            self._turns[rank] = self._turns.get(rank, 0) + 1
        self.broken, self._left_at = error, self.number_of_report if self._left_at is None else self._left_at
        error.is_earlier = error.is_earlier and self.is_fresh
        return Parting.DISCONNECT if error.is_earlier else Parting.TELL  # earlier: all ranks begin the same call again

    def _waited_for_me(self, circle: Sequence[Sequence[int]]) -> list[int]:
        """Return the rank that has waited for this one in a circle; none if this one has waited for it, too."""
        return [rank for rank, partner, *_ in circle if partner == self.rank and rank != self._partner]


def _since(report: Report) -> float:
    """Return the first call that the rank has given up since the ranks were connected."""
    return report.number if report.left is None else report.left


def _first(causes: Iterable[Cause | None]) -> Cause | None:
    """Return the first cause about this rank's call, else the first one about an earlier call."""
    earlier = None
    for cause in causes:
        if cause is not None and not cause.is_earlier:
            return cause
        earlier = earlier or cause
    return earlier


def has_finished(number: int, last: int, is_inside: bool) -> bool:
    """True if a rank has left a call.

    Args:
        number: The number of that call.
        last: The number of the rank's last call of all ranks.
        is_inside: True if the rank is inside its last call.

    Example:
        >>> has_finished(3, 4, True), has_finished(3, 3, True), has_finished(3, 3, False)
        (True, False, True)
    """
    return last > number or (last == number and not is_inside)
