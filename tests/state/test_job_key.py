"""The job key on real ranks: the right one, another one, none, and values that another program writes to the store."""

import functools
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "job_key.py"
RIGHT = ["2/first/right", "3/first/right", "3/gloo/right", "2/easydist_shm/right"]
SIGNED = ["2/first/wrong", "3/first/wrong", "2/first/missing", "3/first/missing", "3/first/only"]
SIGNED += ["3/easydist_shm/wrong", "2/easydist_shm/missing", "3/easydist_shm/only"]
LISTED = ["2/gloo/wrong", "3/gloo/missing", "3/gloo/only"]
FORGED = ["2/first/forged", "3/first/forged"]
pytestmark = pytest.mark.slow


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, [*RIGHT, *SIGNED, *LISTED, *FORGED])[0]


def rows_of(case):
    rows, statuses = launched()[case]
    assert statuses == [0] * int(case[0])
    return [rows[rank] for rank in range(int(case[0]))]


def errors_of(rows):
    """Return the texts of the errors of all ranks, which came long before the limit."""
    assert {row["type"] for row in rows} == {"WireError"}
    assert all(row["seconds"] < launching.within(20) / 2 for row in rows)
    return [row["text"] for row in rows]


@pytest.mark.parametrize("case", RIGHT)
def test_ranks_with_the_same_key_work(case):
    assert [row["first"]["got"] for row in rows_of(case)] == [list(range(int(case[0])))] * int(case[0])


@pytest.mark.parametrize("case", SIGNED)
def test_all_ranks_name_the_variable_and_a_rank(case):
    last = int(case[0]) - 1
    texts = errors_of([row["first"] for row in rows_of(case)])
    for rank, text in enumerate(texts):
        assert "EASYDIST_JOB_KEY" in text
        assert f"rank {last}" in text or rank == last or "this process on" in text


@pytest.mark.parametrize("case", LISTED)
def test_ranks_that_are_connected_already_list_all_keys(case):
    texts = errors_of([row["first"] for row in rows_of(case)])
    assert len(set(texts)) == 1
    assert texts[0].startswith("gather: the ranks have different job keys\n  rank 0 on ")
    assert texts[0].count("no EASYDIST_JOB_KEY") == {"wrong": 0, "missing": 1, "only": 2}[case.rpartition("/")[2]]
    assert texts[0].endswith("Give all ranks the same key: easydist run --job-key FILE")


@pytest.mark.parametrize("case", FORGED)
def test_a_report_of_another_program_is_refused_on_all_ranks_and_the_next_call_works(case):
    rows = rows_of(case)
    for text in errors_of([row["forged"] for row in rows]):
        assert text.startswith("the value of 'reports/log/1' in the group's store is not signed")
    assert [row["next"] for row in rows] == [{"got": list(range(len(rows)))}] * len(rows)
