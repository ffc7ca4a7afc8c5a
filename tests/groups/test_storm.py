"""Storms: ranks play a random program while they are killed, stopped, continued and interrupted, and recover.

``python tests/scripts/storm.py CASE``, with the tests on the path, plays a case again.
"""

import functools
import json
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "storm.py"
KINDS = ["shm", "gloo", "torch_shm", "comm_shm", "comm_gloo"]
SIZES = [3, 4, 4, 3, 5, 4, 3, 6, 4]
FEW = ["3/torch_shm/27", "3/shm/55", "3/comm_shm/58", "4/comm_gloo/3", "3/gloo/17", "4/shm/11", "5/comm_shm/14"]
FEW = launching.sampled(FEW, 3)


def cases(first, count):
    """Return some of a sequence of cases: all kinds in turn, with 3 to 6 ranks."""
    return tuple(f"{SIZES[n % len(SIZES)]}/{KINDS[n % len(KINDS)]}/{n}" for n in range(first, first + count))


@functools.cache
def launched(some):
    """Return what the controllers of these cases have found."""
    out, _ = launching.forked(SCRIPT, *some, seconds=300, GLOO_SOCKET_IFNAME="lo")
    rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"case"')]
    return {row["case"]: row for row in rows}


def check(row, record_property):
    """Nothing was wrong; the end of the run tells how long the recoveries took."""
    record_property("recovered", row["recovered"])
    log = "\n".join(json.dumps(event) for event in row.get("log", []))
    assert not row["wrong"], f"{row['case']}\n" + "\n".join(row["wrong"]) + f"\n{log}"


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW)
def test_a_storm(case, record_property):
    check(launched(tuple(FEW))[case], record_property)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.skipif(launching.examples(1200) == 1200, reason="300 storms take half an hour: make stress")
@pytest.mark.parametrize("first", range(1000, 1300, 10))
def test_three_hundred_storms(first, record_property):
    for case in cases(first, 10):
        check(launched(cases(first, 10))[case], record_property)
