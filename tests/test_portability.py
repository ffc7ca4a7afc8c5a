"""Tests on systems that lack features of Linux: on a Mac, in a sandbox."""

from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "portability.py"

SHARES_MEMORY = ["futex", "pidfd", "futex+pidfd"]
USES_GLOO = launching.sampled(
    ["proc", "shm", "memfd", "c", "memfd+pidfd", "linux", "linux+proc+shm+c", "proc+shm+futex+memfd+pidfd"]
)
SEES_PROCESSES = [*SHARES_MEMORY, "shm", "c"]
"""The cases in which the end of a process is seen, not only the end of its connections."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def met():
    """Return rank 0's outcome in each case, after all verbs had worked and rank 1 was killed."""
    found, _ = launching.launched(SCRIPT, [*SHARES_MEMORY, *USES_GLOO])
    return found


@pytest.mark.parametrize("case", SHARES_MEMORY + USES_GLOO)
def test_every_verb_works_and_a_lost_rank_is_named(met, case):
    rows, statuses = met[case]
    assert statuses == [0, -9]
    assert rows[0]["backend"] == ("shm" if case in SHARES_MEMORY else "gloo")
    assert (rows[0]["type"], rows[0]["lost"]) == ("PeerLostError", 1)
    how = "ended (killed by SIGKILL)" if case in SEES_PROCESSES else ": its connection broke"
    assert rows[0]["text"].startswith(f"gather: rank 1 is lost: process {rows[0]['peer']} on ")
    assert how in rows[0]["text"].splitlines()[0]
