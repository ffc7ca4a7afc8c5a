"""Ranks that are killed, stopped, late, interrupted or raise while others wait: real processes, real signals."""

import functools
import re
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "loss.py"
SCENARIOS = ["kill", "exit", "raise", "stop", "late", "interrupt", "together", "kill_inside", "stop_inside"]
CASES = [(3, "shm", name) for name in SCENARIOS]
CASES += launching.sampled([(3, "gloo", name) for name in SCENARIOS], 4)
CASES += [(3, "shm", "kill_first"), (3, "gloo", "kill_first"), (4, "0011", "kill_first")]
CASES += [(3, "shm", "kill_ahead")]
CASES += [(3, "shm", "kill_meeting"), (3, "gloo", "kill_meeting")]
CASES += launching.sampled([(2, kind, name) for name in ("midway", "comm_midway") for kind in ("gloo", "01")], 3)
CASES += [(2, "shm", "message_midway"), (2, "gloo", "thread_midway")]  # a thread waits if gloo's waits cannot be ended
CASES += launching.sampled([(size, "shm", name) for name in ("kill", "late", "raise") for size in (4, 2)], 6)
CASES += [(4, "0011", name) for name in ("kill", "late", "interrupt", "stop", "store_stops")]  # two hosts
CASES += launching.sampled([(9, "gloo", "late"), (9, "012345678", "kill"), (4, "0001", "kill")], 3)  # headers go round
AT = r"at \S*loss.py:\d+"


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, ["/".join(map(str, case)) for case in CASES])


def outcome(world_size, backend, scenario):
    return launched()[0][f"{world_size}/{backend}/{scenario}"]


def cases(*scenarios):
    """Parametrizes a test over the runs of these scenarios."""
    chosen = [case for case in CASES if case[2] in scenarios]
    return pytest.mark.parametrize(("world_size", "backend", "scenario"), chosen)


def survivors(world_size, backend, scenario, kind):
    """The rows of all ranks but the last, each of which raised ``kind`` and ended well."""
    rows, statuses = outcome(world_size, backend, scenario)
    assert [rows[rank]["type"] for rank in range(world_size - 1)] == [kind] * (world_size - 1)
    assert statuses[:-1] == [0] * (world_size - 1)
    return [rows[rank] for rank in range(world_size - 1)], statuses[-1]


@pytest.mark.slow
@cases("kill", "exit", "kill_inside", "kill_ahead")
def test_a_process_that_ends_is_named(world_size, backend, scenario):
    rows, status = survivors(world_size, backend, scenario, "PeerLostError")
    expected, how = (3, "exit status 3") if scenario == "exit" else (-9, "killed by SIGKILL")
    assert status == expected
    for rank, row in enumerate(rows):
        lost = row["pids"][-1]
        assert (row["fields"]["rank"], row["fields"]["pid"]) == (world_size - 1, lost)
        assert row["fields"]["exit_status"] in (expected, None)  # None where its parent was faster
        known = how if row["fields"]["exit_status"] is not None else "exit status not known"
        what = (
            rf"(: its connection broke| ended \({known}\))"  # the former where the process took long to end, or is far
        )
        assert re.fullmatch(
            rf"gather: rank {world_size - 1} is lost: process {lost} on \S+{what}\n"
            rf"  rank {world_size - 1} was last seen in gather, call [23], {AT}\n"
            rf"  rank \d waited in gather, call 3, {AT}\n"
            r"The group cannot continue without it\. "
            r"Restart the job, or call easydist\.recover\(\) on the ranks that are left\.",
            row["text"],
        ), (rank, row["text"])
        assert row["next"] == "PeerLostError"


@pytest.mark.slow
@cases("kill_first")
def test_a_process_that_ends_before_its_first_call_is_named(world_size, backend, scenario):
    rows, status = survivors(world_size, backend, scenario, "PeerLostError")
    assert status == -9
    for row in rows:
        lost = rf"gather: rank {world_size - 1} is lost: process \d+ on \S+ ended \(killed by SIGKILL\)\n"
        assert re.match(lost, row["text"])
        assert row["fields"]["rank"] == world_size - 1
        assert row["next"] == "PeerLostError"


@pytest.mark.slow
@cases("kill_meeting")
def test_the_end_of_a_process_that_has_come_to_reconnect_is_noticed(world_size, backend, scenario):
    rows, status = survivors(world_size, backend, scenario, "PeerLostError")
    assert status == -9
    for row in rows:
        assert re.match(r"gather: rank 2 is lost: process \d+ on \S+ ended ", row["text"])
        assert row["next"] == "PeerLostError"


@pytest.mark.slow
@cases("midway", "comm_midway", "message_midway", "thread_midway")
def test_the_end_of_a_process_in_the_middle_of_a_large_message_is_noticed(world_size, backend, scenario):
    """gloo does not end such a message when its connection breaks."""
    kind = "CommPeerLost" if scenario == "comm_midway" else "PeerLostError"
    [row], status = survivors(world_size, backend, scenario, kind)
    assert status == -9
    assert row["fields"]["rank"] == 1
    assert row["next"] == "PeerLostError"
    assert "new_comm" not in row["text"]  # the last call that the communicator's monitor has seen


@pytest.mark.slow
@cases("raise")
def test_an_exception_that_ends_a_process_reaches_the_others(world_size, backend, scenario):
    rows, status = survivors(world_size, backend, scenario, "RemoteError")
    assert status == 1
    for row in rows:
        assert f"gather: rank {world_size - 1} ended with an exception while rank" in row["text"]
        assert f"\n  rank {world_size - 1}: ValueError: bad batch\n" in row["text"]
        assert row["next"] == "RemoteError"
    assert "terminate called" not in launched()[1]


@pytest.mark.slow
@cases("stop", "stop_inside")
def test_a_stopped_process_is_said_to_be_alive_and_stopped(world_size, backend, scenario):
    rows, status = survivors(world_size, backend, scenario, "CollectiveTimeout")
    assert status == -9  # the test's own end of it
    for rank, row in enumerate(rows):
        # On the other host it is not to be seen; nor in the text of a rank there that was the first to report.
        is_seen = backend != "0011" or (rank > 1 and not row["fields"].get("is_reported"))
        condition = r"; process \d+ on \S+ is alive but stopped" if is_seen else ""
        if scenario == "stop":
            assert row["fields"]["missing"] == [world_size - 1]
            assert re.match(rf"gather: 1 of {world_size} ranks did not come within [\d.]+ s\n", row["text"])
            state = "missing; last seen in gather, call 2"
        else:
            assert re.match(r"gather: all ranks came, but their data did not arrive within [\d.]+ s\n", row["text"])
            state = "came; gather, call 3"
        assert re.search(rf"\n  rank {world_size - 1}: {state}, {AT}{condition}", row["text"])


@pytest.mark.slow
@cases("late")
def test_who_comes_late_hears_that_the_others_gave_up_and_all_connect_anew(world_size, backend, scenario):
    rows = outcome(world_size, backend, scenario)[0]
    assert [rows[rank]["type"] for rank in range(world_size)] == ["CollectiveTimeout"] * world_size
    for row in rows.values():
        assert f"\n  rank {world_size - 1}: missing; last seen in gather, call 2, " in row["text"]
        assert row["next"] == list(range(world_size))


@pytest.mark.slow
@cases("store_stops")
def test_where_the_store_s_process_is_stopped_the_others_say_so_in_time_and_all_connect_anew(
    world_size, backend, scenario
):
    rows = outcome(world_size, backend, scenario)[0]
    for rank in range(world_size):
        assert rows[rank]["type"] == "CollectiveTimeout"
        assert rows[rank]["next"] == list(range(world_size))
        assert set(rows[rank]["fields"]["missing"]) <= {0}  # innocent ranks are not blamed
    assert rows[1]["fields"]["missing"] == [0]
    assert re.match(
        r"gather: 1 of 4 ranks did not come, and 2 could not be observed, within [\d.]+ s\n", rows[1]["text"]
    )
    assert (
        "\n  rank 2: could not be observed; it may have come\n  rank 3: could not be observed; it may have come\n"
        in rows[1]["text"]
    )
    assert rows[2]["fields"]["missing"] == []
    assert re.match(r"gather: 2 of 4 ranks could not be observed within [\d.]+ s\n", rows[2]["text"])
    assert "alive but stopped (SIGSTOP)\n" in rows[1]["text"]
    assert "\nThe store through which the hosts exchange their status does not answer: rank 0, or " in rows[1]["text"]


@pytest.mark.slow
@cases("interrupt")
def test_ctrl_c_ends_the_wait_on_every_rank_and_the_group_works_on(world_size, backend, scenario):
    rows, statuses = outcome(world_size, backend, scenario)
    ranks = list(range(world_size))
    assert [rows[rank]["type"] for rank in ranks] == ["KeyboardInterrupt"] * world_size
    assert [rows[rank]["next"] for rank in ranks] == [ranks] * world_size
    assert statuses == [0] * world_size


@pytest.mark.slow
@cases("together")
def test_together_tells_all_ranks_of_an_exception_and_the_group_works_on(world_size, backend, scenario):
    rows, status = survivors(world_size, backend, scenario, "RemoteError")
    assert status == 0
    last = f"rank {world_size - 1}"
    for row in rows:
        assert row["text"] == f"together: the body raised on {last}\n  {last}: ValueError: bad batch"
        assert row["next"] == list(range(world_size))
