"""The lines of docstrings and pages that show what a call returns on two ranks: `call  # rank 0: …   rank 1: …`."""

import re

import pytest
import torch
from launching import ROOT

import easydist
from easydist.testing import distributed

LINE = re.compile(r"^ *(\S.*\S)\s+# (both ranks: .*|rank 0: .*\S   rank 1: .*)$", re.MULTILINE)
SOURCES = [*(ROOT / "easydist" / "verbs").glob("*.py"), *(ROOT / "docs").glob("*.md")]
LINES = {f"{path.name} {call}": (call, said) for path in SOURCES for call, said in LINE.findall(path.read_text())}
NAMES = {name: getattr(easydist, name) for name in easydist.__all__ if name != "print"}


def test_the_verbs_show_two_ranks():
    shown = {call.partition("(")[0].removeprefix("easydist.") for call, _ in LINES.values()}
    assert shown >= {"gather", "reduce", "broadcast", "scatter", "all_to_all", "gather_object", "broadcast_object_list"}


@pytest.mark.parametrize("name", sorted(LINES))
@distributed(world_size=2)
def test_a_call_returns_what_its_line_says(rank, name):
    call, said = LINES[name]
    got = repr(eval(call, {**NAMES, "easydist": easydist, "torch": torch, "rank": rank}))
    ranks = [said.removeprefix("both ranks: ")] * 2 if said[0] == "b" else re.split(r"   rank 1: ", said[8:])
    assert got == ranks[rank].strip()
