"""The rules by which a rank judges what it hears of the others during its calls, and gives one up; pure."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from easydist.errors import EasydistError
from easydist.liveness.events import Announced, Cause, Heard, Parting, Why
from easydist.liveness.report import EXCEPTION, INTERRUPT, Report

GRACE = 1.5
"""Seconds in which a process whose connection broke has to end or to leave its failure report."""

UNMET_GRACE = 0.5
"""The same for one that has not been met: its end cannot be seen, and its failure report was in the store before."""

LISTEN_EVERY = 1.0
"""Seconds between two looks for what ranks of other hosts say."""

IDLE = 0.05
"""Seconds without a call after which this process may have missed what its peers said."""

APART = 0.05
"""Seconds since the last exchange after which others may have come to this one, and given it up."""

PATIENCE = 0.5
"""Seconds in which a store that answers at all has answered."""

NOT_IN_TIME = float("inf")

Explaining = Generator[float, tuple[float, bool, Iterable[Heard]], Cause]
"""Yields for how long to go on looking; takes the time, whether the peer could not be heard, and what was heard.

Returns why a connection broke.
"""


class CallProtocol:
    """One rank's state in the protocol of a group: its calls, and what it hears of the others.

    Args:
        rank: This process in the group.
        size: How many processes the group has.

    Attributes:
        rank: This process in the group.
        size: How many processes the group has.
        number: Counts the calls of this group, but for those of two ranks alone.
        at: The number of the call that began last; between two numbers, if it is of two ranks alone.
        phase: Rises with every breach of the connections, to an odd number, and with every repair, to an even one.
        peer: The only other rank that takes part in the call; None: all do.
        broken: The error that ended the group's exchanges; None while all is well.
        was_interrupted: True if Ctrl-C has come since the last call ended: this rank may have missed one.
        is_awaited: True if others wait for what this rank has to send in its call.
        is_fresh: True if nothing of this rank's call has been exchanged yet.
        waits: Even outside of waits in C++; rises with every beginning and end of one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.number, self.at, self.phase, self.waits = 0, 0.0, 0, 0
        self.peer: int | None = None
        self.broken: EasydistError | None = None
        self.was_interrupted = False
        self.is_awaited, self.is_fresh = False, True
        self._has_followed = False  # in its call it has taken the number of the others, who were in a later one
        self._partner: int | None = None  # as peer, also while the call reconnects all ranks
        self._turn, self._turns = 0, dict[int, int]()  # of calls with the partner since the last one of all ranks
        self._attempt, self._met = 0, list[Announced]()
        self._over = dict[int, int]()  # the last attempts to meet which others have left
        self._left_at: float | None = None
        self._seen_ended: set[int] = set()
        self._limit = self._ended = self._exchanged = 0.0
        self._deadline = self._warn_at = self._listen_at = NOT_IN_TIME

    # Calls.

    def begin_call(self, now: float, limit: float, warn_after: float, peer: int | None = None) -> bool:
        """Begin a call; returns True if this rank may have missed what the others have reported (``missed``)."""
        self.peer = self._partner = peer
        if peer is None:
            self.number += 1
            self.at = float(self.number)
            if self._turns:
                self._turns.clear()
        else:
            self.at = self.number + 0.5
            self._turn = self._turns[peer] = self._turns.get(peer, 0) + 1
        if self._seen_ended:
            self._seen_ended.clear()
        self.is_awaited, self.is_fresh, self._has_followed = False, True, False
        self._limit, self._deadline, self._warn_at = limit, now + limit, now + warn_after
        self._listen_at = now + LISTEN_EVERY
        return self.broken is None and (self.was_interrupted or now - self._ended > IDLE)

    def end_call(self, now: float) -> None:
        """End the call."""
        self._deadline = self._warn_at = NOT_IN_TIME
        self._ended, self.was_interrupted = now, False

    def time_left(self, now: float) -> float | None:
        """Seconds until the call's time is over; None outside of calls."""
        return None if self._deadline == NOT_IN_TIME else max(0.0, self._deadline - now)

    def exchanged(self, now: float) -> float:
        """The headers of all ranks have come; returns the seconds since that happened last.

        After more than ``APART`` any rank may have waited, and given up, before the last one came: what it has sent
        before is there all the same. The monotonic clock says so, because the wall clock may have been set meanwhile.
        """
        before, self._exchanged = self._exchanged, now
        return now - before

    def listens_after(self, now: float, apart: float, seems_late: bool) -> bool:
        """True if reports of other hosts count, too, which take a look into the store.

        Args:
            now: The time.
            apart: What ``exchanged`` has returned.
            seems_late: True if a rank came late by the wall clocks of the hosts, which may be wrong.
        """
        return seems_late or apart > LISTEN_EVERY or now - (self._deadline - self._limit) > APART

    def tells_of(self, is_exception: bool, is_shared: bool) -> bool:
        """True if the others have to be told of the error that ends this rank's call.

        Args:
            is_exception: True if it is an ``Exception``; Ctrl-C is not.
            is_shared: All ranks raise it.
        """
        return not is_shared and (self.is_awaited or not is_exception)

    # Looks at the other ranks.

    def hinges_on_signals(self, report: Report | None, is_ours: bool | None) -> bool:
        """True if it matters for this report whether Ctrl-C has reached this process: make sure that it is known."""
        if report is None or not self._is_interrupt_of_this_call(report):
            return False
        return is_ours is not False and self._is_of_this_phase(report)

    def judge(self, heard: Heard) -> Cause | None:
        """Return what a rank's report means for this rank's call; None: nothing."""
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
        if is_reconnecting and is_earlier:  # about an attempt to reconnect that ended before this one
            self._over[heard.rank] = max(report.attempt, self._over.get(heard.rank, 0))
            return None
        return Cause(Why.REPORTED, heard.rank, report, is_earlier)

    def _is_of_this_phase(self, report: Report) -> bool:
        """True unless the ranks have reconnected since; a rank may also have left while they connected."""
        if report.phase == self.phase - 1 and self._met:
            return report.attempt >= self._met[report.by].attempt
        return report.phase >= self.phase

    def _is_earlier(self, report: Report) -> bool:
        """True if a report is about an earlier call, or one that this rank would have come to but for Ctrl-C."""
        if self._is_interrupt_of_this_call(report):
            return self.was_interrupted and not self._has_followed
        return report.number < self.at or (report.number == self.at and self._is_of_others(report))

    def _is_interrupt_of_this_call(self, report: Report) -> bool:
        return report.kind == INTERRUPT and report.number == self.at and not self._is_of_others(report)

    def _is_of_others(self, report: Report) -> bool:
        """True if a report is about another call between two ranks than this rank's, or an earlier one of the same."""
        if report.peer is None or self._partner is None:
            return False
        return {report.by, report.peer} != {self.rank, self._partner} or report.turn < self._turn

    @property
    def phases(self) -> tuple[int, ...]:
        """Those whose reports may be about these connections: a rank may have left while the others connected."""
        return (self.phase,) if self.phase % 2 or not self.phase else (self.phase, self.phase - 1)

    def may_matter(self, report: Report) -> bool:
        """True unless a report is about connections that are gone."""
        return report.is_final or report.phase >= self.phase - 1

    def look(self, heard: Iterable[Heard]) -> Cause | None:
        """Return why the wait is in vain, as far as the others say or show it.

        Args:
            heard: Of the ranks that are awaited, and of those that have given up this call or an earlier one.
        """
        return _first((None if self._left_after(one) else self.judge(one)) or self._end_of(one) for one in heard)

    def _left_after(self, heard: Heard) -> bool:
        """True if a rank has left the group for good once it had sent all of this rank's call."""
        report = heard.report
        if report is None or not report.is_final or report.peer is not None:
            return False
        return report.number > self.at and report.number % 1 > 0  # outside of calls

    def _end_of(self, heard: Heard) -> Cause | None:
        """The loss of a peer that had ended at the last look, too: what it sent before may have come since then."""
        if not heard.has_ended:
            return None
        if heard.rank in self._seen_ended:
            return Cause(Why.LOST, heard.rank)
        self._seen_ended.add(heard.rank)
        return None

    def listens(self, now: float) -> bool:
        """True if it is time to look into the store, for ranks of other hosts."""
        if now < self._listen_at:
            return False
        self._listen_at = now + LISTEN_EVERY
        return True

    def is_late(self, now: float) -> bool:
        """True if the call's time is over."""
        return now >= self._deadline

    def warns(self, now: float, warn_after: float) -> bool:
        """True if it is time to mention the wait."""
        if now < self._warn_at:
            return False
        self._warn_at = now + warn_after
        return True

    def missed(self, heard: Iterable[Heard]) -> Cause | None:
        """Return why to reconnect, and raise nothing: others have left a call that this rank had ended, or missed."""
        cause = _first(self.judge(one) for one in heard)
        return cause if cause is not None and cause.is_earlier else None

    def check(self, heard: Iterable[Heard]) -> Cause | None:
        """Return why the call has been given up by another rank; None if it has not."""
        return _first(self.judge(one) for one in heard if not self._has_sent_all(one))

    def _has_sent_all(self, heard: Heard) -> bool:
        """True if a rank had left this call, and not given it up, before it raised, or left the group for good."""
        report = heard.report
        if report is None or report.kind != EXCEPTION:
            return self._left_after(heard)
        return heard.has_finished and (report.left is None or report.left > self.at)

    def explaining(self, rank: int, is_met: bool, now: float) -> Explaining:
        """Find out why the connection to a rank broke.

        Args:
            rank: The peer.
            is_met: True if its process can be looked at.
            now: The time.
        """
        grace = GRACE if is_met else UNMET_GRACE
        deadline = now + grace
        while now < deadline:
            now, is_cut_off, heard = yield deadline - now
            if is_cut_off:  # its report may be on its way: a store that is stopped makes nobody lost
                if self.is_late(now):
                    return Cause(Why.LATE)
                deadline = now + grace
            if (cause := _first(self._explanation(one, rank) for one in heard)) is not None:
                return cause
        return Cause(Why.BROKE, rank)

    def _explanation(self, heard: Heard, rank: int) -> Cause | None:
        is_lost = heard.has_ended and (heard.rank == rank or not heard.has_finished)
        return self.judge(heard) or (Cause(Why.LOST, heard.rank) if is_lost else None)

    # Giving up.

    @property
    def number_of_report(self) -> float:
        """What a report of this rank is about: its call; outside of calls, what is before the next one."""
        return self.number + 0.5 if self._deadline == NOT_IN_TIME else self.at

    @property
    def origin(self) -> tuple[int | None, int, int, float | None]:
        """The last fields of a report of this rank: partner, turn, attempt, and the call in which it has left."""
        is_between = self._deadline != NOT_IN_TIME and self._partner is not None
        return (self._partner if is_between else None), self._turn, self._attempt, self._left_at

    def leave(self, error: EasydistError, wait: int | None = None) -> Parting:
        """Leave the group's exchanges.

        Args:
            error: Why.
            wait: Do nothing if this wait in C++ has ended; None: leave in any case.
        """
        if self.broken is not None or wait not in (None, self.waits):
            return Parting.NOTHING
        self.broken, self._left_at = error, self.number_of_report if self._left_at is None else self._left_at
        error.is_earlier = error.is_earlier and self.is_fresh and not error.is_final
        return Parting.DISCONNECT if error.is_earlier else Parting.TELL  # earlier: all begin the same call again


def _first(causes: Iterable[Cause | None]) -> Cause | None:
    """The first cause; one about this rank's call goes before those about earlier ones."""
    earlier = None
    for cause in causes:
        if cause is not None and not cause.is_earlier:
            return cause
        earlier = earlier or cause
    return earlier


def has_finished(number: int, last: int, is_inside: bool) -> bool:
    """True if a rank has left a call.

    Args:
        number: Of that call.
        last: The number of the rank's last call of all ranks.
        is_inside: True if it is inside that one.

    Example:
        >>> has_finished(3, 4, True), has_finished(3, 3, True), has_finished(3, 3, False)
        (True, False, True)
    """
    return last > number or (last == number and not is_inside)
