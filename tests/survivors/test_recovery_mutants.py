"""Each mutant of the modules that agree on survivors is noticed: by a case, or by its schedules."""

import agreement_cases
import pytest
import random_agreements
import random_recoveries
import recovery_cases
from explored_agreements import explore
from recovery_mutants import FIRST_MEETING, FOUND, MEMBERSHIP, PAGE, RECOVERING, REGISTERS, mutated
from register_reader import check_reader

from easydist.groups import membership

TABLES = {
    "easydist.groups.membership": MEMBERSHIP,
    random_recoveries.RECOVERING: RECOVERING,
    random_recoveries.FIRST_MEETING: FIRST_MEETING,
    random_recoveries.REGISTERS: REGISTERS,
    "easydist.liveness.page": PAGE,
}
MUTANTS = [(module, name) for module, table in TABLES.items() for name in table]


def machine_of(mutant):
    """Return the mutated machine; its registers and actions are those of the real module."""
    module = mutated("easydist.groups.membership", mutant)
    names = [name for name, kind in vars(membership).items() if isinstance(kind, type) and name != "Membership"]
    vars(module).update({name: getattr(membership, name) for name in names})
    return module.Membership


def tries(module, mutant, found):
    """Yield functions of which one fails if the mutant is noticed, the cheapest ones first."""
    if module.endswith("membership"):
        machine = machine_of(mutant)
        yield from (lambda case=case: case(machine) for case in agreement_cases.CASES)
        if isinstance(found, tuple):
            yield lambda: explore(*found[:2], machine, found[2])
        for seed in [found, *range(300)] if isinstance(found, int) else range(300):
            yield lambda seed=seed: random_agreements.play(seed, machine)
    elif module.endswith("page"):
        yield lambda: check_reader(mutated(module, mutant))
    else:
        modules = random_recoveries.loaded({module: mutant})
        yield from (lambda case=case: case(modules) for case in recovery_cases.CASES)
        for seed in [found or 0, *range(150)]:
            yield lambda seed=seed: random_recoveries.play(seed, modules)


def fails(attempt):
    try:
        attempt()
    except (Exception, pytest.fail.Exception):  # a mutant may raise anything
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), MUTANTS, ids=[name for _, name in MUTANTS])
def test_a_mutant_is_noticed(module, name):
    assert any(map(fails, tries(module, TABLES[module][name], FOUND.get(name))))


@pytest.mark.slow
@pytest.mark.parametrize("module", TABLES)
def test_without_a_mutant_nothing_is_noticed(module):
    found = {FOUND[name] for name in TABLES[module] if isinstance(FOUND.get(name), int)}
    for seed in found:
        if module.endswith("membership"):
            random_agreements.play(seed, machine_of(None))
        else:
            random_recoveries.play(seed, random_recoveries.loaded())


@pytest.mark.parametrize(("module", "name"), MUTANTS, ids=[name for _, name in MUTANTS])
def test_a_mutant_still_applies(module, name):
    mutated(module, TABLES[module][name])


def test_all_that_is_recorded_is_about_a_mutant():
    assert set(FOUND) <= {name for _, name in MUTANTS}


@pytest.mark.parametrize("case", recovery_cases.CASES, ids=lambda case: case.__name__)
def test_a_process_keeps_the_rules(case):
    case(random_recoveries.loaded())
