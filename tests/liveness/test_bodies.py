"""Waits for a rank in the body of ``main_process_first``: they outlast the group's limit, and end as all waits do."""

import functools
import re
from pathlib import Path

import launching
import pytest

from easydist.errors import WireError
from easydist.liveness import bodies

SCRIPT = Path(__file__).parent.parent / "scripts" / "bodies.py"
SCENARIOS = ["long", "second", "raises", "killed", "stops", "calls", "timeout"]
CASES = [(3, "shm", name) for name in SCENARIOS]
CASES += launching.sampled([(3, backend, name) for name in SCENARIOS for backend in ("gloo", "011")], 4)
CASES += [
    (2, "shm", "first"),
    (3, "gloo", "first"),
    (3, "easydist_shm", "first"),
    (3, "011", "local"),
    (3, "011", "local_killed"),
    (4, "0011", "second"),
]
CASES += launching.sampled([(3, "easydist_shm", "second"), (2, "easydist_shm", "long"), (2, "shm", "long")], 3)
AT = r"(?:local_)?main_process_first at \S*bodies\.py:\d+"


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, ["/".join(map(str, case)) for case in CASES])


def cases(*scenarios):
    """Parametrizes a test over the runs of these scenarios."""
    chosen = [case for case in CASES if case[2] in scenarios]
    return pytest.mark.parametrize(("size", "backend", "scenario"), chosen)


def rows_of(size, backend, scenario):
    found, err = launched()
    rows, statuses = found[f"{size}/{backend}/{scenario}"]
    return rows, statuses, err


def test_a_message_is_read_as_it_was_written_and_nothing_else_is():
    with bodies.running("main_process_first at train.py:7"):
        first, second = bodies.message(), bodies.message()
    assert first != second
    body = bodies.of_message("its body", first.encode())
    assert body.text == "main_process_first at train.py:7"
    assert (bodies.message(), bodies.of_message("its body", None)) == (None, None)
    for damaged in (b"", b"null", b"[1]", b'[0, "a", [["world", "a1"]]]', b'[0, "a", [["world", "a1", "2"]]]'):
        with pytest.raises(WireError, match=r"^its body is damaged"):
            bodies.of_message("its body", damaged)


@pytest.mark.slow
@cases("first", "local", "long", "second")
def test_a_body_may_take_longer_than_the_groups_limit(size, backend, scenario):
    rows, statuses, _ = rows_of(size, backend, scenario)
    assert statuses == [0] * size
    assert [rows[rank]["type"] for rank in range(size)] == [None] * size
    assert [rows[rank]["next"] for rank in range(size)] == [list(range(size))] * size
    slow = {"second": size - 1, "local": 1}.get(scenario, 0)
    told = [text for rank in range(size) if rank != slow for text in rows[rank]["warnings"]]
    assert any(re.search(rf"\n  rank {slow}: in the body of {AT}", text) for text in told), told


@pytest.mark.slow
@cases("raises")
def test_a_long_body_that_raises_ends_the_wait(size, backend, scenario):
    rows, _, _ = rows_of(size, backend, scenario)
    assert rows[0]["type"] == "ValueError"
    for rank in range(1, size):
        text = "main_process_first: the body raised on rank 0\n  rank 0: ValueError: no space"
        assert (rows[rank]["type"], rows[rank]["text"], rows[rank]["ran"]) == ("RemoteError", text, False)
    assert [rows[rank]["next"] for rank in range(size)] == [list(range(size))] * size


@pytest.mark.slow
@cases("killed")
def test_a_process_that_is_killed_in_a_long_body_is_lost(size, backend, scenario):
    rows, statuses, _ = rows_of(size, backend, scenario)
    assert statuses[0] == -9
    assert [rows[rank]["type"] for rank in range(1, size)] == ["PeerLostError"] * (size - 1)


@pytest.mark.slow
@cases("local_killed")
def test_a_process_that_the_others_have_not_met_is_lost_in_its_body_too(size, backend, scenario):
    rows, statuses, _ = rows_of(size, backend, scenario)
    assert statuses == [0, -9, 0]
    assert [rows[rank]["type"] for rank in (0, 2)] == ["PeerLostError"] * 2
    assert "main_process_first: rank 1 is lost: " in rows[0]["text"]


@pytest.mark.slow
@cases("stops")
def test_a_stopped_process_is_not_in_its_body(size, backend, scenario):
    rows, statuses, _ = rows_of(size, backend, scenario)
    assert statuses[-1] == -9, "the test's own end of it"
    assert [rows[rank]["type"] for rank in range(size - 1)] == ["CollectiveTimeout"] * (size - 1)
    assert f"\n  rank {size - 1}: missing; last seen in main_process_first, call 2, " in rows[0]["text"]


@pytest.mark.slow
@cases("calls")
def test_a_body_that_waits_for_a_waiting_rank_is_no_reason_to_wait(size, backend, scenario):
    rows, _, _ = rows_of(size, backend, scenario)
    assert [rows[rank]["type"] for rank in range(1, size)] == ["CollectiveTimeout"] * (size - 1)
    assert rows[0]["type"] == "PeerLostError", "the others have ended while its body waits for them"


@pytest.mark.slow
@cases("timeout")
def test_a_timeout_of_the_caller_limits_the_body(size, backend, scenario):
    rows, _, _ = rows_of(size, backend, scenario)
    assert [rows[rank]["type"] for rank in range(size)] == ["CollectiveTimeout"] * size
    assert re.match(r"main_process_first: [12] of 3 ranks (did not come|could)", rows[1]["text"]), rows[1]["text"]
    assert [rows[rank]["next"] for rank in range(size)] == [list(range(size))] * size
