"""Recovering a group on simulated processes, pages and stores; ``play(seed, loaded())`` plays one schedule again."""

import pytest
from launching import examples
from random_recoveries import loaded, play
from register_reader import check_reader

from easydist.liveness import page

ONCE = [112, 327, 487, 642, 1237, 4918]
"""Schedules that have broken a law once.

In 112, 487 and 1237 the store is silent when a rank records that all have met, and others have recorded the opposite.
In 327 and 642 the store ends after a rank has connected. In 4918 it answers again in the middle of a look.
"""


@pytest.fixture(scope="module")
def modules():
    return loaded()


@pytest.mark.parametrize("seed", ONCE)
def test_no_schedule_that_has_broken_a_law_breaks_it_again(seed, modules):
    play(seed, modules)


@pytest.mark.stress
@pytest.mark.slow
def test_no_schedule_breaks_a_law(modules):
    for seed in range(examples(200)):
        play(seed, modules)


@pytest.mark.slow
def test_a_reader_that_stops_at_any_step_gets_no_register_from_before_its_read():
    check_reader(page)
