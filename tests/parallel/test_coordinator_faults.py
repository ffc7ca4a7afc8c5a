"""Ranks that are killed, stopped, absent or interrupted in every kind of method: real processes, real signals."""

import functools
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "coordinator_faults.py"
COLLECTIVES = ["all_reduce", "all_reduce_large", "all_gatherv", "reduce_scatter", "gather", "broadcast", "barrier",
               "broadcast_object", "broadcast_tensor_dict", "dispatch", "combine"]  # fmt: skip
PAIRS = ["send", "recv", "send_object", "recv_object", "send_tensor_dict", "send_small", "recv_tensor_dict", "isend",
         "irecv"]  # fmt: skip
FEW = ["all_reduce_large", "broadcast_tensor_dict", "send_tensor_dict", "recv_tensor_dict", "isend"]
"""Of these methods also what takes longer, or goes the same way as others."""

CASES = [("shm", "kill", method) for method in [*COLLECTIVES, *PAIRS, "queue", "create_mq_broadcaster"]]
CASES += [("gloo", act, method) for act in ("kill", "interrupt") for method in [*FEW, "send", "recv_object", "irecv"]]
CASES += [("shm", "interrupt", method) for method in ["barrier", *FEW, "dispatch", "send", "recv_object"]]
CASES += [("shm", "stop", method) for method in [*FEW, "recv"]]
CASES += [(backend, "leave", f"isend {i}") for i in range(3) for backend in ("shm", "gloo")]
CASES = [*launching.sampled(CASES, 5), ("shm", "interrupt", "queue")]


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, ["/".join(case) for case in CASES])


def cases(act):
    """Parametrizes a test over the runs in which this happens."""
    return pytest.mark.parametrize(("backend", "act", "method"), [case for case in CASES if case[1] == act])


def waiting(backend, act, method):
    """Return the rows of the ranks that waited for the last one, all rows, and the last rank's exit status."""
    rows, statuses = launched()[0][f"{backend}/{act}/{method}"]
    assert "terminate called" not in launched()[1]
    assert statuses[:-1] == [0, 0]
    return {rank: row for rank, row in rows.items() if row["has_part"]}, rows, statuses[-1]


@pytest.mark.slow
@cases("kill")
def test_a_rank_that_is_killed_is_named_in_every_method(backend, act, method):
    mine, rows, status = waiting(backend, act, method)
    assert status == -9
    assert mine.keys() == ({0} if method in PAIRS else {0, 1})
    for row in mine.values():
        assert row["type"] == "PeerLostError", row
        assert ("the writer is lost" if method == "queue" else "rank 2 is lost") in row["text"]
    assert {row["next"] for row in rows.values()} == {"PeerLostError"}


@pytest.mark.slow
@cases("stop")
def test_a_rank_that_is_stopped_is_named_when_the_time_is_over(backend, act, method):
    mine, _, _ = waiting(backend, act, method)
    for row in mine.values():
        assert row["type"] == "CollectiveTimeout", row
        assert "rank 2: missing" in row["text"]
        assert "is alive but stopped (SIGSTOP)" in row["text"]


@pytest.mark.slow
@cases("interrupt")
def test_after_ctrl_c_in_any_method_the_coordinator_works_again(backend, act, method):
    mine, rows, status = waiting(backend, act, method)
    assert status == 0
    assert mine[0]["type"] == "KeyboardInterrupt"
    if method != "queue":
        assert {row["type"] for rank, row in mine.items() if rank} == {"RemoteError"}
        assert all("rank 0 was interrupted (KeyboardInterrupt)" in row["text"] for rank, row in mine.items() if rank)
    assert [row["next"] for row in rows.values()] == [[0, 1, 2]] * 3
    assert rows[0]["pair"] == (["x", "next"] if method == "queue" else 2)  # nothing of the queue was lost


@pytest.mark.slow
@cases("leave")
def test_a_process_ends_well_though_nobody_takes_what_it_has_sent(backend, act, method):
    assert launched()[0][f"{backend}/{act}/{method}"][1] == [0, 0, 0]
    assert "terminate called" not in launched()[1]
