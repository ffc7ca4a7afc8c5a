"""The first call of a launched job: its limit, its warning, late ranks, mistakes, and values that are damaged."""

import functools
import socket
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "first_call.py"
CASES = [
    "2/late",
    "3/late",
    "3/never",
    "3/server",
    "2/early",
    "3/early",
    "2/same",
    "4/same",
    "2/damaged",
    "2/destroyed",
    "2/connecting",
    "3/connecting",
    "2/full",
    "3/gone",
    "4/half",
    "3/absent",
]
pytestmark = pytest.mark.slow


@functools.cache
def launched():
    """Return for each case the rows by rank and the exit statuses; and what the loggers wrote."""
    return launching.launched(SCRIPT, CASES, EASYDIST_WARN_AFTER="0.3")


def outcome(case):
    return launched()[0][case]


@pytest.mark.parametrize("case", ["2/late", "3/late"])
def test_the_first_call_has_a_limit_and_the_next_one_tries_again(case):
    rows, statuses = outcome(case)
    everyone = list(range(len(rows)))
    for rank in everyone:
        first = rows[rank]["first"]
        if rank == 1:  # it comes while the others wait already in their next call
            assert first["type"] in ("RemoteError", "CollectiveTimeout")
            continue
        assert (first["type"], first["missing"]) == ("CollectiveTimeout", [1])
        assert f"gather: 1 of {len(rows)} ranks did not come within " in first["text"]
        assert "\n  rank 1: missing; not seen in this group yet\n" in first["text"]
    assert [rows[rank]["second"]["got"] for rank in everyone] == [everyone] * len(rows)
    assert set(statuses) == {0}


@pytest.mark.parametrize("case", ["2/connecting", "3/connecting"])
def test_a_rank_that_dies_while_the_group_is_connected_is_named_at_once(case):
    """Connecting may take 30 seconds, and as long as the others would wait: the script has 90."""
    rows, statuses = outcome(case)
    last = int(case[0]) - 1
    assert [rows[rank]["first"]["type"] for rank in range(last)] == ["PeerLostError"] * last
    assert all(f"gather: rank {last} is lost: process " in rows[rank]["first"]["text"] for rank in range(last))
    assert all("SIGKILL" in rows[rank]["first"]["text"] for rank in range(last))
    assert rows[0]["first"]["seconds"] < launching.within(10)
    assert sorted(statuses) == [-9, *[0] * last]
    check_survivors(rows, list(range(last)))


def test_a_rank_that_gets_no_connection_to_the_store_has_a_limit_too():
    rows, statuses = outcome("2/full")
    assert {row["first"]["type"] for row in rows.values()} <= {"CollectiveTimeout", "RemoteError"}
    assert all(row["first"]["seconds"] < launching.within(10) for row in rows.values())
    assert [rows[rank]["second"] for rank in (0, 1)] == [{"got": [0, 1]}] * 2
    assert set(statuses) == {0}


def check_survivors(rows, left):
    """These ranks have continued, with each other alone and in this order."""
    assert [rows[rank]["second"] for rank in left] == [{"got": left}] * len(left)
    assert [rows[rank]["place"] for rank in left] == [[i, len(left), i, len(left)] for i in range(len(left))]


def test_the_others_go_on_without_a_rank_that_ended_before_its_first_call():
    rows, statuses = outcome("3/gone")
    assert sorted(statuses) == [0, 0, 3]
    check_survivors(rows, [0, 1])


def test_ranks_that_had_made_the_group_and_one_that_had_not_go_on_together():
    rows, statuses = outcome("4/half")
    assert sorted(statuses) == [-9, -9, 0, 0]
    for rank in (0, 2):
        assert rows[rank]["had"]
        assert [rows[rank][name]["type"] for name in ("first", "then")] == ["PeerLostError"] * 2
        assert rows[rank]["once"]["second"] == {"got": [0, 1, 2]}
    check_survivors(rows, [0, 2])


def test_a_rank_whose_first_call_comes_after_the_others_have_recovered_is_told_at_once():
    """Its connecting, which takes as long as its time limit, does not keep it from the store."""
    rows, statuses = outcome("3/absent")
    assert set(statuses) == {0}
    check_survivors(rows, [0, 1])
    assert [rows[rank]["third"] for rank in (0, 1)] == [{"got": [0, 1]}] * 2
    assert [rows[2][name]["type"] for name in ("second", "third")] == ["LeftOutError"] * 2
    assert rows[2]["third"]["seconds"] < rows[2]["first"]["seconds"] + launching.within(5)


def test_the_limit_of_the_state_holds_for_the_first_call_if_a_rank_raises_before_it():
    rows, statuses = outcome("3/never")
    assert statuses == [0, 1, 0]
    assert [rows[rank]["first"]["missing"] for rank in (0, 2)] == [[1], [1]]


def test_ranks_that_cannot_reach_the_store_name_the_rank_that_serves_it():
    rows, _ = outcome("3/server")
    for rank in (1, 2):
        first = rows[rank]["first"]
        assert (first["type"], first["missing"]) == ("CollectiveTimeout", [0])
        assert "\n  rank 0: missing; it serves the store, and has not made its first call\n" in first["text"]
    assert [rows[rank]["second"] for rank in range(3)] == [{"got": [0, 1, 2]}] * 3


def test_the_first_call_warns():
    _, err = launched()
    assert "  rank 1: missing; not seen in this group yet\nStill waiting." in err
    assert "rank 0: missing; it serves the store, and has not made its first call\n" in err


@pytest.mark.parametrize("case", ["2/early", "3/early"])
def test_a_rank_may_need_the_group_before_the_others_make_their_first_call(case):
    rows, _ = outcome(case)
    everyone = {"got": list(range(len(rows)))}
    for row in rows.values():
        assert (row["first"], row["second"], row["size"]) == (everyone, everyone, len(rows))
    assert rows[0]["had"]


@pytest.mark.parametrize("case", ["2/same", "4/same"])
def test_a_mistake_on_all_ranks_is_the_same_error_on_all_even_if_it_ends_them(case):
    rows, _ = outcome(case)
    assert [row["kind"] for row in rows.values()] == ["TypeError"] * int(case[0])


def test_a_damaged_value_of_the_store_ends_the_wait_on_all_ranks_and_is_named():
    rows, statuses = outcome("2/damaged")
    assert statuses == [0, 0]
    for rank in range(2):
        assert rows[rank]["first"]["type"] == "WireError"
        assert rows[rank]["first"]["text"].startswith("the value of 'reports/log/1' in the group's store is damaged")
        assert rows[rank]["second"] == {"got": [0, 1]}


def test_a_rank_that_destroys_the_group_of_the_first_call_is_known_to_have_left():
    rows, statuses = outcome("2/destroyed")
    assert statuses == [0, 0]
    assert rows[0]["first"]["type"] == "PeerLostError"
    assert rows[0]["first"]["text"].startswith("gather: rank 1 has left the group: ")


def test_rank_0_says_that_its_port_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        _, err = launching.forked("-c", "import easydist; easydist.gather(1)", status=1, **place)
    text = f"cannot serve the store at 127.0.0.1:{place['MASTER_PORT']}, because the port is in use: by"
    assert text in err.splitlines()[-1]


def test_rank_0_says_that_the_address_is_not_its_own():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(launching.free_port())}
    _, err = launching.forked("-c", "import easydist; easydist.gather(1, timeout=1)", status=1, **place)
    assert "or cannot reach it there. MASTER_ADDR has to be an address of its host\n" in err
