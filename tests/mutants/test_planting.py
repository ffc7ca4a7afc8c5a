"""The planted faults still apply; whoever changes such a line carries its fault over."""

import re

import pytest

from mutants.planting import ROOT, Mutant, planted, rooms

FAULTS = [(room, mutant) for room, some in rooms().items() for mutant in some]


@pytest.mark.parametrize("room", rooms())
def test_every_fault_applies_and_names_tests_that_exist(room):
    for mutant in rooms()[room]:
        compile(planted(mutant), mutant.file, "exec")
        paths = [word for word in mutant.tests.split() if word.startswith(("tests/", "easydist/"))]
        assert paths, mutant
        for path in paths:
            file, *names = re.sub(r"\[.*", "", path).split("::")
            text = (ROOT / file).read_text()
            assert all(f"def {name}(" in text or f"class {name}" in text for name in names), mutant


def test_there_are_enough_faults():
    assert len(FAULTS) >= 120


def test_a_fault_whose_line_has_changed_is_an_error():
    for where, old in (("gone", "x"), ("Packing", "no such text"), ("", "self")):
        with pytest.raises(LookupError, match=r"data/packing\.py"):
            planted(Mutant("data/packing.py", where, old, "y", ""))
