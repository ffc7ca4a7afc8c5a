"""Making coordinators while ranks die, and after the survivors have recovered: real processes, real signals."""

import functools
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "coordinator_making.py"
CASES = [f"{backend}/{act}/{rank}" for backend in ("shm", "gloo") for act in ("lost", "dies") for rank in (0, 2)]
pytestmark = pytest.mark.slow


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, CASES)[0]


def survivors(case):
    """Return the rows of the survivors, and the rank that was killed."""
    rows, statuses = launched()[case]
    victim = int(case[-1])
    assert statuses == [-9 if rank == victim else 0 for rank in range(3)]
    assert rows.keys() == {0, 1, 2} - {victim}
    return rows, victim


@pytest.mark.parametrize("case", [case for case in CASES if "/lost/" in case])
def test_survivors_make_coordinators_of_their_new_world(case):
    rows, _ = survivors(case)
    for rank, row in rows.items():
        assert row["ranks"] == sorted(rows)
        assert row["sum"] == sum(rows)
        assert row["alone"] == [[row["index"]], [rank]]


@pytest.mark.parametrize("case", [case for case in CASES if "/dies/" in case])
def test_a_rank_that_dies_while_a_coordinator_is_made_is_named_by_all(case):
    rows, victim = survivors(case)
    for row in rows.values():
        assert row["type"] == "PeerLostError"
        assert row["text"].startswith(f"GroupCoordinator: rank {victim} is lost: ")


def test_a_rank_that_does_not_exist_is_refused_in_a_launched_world():
    for rank, row in survivors("shm/dies/2")[0].items():
        assert (
            row["refusal"]
            == f"send_object: dst=9 is not another rank of the group, which has 3 ranks (0–2); this is rank {rank}"
        )
