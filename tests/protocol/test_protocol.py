"""The protocol of a group's calls, played by simulated ranks; ``play(seed)`` plays one schedule again."""

import pytest
from launching import examples
from protocol_mutants import FOUND, is_of_rank
from schedules import Schedule, Violation, play
from simulated_rank import SimulatedRank

from easydist.liveness.events import Announced, Answer, Do, Heard
from easydist.liveness.protocol import GroupProtocol
from easydist.liveness.report import INTERRUPT, Report

PARTS = 10

ONCE = [10002510, 10002621, 10005831, 10006350, 10008153, 10009156, 10010469, 10010826, 10018703, 10019896, 10021075]
ONCE += [10021148, 10025732, 10029057, 10045458, 10052772, 10062472, 10070562, 10073738, 10125561, 10151575, 1385]
ONCE += [15275, 20025753, 20032535, 20037663, 20039524, 10060, 16390, 45420, 64105, 136495, 383923, 721896]
"""Schedules that have broken a law once."""


@pytest.mark.parametrize("seed", ONCE)
def test_no_schedule_that_has_broken_a_law_breaks_it_again(seed):
    play(seed)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_law(part):
    for seed in range(part, examples(10_000), PARTS):
        play(seed)


def breaks(seed, mutant):
    """True if a schedule shows that this is wrong."""
    try:
        play(seed, mutant, GroupProtocol) if is_of_rank(mutant) else play(seed, SimulatedRank, mutant)
    except Violation:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FOUND, ids=lambda mutant: mutant.__name__)
def test_every_fault_of_the_past_is_found(mutant):
    play(FOUND[mutant])
    assert breaks(FOUND[mutant], mutant) or any(breaks(seed, mutant) for seed in range(3000))


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_the_same_each_time(seed):
    first, again = Schedule(seed), Schedule(seed)
    assert [first.step(place) for place in range(9)] == [again.step(place) for place in range(9)]
    assert vars(first).keys() == vars(again).keys()
    assert (first.faults, first.interrupts, first.ends) == (again.faults, again.interrupts, again.ends)


def test_who_has_taken_the_others_number_raises_what_ends_that_call():
    rank = GroupProtocol(1, 3)
    rank.begin_call(0.0, 1.0, 9.0)
    rank.was_interrupted = True
    rank.begin_meeting()
    steps = rank.meeting()
    step = next(steps)
    while step.do is not Do.MOVE:
        step = steps.send(Answer({2: Announced(2.0, 1)}) if step.do is Do.ASK else None)
    report = Report(INTERRUPT, "", 2, 0, rank.phase, 2.0, 0.0, attempt=1)
    assert rank.at == 2.0
    assert not rank.judge(Heard(2, report)).is_earlier
