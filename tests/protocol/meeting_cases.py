"""Single decisions of the ranks that meet, of those that leave, and of groups that share memory; as in ``cases``."""

import contextlib
from types import SimpleNamespace

from simulated_process import Page
from simulated_world import Process, World, running
from torch.distributed import HashStore

from easydist.errors import RemoteError
from easydist.liveness.events import Announced, Do, Heard, Replies, Step, Why
from easydist.liveness.log import Log
from easydist.liveness.report import EXCEPTION, Report
from easydist.liveness.timed_store import TimedStore


def _rank(code, size=3):
    rank = code.protocol.GroupProtocol(1, size)
    rank.begin_call(0.0, 1.0, 9.0)
    return rank


def _meets(rank, answers, hears=()):
    """Let a rank meet others; return the ranks that it asks each time, and what it has met, or None."""
    rank.begin_meeting()
    asked, steps, answer = [], rank.meeting(), None
    for _ in range(20):
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return asked, end.value
        answer = None
        if step.do is Do.ASK:
            asked.append(step.ranks)
            answer = Replies(answers[len(asked) - 1] if len(asked) <= len(answers) else {})
        elif step.do is Do.GUARD and len(asked) == 1:
            for heard in hears:
                rank.judge(heard)
    return asked, None


def ranks_that_have_all_come_have_met(code):
    """A meeting ends; who has come is not asked again."""
    asked, met = _meets(_rank(code), [{0: Announced(1.0, 1)}, {2: Announced(1.0, 1)}])
    assert asked == [[0, 2], [2]]
    assert met == [Announced(1.0, 1)] * 3


def who_is_in_an_earlier_call_has_not_come(code):
    """The calls that connected ranks go on with have to be the same."""
    asked, met = _meets(_rank(code), [{0: Announced(1.0, 1), 2: Announced(0.5, 1)}, {2: Announced(1.0, 1)}])
    assert asked == [[0, 2], [2]]
    assert met == [Announced(1.0, 1)] * 3


def a_report_about_this_call_is_not_about_an_earlier_one(code):
    """Only those about calls before it are, and those about the call of another pair."""
    rank = _rank(code)
    for number, is_earlier in ((1.0, False), (0.5, True)):
        assert rank.judge(Heard(2, Report("late", "", 2, 0, 0, number, 0.0))).is_earlier is is_earlier


def a_meeting_is_carried_out_to_its_end(code):
    """Its result is what the ranks have announced."""

    def meeting():
        yield Step(Do.LISTEN)
        return "met"

    def carried_out():
        found.append((yield from code.reconnecting._agree_on_call(None, monitor)))

    found, heard = [], []
    monitor = SimpleNamespace(meeting=meeting, check_reports=lambda: heard.append(1))
    list(carried_out())
    assert (found, heard) == (["met"], [1])


def who_has_left_the_meeting_has_to_come_back(code):
    """Otherwise the others would connect without it, and pair its next call with this one."""
    left = Heard(2, Report("late", "", 2, 0, 1, 0.5, 0.0, meetings=1))
    everyone = {0: Announced(1.0, 1), 2: Announced(1.0, 1)}
    asked, met = _meets(_rank(code), [everyone, {2: Announced(1.0, 2)}], [left])
    assert asked == [[0, 2], [2]]
    assert met is not None
    assert met[2].meetings == 2


def ranks_that_meet_observe_those_that_have_come(code):
    """They need all others until they are connected; other waits do not look at ranks that have ended the call."""
    peers = {0: SimpleNamespace(rank=0), 2: SimpleNamespace(rank=2)}
    for phase, observed in ((2, [2]), (3, [0, 2])):
        monitor = SimpleNamespace(phase=phase, peers=peers, _gave_up=list)
        monitor._unfinished = lambda awaited, is_exact: [peers[rank] for rank in awaited]
        monitor.hear = lambda peer, is_awaited: Heard(peer.rank)
        assert [heard.rank for heard in code.monitor.Monitor._heard(monitor, [2], True)] == observed


def a_broken_connection_is_explained_by_logged_reports_too(code):
    """A rank that gave up two calls in turn has replaced the report about the first one on its page."""
    last, logged = Report("late", "", 2, 0, 0, 2.0, 0.0), Report("late", "", 2, 0, 0, 1.0, 0.0)
    peer = SimpleNamespace(rank=2)
    monitor = SimpleNamespace(peers={2: peer}, _read_log=lambda: [logged], _unfinished=lambda awaited: [])
    monitor.hear = lambda peer, remote, is_awaited=False, logged=None: Heard(peer.rank, logged or last)
    heard = code.monitor.Monitor._heard_by_all(monitor, peer)
    assert [one.report for one in heard] == [last, last, logged]


def a_call_may_have_missed_a_report_after_ctrl_c_or_a_pause(code):
    """Unless this rank has given up itself: then it reconnects anyway."""
    for broken, was_interrupted, now, may in (
        (None, True, 1.0, True),
        (None, False, 9.0, True),
        (None, False, 1.0, False),
        (RemoteError("mine"), True, 9.0, False),
    ):
        rank = _rank(code)
        rank.end_call(1.0)
        rank.broken, rank.was_interrupted = broken, was_interrupted
        assert bool(rank.begin_call(now, 1.0, 9.0)) is may


def nobody_connects_to_a_rank_that_has_ended(code):
    """It counts as lost at the second look only, and connecting would take half of the time."""
    rank = _rank(code)
    assert rank.look([Heard(2, has_ended=True)]) is None
    _, met = _meets(rank, [{0: Announced(1.0, 1), 2: Announced(1.0, 1)}])
    assert met is None


def who_has_come_in_another_meeting_connects_elsewhere(code):
    """One of two ranks may have met the other before it left the meeting and came back."""
    first, second = ([Announced(1.0, 1), Announced(1.0, meetings)] for meetings in (1, 2))
    assert code.reconnecting._place(1, first) != code.reconnecting._place(1, second)


def a_rank_that_has_announced_itself_is_observed(code):
    """Its end is noticed before the ranks have met; who has been met stays what it is."""
    world = World(0)
    running.process = process = Process(world, 0, None, None)
    process.page = Page(process)
    process.page.new_entry()
    peer, met = code.reconnecting.Peer(2), code.reconnecting.Peer(0, b"1 0 0.5")
    store, logs = TimedStore(HashStore()), {name: Log(name) for name in ("1/here", "who")}
    monitor = SimpleNamespace(phase=1, peers={0: met, 2: peer}, log=logs.get)
    for rank in (0, 2):
        store.append("1/here", rank, "[1.0, 1, null, []]")
    store.append("who", 0, "1 0 0.5")
    assert set(code.reconnecting._ask(store, [0, 2], monitor).announced) == {0, 2}
    assert monitor.peers == {0: met, 2: peer}
    store.append("who", 2, "1 0 0.5")
    assert set(code.reconnecting._ask(store, [2], monitor).announced) == {2}
    process.has_ended = True
    assert monitor.peers[2].has_ended()
    assert monitor.peers[0] is met


def a_meeting_that_fails_leaves_the_group_broken(code):
    """Ctrl-C may end the meeting before the rank has left it; what ended it counts more than what was before."""
    before, new = RemoteError("before"), RemoteError("new")
    for found, last in ((None, before), (new, new)):
        monitor = SimpleNamespace(broken=None, begin_reconnecting=lambda: before, meeting=_interrupted)
        monitor.ended_by = lambda _, monitor=monitor, found=found: setattr(monitor, "broken", found)
        with contextlib.suppress(KeyboardInterrupt):
            list(code.reconnecting.reconnect(None, monitor, None))
        assert monitor.broken is last
    rank = _rank(code)
    rank.broken = before
    assert rank.begin_meeting() is before
    assert rank.broken is None


def _interrupted():
    raise KeyboardInterrupt


def a_call_of_two_ends_with_the_call_of_all_that_its_rank_has_missed(code):
    """The other rank would take what is sent now for a message of a later call. A call of all goes on."""
    for peer, at, ends in ((2, 2.0, True), (2, 1.5, True), (2, 1.0, False), (None, 3.0, False)):
        rank = code.protocol.GroupProtocol(1, 3)
        rank.begin_call(0.0, 1.0, 9.0, peer)
        rank.was_interrupted = True
        assert (Do.GIVE_UP in [step.do for step in rank._follow(at)]) is ends


def a_rank_says_since_when_it_has_not_come_back(code):
    """Later reports do not change it; data of calls after that one is not to be expected of it."""
    rank = _rank(code)
    rank.leave(RemoteError("first"))
    rank.end_call(0.5)
    rank.broken = None
    rank.begin_call(0.6, 1.0, 9.0)
    rank.leave(RemoteError("second"))
    assert rank.origin[3] == 1.0
    rank.end_meeting()
    assert rank.origin[3] is None


def a_message_that_has_been_posted_arrives_from_a_rank_that_has_left(code):
    """It needs that rank no more."""
    rank = _rank(code)
    rank.begin_call(0.0, 1.0, 9.0, 2)
    rank.is_promised = True
    assert [rank.look([Heard(2, has_left=True)]) for _ in range(9)] == [None] * 9


def a_wait_that_needs_more_of_a_rank_that_has_left_is_in_vain(code):
    """By the numbers of calls it has sent all; but calls that only some ranks count have no such numbers."""
    report = Report("remote", "", 2, 0, 0, 2.5, 0.0, is_final=True)
    for blocks, why in ((True, Why.REPORTED), (False, None)):
        rank = _rank(code)
        assert rank.look([Heard(2, report, blocks=blocks)]) is None
        cause = rank.look([Heard(2, report, blocks=blocks)])
        assert (cause and cause.why) is why


def the_time_in_a_body_does_not_count(code):
    """Unless the call has a limit of its own."""
    rank = _rank(code)
    rank.extend(5.0)
    assert not rank.is_late(5.9)
    assert rank.is_late(6.0)
    rank._is_limit_given = True
    assert rank.is_late(1.0)


def a_wait_in_shared_memory_is_one_of_the_younger_group_in_its_calls(code):
    """Its verbs wait in the memory of the group that has made it."""
    for left, is_asked in ((0.5, True), (None, False)):
        asked = []
        younger = SimpleNamespace(left=left, guard=lambda *arguments, asked=asked: asked.append(arguments))
        monitor = SimpleNamespace(younger=lambda younger=younger: younger, raise_if_broken=lambda: None)
        monitor._in_vain = lambda awaited, is_exact: None
        for _ in code.monitor.Monitor.guard(monitor, [2], 0.1, False):
            pass
        assert asked == [([2], 0.1, False)] * is_asked


def who_has_left_the_elder_group_for_good_does_not_come_to_this_one(code):
    """Its last report there counts for the first call here, whatever its number; others do not."""
    for kind, is_final, is_same, counts in (
        (EXCEPTION, False, False, True),
        ("remote", True, True, True),
        ("remote", True, False, False),
        ("late", False, True, False),
    ):
        report = Report(kind, "", 2, 0, 0, 7.5, 0.0, is_final=is_final)
        known = SimpleNamespace(report=lambda report=report: report, is_same_group=lambda _, same=is_same: same)
        found = code.status.GroupStatus._parting(SimpleNamespace(_known=lambda _, known=known: known), None)
        assert (found and found.number) == (0.0 if counts else None)
        assert found is None or _rank(code).look([Heard(2, found)]) is not None


CASES = (
    ranks_that_have_all_come_have_met,
    who_is_in_an_earlier_call_has_not_come,
    a_report_about_this_call_is_not_about_an_earlier_one,
    a_meeting_is_carried_out_to_its_end,
    who_has_left_the_meeting_has_to_come_back,
    ranks_that_meet_observe_those_that_have_come,
    a_broken_connection_is_explained_by_logged_reports_too,
    a_call_may_have_missed_a_report_after_ctrl_c_or_a_pause,
    nobody_connects_to_a_rank_that_has_ended,
    who_has_come_in_another_meeting_connects_elsewhere,
    a_rank_that_has_announced_itself_is_observed,
    a_meeting_that_fails_leaves_the_group_broken,
    a_call_of_two_ends_with_the_call_of_all_that_its_rank_has_missed,
    a_rank_says_since_when_it_has_not_come_back,
    a_message_that_has_been_posted_arrives_from_a_rank_that_has_left,
    a_wait_that_needs_more_of_a_rank_that_has_left_is_in_vain,
    the_time_in_a_body_does_not_count,
    a_wait_in_shared_memory_is_one_of_the_younger_group_in_its_calls,
    who_has_left_the_elder_group_for_good_does_not_come_to_this_one,
)
"""The cases of this file."""
