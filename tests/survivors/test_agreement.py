"""The agreement of survivors on simulated ranks; ``play(seed)`` plays one schedule again."""

import pytest
from agreement_cases import CASES
from explored_agreements import KINDS, explore
from launching import examples
from random_agreements import play
from simulated_agreement import Agreement

from easydist.groups.membership import Membership, Return

PARTS = 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_rank_keeps_the_rules(case):
    case(Membership)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_law(part):
    for seed in range(part, examples(2000), PARTS):
        play(seed)


@pytest.mark.slow
def test_where_nothing_goes_wrong_all_ranks_return():
    for seed in range(100):
        everyone = tuple(range(len((world := play(seed, has_faults=False)).ranks)))
        assert [rank.result for rank in world.ranks] == [Return(everyone)] * len(everyone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "surprises", "stagger", "kinds"),
    [(2, 1, Membership.stagger, KINDS), (2, 2, 0.0, KINDS), (3, 1, 0.0, KINDS)],
)
def test_no_schedule_with_so_many_surprises_breaks_a_law(size, surprises, stagger, kinds):
    assert explore(size, surprises, stagger=stagger, kinds=kinds) > 1000


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.skipif(examples(1200) <= 1200, reason="millions of states: make stress")
@pytest.mark.parametrize(
    ("size", "surprises", "stagger", "kinds"),
    [
        (2, 2, Membership.stagger, KINDS),
        (2, 3, 0.0, ("stop",)),
        (3, 1, Membership.stagger, KINDS),
        (3, 2, 0.0, ("stop",)),
    ],
)
def test_no_schedule_with_more_surprises_breaks_a_law(size, surprises, stagger, kinds):
    assert explore(size, surprises, stagger=stagger, kinds=kinds) > 1000


@pytest.mark.slow
def test_64_ranks_agree():
    world = Agreement([0.0] * 64)
    world.die(5)
    while not all(rank.is_done for rank in world.ranks):
        ready = [number for number in range(64) if world.can_step(number)]
        for number in ready:
            world.step(number)
        if not ready:
            world.pass_time()
    left = tuple(number for number in range(64) if number != 5)
    assert {world.ranks[number].result for number in left} == {Return(left)}
