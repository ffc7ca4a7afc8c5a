"""Faults that the protocol once had, put back in: rules and ranks that get one thing wrong.

``FOUND`` has a seed that finds each of them.
"""

from simulated_rank import SimulatedRank
from simulated_world import NEVER

from easydist.liveness.events import Announced, Do, Step
from easydist.liveness.protocol import CONNECTED, GroupProtocol
from easydist.liveness.report import EXCEPTION
from easydist.liveness.rules import APART

# Of the ranks.


class WaitsForTheStore(SimulatedRank):
    """A store that is stopped keeps whoever asks it waiting."""

    patience = NEVER


class TellsNobodyOfCtrlCAtTheBeginning(SimulatedRank):
    """Ctrl-C while a call begins."""

    def _end_call(self, error, peer):
        is_silent = isinstance(error, KeyboardInterrupt) and self.rules.is_fresh and not self.rules.is_awaited
        super()._end_call(None if is_silent else error, peer)


class TellsNobodyOfCtrlCWhileItMeets(SimulatedRank):
    """Ctrl-C while the ranks meet to reconnect."""

    def ended_by(self, error):
        if not (self.rules.phase % 2 and isinstance(error, KeyboardInterrupt)):
            super().ended_by(error)


class TellsNobodyOfCtrlCInAWait(SimulatedRank):
    """Ctrl-C in the middle of a call."""

    def ended_by(self, error):
        if self.rules.phase % 2 or not self.rules.is_awaited or not isinstance(error, KeyboardInterrupt):
            super().ended_by(error)

    def _interrupted(self, wait):
        pass


class BelievesAtOnce(SimulatedRank):
    """Does not see whether others have given up before it takes what they sent."""

    def _listen_after(self, messages):
        yield from ()


class BelievesTheWallClock(SimulatedRank):
    """Sees whether others have given up only if they came early by the clock on the wall."""

    def _listen_after(self, messages):
        came = min(message[3] for message in messages.values())
        if self.world.now + self.group.clock(self.rank) > came + APART:
            yield from self.check_reports()


class ReadsTheLastReport(SimulatedRank):
    """A report in the store takes the place of the one before."""

    def read_log(self):
        count, cost = self.read("reports")
        last, more = self.read(f"reports/{count}") if count else (None, 0.0)
        return [last] if last and last.by != self.rank else [], cost + more


class ShowsItsPageOnly(SimulatedRank):
    """Does not write to the store once it has met the others, although they may not have met it."""

    def post(self, kind, number, is_final=False, is_relayed=False):
        before, self.rules._exchanged = self.rules._exchanged, 1.0
        super().post(kind, number, is_final, is_relayed)
        self.rules._exchanged = before


class PassesOnAnError(SimulatedRank):
    """Tells others of the error that it has heard of, but not that Ctrl-C is the reason."""

    def error_of(self, cause):
        error = super().error_of(cause)
        error.is_interrupt = False
        return error


# Of the rules.


class MeetsInAnyCall(GroupProtocol):
    """Meets ranks that are in other calls."""

    def meeting(self):
        yield Step(Do.ANNOUNCE, told := Announced(self.at, self._attempt))
        missing, others = [rank for rank in range(self.size) if rank != self.rank], {}
        while missing := [rank for rank in missing if rank not in others]:
            others |= (yield Step(Do.ASK, ranks=missing)).announced
            yield Step(Do.GUARD, ranks=missing)
            yield Step(Do.PAUSE)
        self._met = [others.get(rank, told) for rank in range(self.size)]
        return [Announced(0.0, 0)]


class DoesNotHearWhoGivesUpMeanwhile(GroupProtocol):
    """Does not hear of a rank that gives up while others reconnect."""

    def judge(self, heard):
        is_other = heard.report is None or heard.report.kind == EXCEPTION or heard.report.is_final
        return super().judge(heard) if is_other or not self.phase % 2 else None


class KnowsNothingOfCtrlC(GroupProtocol):
    """Does not know that it may have missed a call by Ctrl-C."""

    was_interrupted = property(lambda self: False, lambda self, value: None)


class BreaksALaterWait(GroupProtocol):
    """A finding of the watchdog about one wait ends the next one."""

    def leave(self, error, wait=None):
        return super().leave(error)


class RaisesWhatIsEarlier(GroupProtocol):
    """Raises in a call what others have reported of an earlier one."""

    def judge(self, heard):
        cause = super().judge(heard)
        return cause and cause._replace(is_earlier=False)


class TakesCallsOfTwoForTheNext(GroupProtocol):
    """Reports of a call between two ranks are about the next call of all."""

    number_of_report = property(lambda self: float(self.number + (self._partner is not None)))


class CountsCallsOfTwo(GroupProtocol):
    """Two ranks alone count a call more than the others."""

    def begin_call(self, now, limit, warn_after, peer=None):
        may_have_missed = super().begin_call(now, limit, warn_after, peer)
        self.number += peer is not None
        return may_have_missed


class GoesOnBehind(GroupProtocol):
    """A rank that is late for calls takes the number of the others, and no error."""

    def _follow(self, at):
        for step in super()._follow(at):
            if step.do is not Do.GIVE_UP:
                yield step


class RemembersAllReports(GroupProtocol):
    """Takes reports for new from before the ranks have reconnected."""

    def _is_of_this_phase(self, report):
        return True


class ForgetsTheMeeting(GroupProtocol):
    """Ignores a rank that left the meeting when others were connected already."""

    def _is_of_this_phase(self, report):
        return report.phase >= self.phase


class StaysInItsPhase(GroupProtocol):
    """Waits in a meeting that the others have left."""

    def meeting(self):
        steps = super().meeting()
        step = next(steps)
        try:
            while True:
                answer = yield step
                step = steps.send(answer and answer._replace(is_passed=False))
        except StopIteration as end:
            return end.value


class FinalForItsCallOnly(GroupProtocol):
    """Ignores that the group is lost where that is found in another call."""

    def judge(self, heard):
        if heard.report is not None and heard.report.is_final and heard.report.number != self.at:
            return None
        return super().judge(heard)


class LosesWhoCannotBeHeard(GroupProtocol):
    """Takes a rank for lost whose report is held up by a store that is stopped."""

    def explaining(self, rank, is_met, now):
        looks = super().explaining(rank, is_met, now)
        left = next(looks)
        try:
            while True:
                now, _, heard = yield left
                left = looks.send((now, False, heard))
        except StopIteration as end:
            return end.value


class ConnectsForLong(GroupProtocol):
    """Takes no time left for no limit."""

    def connect_limit(self, now):
        return min(self.time_left(now) or CONNECTED, CONNECTED)


class MeetsInAnyTurn(GroupProtocol):
    """Does not count the calls between two ranks."""

    _turn = property(lambda self: 1, lambda self, value: None)
    _turns = property(lambda self: {}, lambda self, value: None)


class ComesToACallThatWasLeft(GroupProtocol):
    """Does not see that the other rank of its call left that one before all met."""

    def was_left_before(self):
        return False


class FailsAlone(GroupProtocol):
    """Tells nobody that it has failed in the middle."""

    def tells_of(self, is_exception, is_shared):
        return not is_exception


class SaysWhereItFailedOnly(GroupProtocol):
    """Tells others of the last call that has failed, and not since when it has not come back."""

    origin = property(lambda self: (*GroupProtocol.origin.fget(self)[:3], None))


class MeetsWhoHasLeft(GroupProtocol):
    """Takes a rank for present that has left the meeting again."""

    def _still_there(self, others):
        return dict(others)


FOUND = {
    WaitsForTheStore: 26,
    TellsNobodyOfCtrlCAtTheBeginning: 122,
    TellsNobodyOfCtrlCWhileItMeets: 259,
    TellsNobodyOfCtrlCInAWait: 5,
    BelievesAtOnce: 22,
    BelievesTheWallClock: 1384,
    ReadsTheLastReport: 432,
    ShowsItsPageOnly: 432,
    MeetsInAnyCall: 4,
    DoesNotHearWhoGivesUpMeanwhile: 160,
    KnowsNothingOfCtrlC: 688,
    BreaksALaterWait: 265,
    RaisesWhatIsEarlier: 135,
    TakesCallsOfTwoForTheNext: 4,
    CountsCallsOfTwo: 0,
    GoesOnBehind: 82,
    RemembersAllReports: 4,
    StaysInItsPhase: 366,
    FinalForItsCallOnly: 85,
    LosesWhoCannotBeHeard: 30,
    ConnectsForLong: 15275,
    MeetsInAnyTurn: 4,
    FailsAlone: 6,
    ComesToACallThatWasLeft: 854,
    ForgetsTheMeeting: 366,
    PassesOnAnError: 10018703,
    SaysWhereItFailedOnly: 10005831,
    MeetsWhoHasLeft: 10052772,
}


def is_of_rank(mutant):
    return issubclass(mutant, SimulatedRank)
