"""Single decisions of the rules, for what few schedules lead to; each case gets the loaded modules and asserts."""

from types import SimpleNamespace

import meeting_cases

from easydist.errors import DisagreementError, RemoteError
from easydist.liveness.events import Announced, Cause, Do, Heard, Replies, Why
from easydist.liveness.report import INTERRUPT, Report, Turn, kind_of


def _rank(code, size=3):
    rank = code.protocol.GroupProtocol(1, size)
    rank.begin_call(0.0, 1.0, 9.0)
    return rank


def connecting_has_a_limit(code):
    """gloo takes zero for no limit. Half of the time is left for what others have reported meanwhile."""
    rank = _rank(code)
    assert rank.connect_limit(0.5) == 0.25
    assert rank.connect_limit(7.0) == code.protocol.SHORTEST
    rank.end_call(7.0)
    assert rank.connect_limit(7.0) == code.protocol.CONNECTED


def who_takes_the_others_number_raises_what_ends_that_call(code):
    """After that it is in the same call as they are."""
    rank = _rank(code)
    rank.was_interrupted = True
    rank.begin_meeting()
    steps = rank.meeting()
    step = next(steps)
    while step.do is not Do.MOVE:
        step = steps.send(Replies({2: Announced(2.0, 1)}) if step.do is Do.ASK else None)
    report = Report(INTERRUPT, "", 2, 0, rank.phase, 2.0, 0.0, meetings=1)
    assert rank.at == 2.0
    assert not rank.judge(Heard(2, report)).is_earlier


def an_interrupt_in_this_call_hinges_on_signals(code):
    """It means something else to a rank that Ctrl-C has reached outside of calls."""
    rank = _rank(code)
    assert rank.hinges_on_signals(Report(INTERRUPT, "", 2, 0, 0, 1.0, 0.0)) is True
    assert rank.hinges_on_signals(Report(INTERRUPT, "", 2, 0, 0, 2.0, 0.0)) is False
    assert rank.hinges_on_signals(Report("late", "", 2, 0, 0, 1.0, 0.0)) is False
    assert rank.hinges_on_signals(None) is False


def a_call_of_two_waits_longer_for_a_rank_that_has_left(code):
    """Its messages have no numbers, so only looks tell that none is on its way."""
    for peer, looks in ((2, 5), (None, 2)):
        rank = code.protocol.GroupProtocol(1, 3)
        rank.begin_call(0.0, 1.0, 9.0, peer)
        found = [rank.look([Heard(2, has_left=True)]) for _ in range(looks)]
        assert [cause and cause.why for cause in found] == [None] * (looks - 1) + [Why.LEFT]


def a_report_about_a_later_call_says_nothing_of_one_whose_headers_have_come(code):
    """A rank may complete a call and give the next one up before this rank has looked."""
    for left, number, ends in ((None, 2.0, False), (1.0, 2.0, True), (None, 1.0, True), (None, 1.5, True)):
        report = Report("late", "", 2, 0, 0, number, 0.0, left=left)
        assert (_rank(code).check([Heard(2, report, True)]) is not None) == ends, (left, number)


def an_exception_tells_the_others_as_soon_as_the_call_is_counted(code):
    """They wait for a rank that they have not heard of."""
    rank = _rank(code)
    assert rank.tells_of(is_exception=True, is_shared=False)
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    assert not rank.tells_of(is_exception=True, is_shared=False)


def a_rank_that_is_not_known_may_be_ahead_only_while_all_reconnect(code):
    """Its report is from the store, where another group may have left it."""
    rank, ahead = _rank(code), Report("late", "", 2, 0, 1, 9.0, 0.0, meetings=1)
    assert rank.judge(Heard(2, ahead, is_ours=None)) is None
    assert rank.judge(Heard(2, ahead, is_ours=True)) is not None
    rank.begin_meeting()
    assert rank.judge(Heard(2, ahead, is_ours=None)) is not None


def reports_of_other_hosts_are_read_if_somebody_may_have_given_up(code):
    """By the wall clocks, by the time since the last call began, or by the time in this call."""
    rank = _rank(code)
    assert rank.listens_after(0.01, 0.5, seems_late=True)
    assert rank.listens_after(0.01, 1.5, seems_late=False)
    assert rank.listens_after(0.06, 0.5, seems_late=False)
    assert not rank.listens_after(0.01, 0.5, seems_late=False)


def a_broken_connection_waits_for_a_silent_store_only_while_a_call_has_time(code):
    """Outside of calls there is no limit by which the wait would end."""
    for is_in_call, why in ((True, Why.LATE), (False, Why.BROKE)):
        rank, now = _rank(code), 0.5
        rank.begin_call(0.0, 3.0, 9.0)
        if not is_in_call:
            rank.end_call(0.1)
        looks = rank.explaining(2, True, now)
        next(looks)
        while now < (2.5 if is_in_call else 1.5):
            now += 0.5
            looks.send((now, True, [Heard(2)]))
        cause = None
        try:
            looks.send((now + 0.5, True, [Heard(2)]))
        except StopIteration as end:
            cause = end.value
        assert cause is not None
        assert cause.why is why


def who_has_ended_with_an_exception_has_sent_what_it_had_finished(code):
    """A report about its process says so, unless it had left the others in this call or before."""
    rank = _rank(code)
    for left, has_finished, is_well in (
        (None, True, True),
        (2.0, True, True),
        (1.0, True, False),
        (None, False, False),
    ):
        report = Report("exception", "", 2, 0, 0, 2.0, 0.0, left=left)
        assert (rank.check([Heard(2, report, has_finished=has_finished)]) is None) == is_well


def who_leaves_for_good_has_sent_what_it_had_not_given_up(code):
    """The number of its report is outside of calls, and it had come back from all that it had left."""
    for left, is_well in ((2.5, True), (1.0, False)):
        rank = _rank(code)
        report = Report("remote", "", 2, 0, 0, 2.5, 0.0, is_final=True, left=left)
        assert (rank.check([Heard(2, report)]) is None) == is_well
    report = Report("remote", "", 2, 0, 0, 0.5, 0.0, is_final=True, left=0.5)
    assert rank.check([Heard(2, report)]).why is Why.REPORTED


def who_knows_of_a_loss_in_a_later_call_of_two_has_sent_what_it_had_not_given_up(code):
    """It has come to that call by completing this one."""
    for number, left, is_well in ((1.5, 1.5, True), (1.5, 1.0, False), (0.5, 0.5, False)):
        report = Report("lost", "", 2, 0, 0, number, 0.0, is_final=True, peer=0, turn=Turn(1), left=left)
        assert (_rank(code).check([Heard(2, report)]) is None) == is_well


def a_report_outside_of_calls_counts_unless_its_rank_has_left(code):
    """A communicator gives up outside of calls, and is lost by that."""
    report = Report("remote", "", 2, 0, 0, 1.5, 0.0, left=1.5)
    assert _rank(code).look([Heard(2, report)]).why is Why.REPORTED


def a_report_from_before_the_ranks_reconnected_is_over(code):
    """Unless its author left the last meeting, the one in which the others connected."""
    rank = _rank(code)
    rank.phase, rank._met = 2, [Announced(1.0, 1), Announced(1.0, 1), Announced(1.0, 3)]
    for phase, meetings, counts in ((2, 1, True), (1, 3, True), (1, 2, False), (0, 3, False)):
        report = Report("late", "", 2, 0, phase, 1.0, 0.0, meetings=meetings)
        assert (rank.judge(Heard(2, report)) is not None) == counts


def an_interrupt_that_is_passed_on_stays_one(code):
    """Those who read it may have had Ctrl-C themselves."""
    status = SimpleNamespace(peers={2: None}, _known=lambda peer: peer)
    report = Report(INTERRUPT, "", 2, 0, 0, 1.0, 0.0)
    assert kind_of(code.status.GroupStatus.error_of(status, Cause(Why.REPORTED, 2, report), ())) == INTERRUPT


def a_call_of_two_that_the_other_had_left_is_known(code):
    """By what it announced when the ranks met: its call, its partner, and its calls with this rank."""
    for at, partner, turns, number, turn, is_left in (
        (4.0, None, (), 3, 1, True),  # in the next call of all ranks
        (3.0, None, (), 3, 1, False),
        (3.5, 0, ((1, 1, 0),), 3, 1, True),  # with another rank, after this call
        (3.5, 0, ((1, 1, 0),), 3, 2, False),
        (3.5, 0, (), 3, 1, False),
        (3.5, 1, ((1, 1, 0),), 3, 1, False),  # in this call
        (3.5, 1, ((1, 2, 0),), 3, 1, True),
        (3.5, 1, ((1, 1, 1),), 3, 1, True),  # which it has sent, or received, before the last call of all ranks
        (3.5, 1, ((1, 1, None),), 3, 1, False),
        (3.5, 0, ((1, 1, 0),), 4, 1, False),
    ):
        rank = code.protocol.GroupProtocol(1, 3)
        rank.number, rank._met = number, [Announced(at, 1), Announced(at, 1), Announced(at, 1, partner, turns)]
        for _ in range(turn):
            rank.begin_call(0.0, 1.0, 9.0, peer=2)
        assert rank.was_left_before() is is_left
        rank.begin_call(0.0, 1.0, 9.0)
        assert not rank.was_left_before()


def who_is_behind_its_partner_raises_first(code):
    """The partner is in a call of all, with another rank, or in a later call with this one."""
    third = Announced(3.5, 1, 1, ((1, 1, 0),))
    for partner, turns, is_behind in (
        (None, (), True),
        (0, ((0, 1, 0),), False),
        (0, ((0, 2, 0),), True),
        (0, ((0, 1, 1),), True),
        (0, ((0, 1, None),), False),
        (2, ((0, 1, 0), (2, 1, 0)), True),
        (2, ((2, 1, 0),), False),
    ):
        told = {0: Announced(3.5, 1, 1, ((1, 1, 0),)), 1: Announced(3.5, 1, partner, turns), 2: third}
        assert (0 in code.protocol._behind(told)) is is_behind
        assert 1 not in code.protocol._behind(told)


def a_message_before_a_call_of_all_ranks_is_a_call_after_it_for_the_other_rank(code):
    """So both count from when they were connected, unless one of them had lost its connections before that call."""
    rank = code.protocol.GroupProtocol(1, 3)
    rank.begin_call(0.0, 1.0, 9.0, begun={2: 5})
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    for turn, is_earlier in ((Turn(5), True), (Turn(6), False), (Turn(0, None), True), (Turn(1, None), False)):
        report = Report("late", "", 2, 0, 0, 1.5, 0.0, peer=1, turn=turn)
        assert rank.judge(Heard(2, report)).is_earlier is is_earlier
    rank.begin_call(0.0, 1.0, 9.0, peer=0)
    assert rank._told_turns() == ((2, 1, 5), (0, 1, 0))


def what_a_rank_had_begun_before_it_gave_up_counts_no_more(code):
    """From the next call of all ranks on, or from a call of all ranks in which they meet."""
    rank = code.protocol.GroupProtocol(1, 3)
    rank.begin_call(0.0, 1.0, 9.0, begun={2: 5})
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    rank.leave(RemoteError("late"))
    assert rank.origin[1] == Turn(1, 5)
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    assert rank.origin[1] == Turn(2, 5)
    rank.end_meeting()
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    assert rank.origin[1] == Turn(3, 5)
    rank.leave(RemoteError("late"))
    for meets, before in ((False, None), (True, 0)):
        rank.begin_call(0.0, 1.0, 9.0, begun={2: 5})
        if meets:
            rank.end_meeting()
        rank.begin_call(0.0, 1.0, 9.0, peer=2)
        assert rank.origin[1] == Turn(1, before)


def who_counts_a_call_that_it_has_not_made_does_not_know_what_came_before(code):
    """The messages that it had begun by then are not those that the others had begun."""
    rank = code.protocol.GroupProtocol(1, 3)
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    error = DisagreementError("crossed")
    error.call = 1
    rank.leave(error)
    rank.begin_call(0.0, 1.0, 9.0, peer=2)
    assert rank.origin[1] == Turn(1, None)


def a_rank_has_finished_a_call_once_it_is_outside_of_it_or_in_a_later_one(code):
    """Others need no more data of it."""
    assert [code.rules.has_finished(3, *last) for last in ((4, True), (3, True), (3, False), (2, False))] == [
        *(True, False, True, False)
    ]


CASES = {
    case.__name__: case
    for case in (
        connecting_has_a_limit,
        who_takes_the_others_number_raises_what_ends_that_call,
        an_interrupt_in_this_call_hinges_on_signals,
        a_call_of_two_waits_longer_for_a_rank_that_has_left,
        a_report_about_a_later_call_says_nothing_of_one_whose_headers_have_come,
        an_exception_tells_the_others_as_soon_as_the_call_is_counted,
        a_rank_that_is_not_known_may_be_ahead_only_while_all_reconnect,
        reports_of_other_hosts_are_read_if_somebody_may_have_given_up,
        a_broken_connection_waits_for_a_silent_store_only_while_a_call_has_time,
        who_has_ended_with_an_exception_has_sent_what_it_had_finished,
        who_leaves_for_good_has_sent_what_it_had_not_given_up,
        who_knows_of_a_loss_in_a_later_call_of_two_has_sent_what_it_had_not_given_up,
        a_report_outside_of_calls_counts_unless_its_rank_has_left,
        a_report_from_before_the_ranks_reconnected_is_over,
        an_interrupt_that_is_passed_on_stays_one,
        a_call_of_two_that_the_other_had_left_is_known,
        who_is_behind_its_partner_raises_first,
        a_message_before_a_call_of_all_ranks_is_a_call_after_it_for_the_other_rank,
        what_a_rank_had_begun_before_it_gave_up_counts_no_more,
        who_counts_a_call_that_it_has_not_made_does_not_know_what_came_before,
        a_rank_has_finished_a_call_once_it_is_outside_of_it_or_in_a_later_one,
        *meeting_cases.CASES,
    )
}
"""The cases by name."""
