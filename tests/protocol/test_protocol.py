"""The protocol of a group's calls, played by simulated ranks; ``play(seed)`` plays one schedule again."""

import pytest
from cases import CASES
from exploring import explore
from launching import examples, sampled
from schedules import Schedule, play
from sources import load

PARTS = 10

IS_DEEP = examples(1) > 1
"""True under ``make stress``."""

ONCE = {
    171013: "without a store, a late rank gave headers to the ranks of its host after one of another had left the call",
    18651: "the same, and the store ended before the others had read the report",
    278320: "the same, and the late rank was stopped",
    321731: "the same, after the ranks had reconnected",
    92410: "a rank that ended while it waited for a silent store counted as one that waits on when the store answered",
    413896: "a rank of shared memory ended after it had sent its headers; for another one, the last header came later",
    39450: "a rank that came to the others' second call while the store was silent, and ended, could not be known",
    163907: "a rank had come to a meeting, and ended while the others waited for one more",
    263451: "two ranks had come to a meeting, and ended before the third one came, which tried to connect to them",
    384329: "a call of two followed the others past a call of all, and sent what the other rank took in a later call",
    440730: "a rank stopped in a call of all raised what had ended the group in a later call of two",
    168672: "the same, of a rank that had left to recover",
    38651: "the store fell silent during the last look for a report, and a rank that had left one counted as lost",
    8217: "a rank gave up two calls in turn, and counted as lost because the second report had replaced the first",
    446372: "a body after a failed operation counted as one that waits in that group",
    5166641: "a rank was stopped at the end of a call, and came to the next one just after the others had given it up",
    5222949: "the same, with a call of two and an operation in between",
    5034678: "the store answered again just before a report came, and its author counted as lost at the first look",
    1148252: "a connection broke while the store was silent, and a rank in a body counted as one that did not come",
    10766380: "a rank that had missed a report reconnected, and another one waited for it before the broken connection",
    16066: "Ctrl-C between two calls ended the second, in the simulation alone",
    208536: "the law expected ranks to return from a call that had been given up before Ctrl-C",
    305340: "the law expected a stopped rank to know who had come meanwhile",
    1159191: "the law expected a rank to know who had moved on, after its last look, from an earlier call to its own",
    5354559: "the law expected a rank to know of a body whose process was stopped at its last look",
    5067613: "the same, and it asked a silent store after that look",
    10476479: "the law expected a rank to know why another one had disconnected, though the store had ended since",
    1130565: "a rank ended while another one was in a body, whose next call raised at once, in a group lost before",
}
"""Schedules that have broken a law once, and what happened in them."""

DEPTHS = {2: 100, 3: 40} if IS_DEEP else {2: 40, 3: 12}
"""The steps that a fault may follow, by the number of ranks; the first calls of two ranks end after about 40."""


@pytest.mark.parametrize("seed", ONCE)
def test_no_schedule_that_has_broken_a_law_breaks_it_again(seed):
    play(seed)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_law(part):
    for seed in range(part, examples(10_000) if IS_DEEP else 200, PARTS):
        play(seed)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("way", ["shm", "gloo", "hosts"])
@pytest.mark.parametrize("size", DEPTHS)
def test_no_single_fault_at_any_of_the_first_steps_breaks_a_law(size, way):
    assert explore(size, way, DEPTHS[size]) > 100


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("way", sampled(["hosts", "gloo", "shm"], 3))
@pytest.mark.parametrize("size", DEPTHS if IS_DEEP else [2])
def test_no_two_faults_soon_after_one_another_break_a_law(size, way):
    depth, apart = (DEPTHS[size], 12) if IS_DEEP else (1, 2)
    assert explore(size, way, depth, faults=2, apart=apart) > 10


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_the_same_each_time(seed):
    first, again = Schedule(seed), Schedule(seed)
    assert [first.step(place) for place in range(9)] == [again.step(place) for place in range(9)]
    assert vars(first).keys() == vars(again).keys()
    assert (first.faults, first.interrupts, first.ends) == (again.faults, again.interrupts, again.ends)


@pytest.mark.parametrize("name", CASES)
def test_a_single_decision_is_right(name):
    CASES[name](load())
