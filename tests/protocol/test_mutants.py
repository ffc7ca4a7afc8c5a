"""Faults in the sources of the protocol, which the laws notice; see ``protocol_mutants`` and ``drawn_mutants``."""

import drawing
import pytest
from cases import CASES
from drawn_mutants import DRAWN, EQUIVALENT, UNNOTICED
from launching import sampled
from protocol_mutants import PAST
from recording import is_noticed
from schedules import play
from sources import changed, text_of

PARTS = 4

NOTICED = [*PAST.values(), *DRAWN]

SHARE = 0.85
"""The drawn faults that have to be noticed, of those that change anything."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_fault_is_noticed(part):
    for by, mutant in NOTICED[part::PARTS]:
        assert is_noticed(by, mutant) or any(is_noticed(seed, mutant) for seed in range(2000)), mutant


@pytest.mark.slow
def test_the_schedules_that_notice_faults_are_well_without_them():
    for seed in {by for by, _ in NOTICED if by not in CASES}:
        play(seed)


def test_few_drawn_faults_are_not_noticed():
    assert len(DRAWN) >= SHARE * (len(DRAWN) + len(UNNOTICED))


@pytest.mark.parametrize("mutants", [[one for _, one in NOTICED], [*EQUIVALENT, *UNNOTICED]])
def test_every_fault_still_applies(mutants):
    for mutant in mutants:
        compile(changed(mutant), mutant.file, "exec")


@pytest.mark.slow
def test_faults_are_drawn_from_the_sources():
    for name in sampled([*drawing.COUNTS]):
        text = text_of(name)
        drawn = drawing.drawn(name, text)
        assert drawn == drawing.drawn(name, text)
        assert all(text.count(old) == 1 and old != new for old, new in drawn)
