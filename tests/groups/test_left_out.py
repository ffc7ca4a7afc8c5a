"""Ranks that are stopped, late or interrupted around ``recover``, and survivors without a store."""

import functools
import re
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "left_out.py"
OUT = [f"3/{kind}/{how}" for kind in ("shm", "gloo", "comm_shm", "comm_gloo") for how in ("stop", "late")]
OUT += [
    "3/gloo/reconnect_stops",
    "3/shm/store_stops",
    *(f"3/{kind}/connect_stops" for kind in ("shm", "gloo", "comm_shm", "comm_gloo")),
]
GO_ON = [
    "3/shm/early",
    "3/gloo/early",
    "4/0011/hosts",
    "3/shm/store_lost",
    "3/gloo/store_lost",
    "3/comm_shm/store_lost",
]
GO_ON += ["3/comm_gloo/store_lost", "4/shm/group", "4/gloo/group"]
ALL = ["3/shm/nobody", "3/gloo/nobody", "4/0011/nobody", "3/shm/interrupt", "4/0011/interrupt"]
OTHER = ["4/0011/store_lost", "3/shm/again"]
OUT, GO_ON = launching.sampled(OUT), launching.sampled(GO_ON)
ALONE = ["3/shm/alone", "3/gloo/alone", "4/0011/alone", "3/torch_shm/alone", "3/torch_shm/torch"]
ALONE += [f"{size}/comm_{kind}/alone" for kind in ("shm", "gloo") for size in (2, 3, 4)]
ALONE += [f"3/comm_{kind}/{how}" for kind in ("shm", "gloo") for how in ("async", "messages", "split")]
ALONE += ["3/comm_shm/signal", "3/comm_shm/any_signal"]
INTERRUPTED = [f"3/comm_{kind}/{when}_interrupted" for kind in ("shm", "gloo") for when in ("connect", "split")]
OFTEN = [f"{size}/{kind}/often" for size, kind in [(2, "shm"), (3, "gloo"), (3, "torch_shm"), (4, "0011")]]
OFTEN += ["3/comm_shm/often", "3/comm_gloo/often", "2/shm/rounds"]
ALONE += [f"{case}/{how}" for how in ("chain", "verb") for case in ("4/comm_shm", "4/comm_gloo")]
ALONE, OFTEN, INTERRUPTED = (launching.sampled(some, 3) for some in (ALONE, OFTEN, INTERRUPTED))
DIES = [f"3/comm_{kind}/{how}" for kind in ("shm", "gloo") for how in ("chain_dies", "split_dies", "connect_dies")]
DIES += ["3/comm_shm/signal_dies", "3/comm_shm/connect_dies_late", "3/comm_gloo/connect_dies_late"]
IN_VAIN = [f"3/{kind}/attempt_dies" for kind in ("shm", "gloo", "torch_shm", "comm_shm", "comm_gloo")]
IN_VAIN += ["3/shm/meeting_interrupted", "3/gloo/meeting_interrupted"]
IN_VAIN += [f"{case}/attempt_interrupted" for case in ("3/shm", "3/gloo", "3/torch_shm", "3/comm_shm", "3/comm_gloo")]
ALL, DIES, IN_VAIN = launching.sampled(ALL), launching.sampled(DIES), launching.sampled(IN_VAIN, 3)


@functools.cache
def launched(*some):
    return launching.launched(SCRIPT, some)[0]


def outcome(case):
    """Return the row of each rank, and the exit statuses of all."""
    late = [*OUT, *GO_ON, *ALL, *OTHER]
    rows, statuses = launched(*(late if case in late else [*ALONE, *DIES, *INTERRUPTED, *OFTEN, *IN_VAIN]))[case]
    return rows, statuses


@pytest.mark.slow
@pytest.mark.parametrize("case", OUT)
def test_who_does_not_come_in_time_is_left_out_and_told(case):
    rows, statuses = outcome(case)
    out = 2 if case.endswith(("/stop", "/late")) else 0
    left = [rank for rank in range(3) if rank != out]
    assert [rows[rank]["members"] for rank in left] == [left, left]
    is_comm = "comm" in case
    assert (rows[out]["type"], rows[out]["is_runtime"]) == ("CommLeftOut" if is_comm else "LeftOutError", is_comm)
    assert rows[out]["gone_on"] == left
    who = ", ".join(map(str, left))
    assert f"recover: rank {out} was left out of " in rows[out]["text"]
    assert f": ranks {who} have continued without it" in rows[out]["text"]
    if not is_comm:
        assert rows[out]["next"] == [rows[out]["type"], rows[out]["text"]], "as each further call"
    assert statuses == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in OUT if "comm" in case and case.endswith("/stop")])
def test_a_timeout_of_a_communicator_says_that_a_rank_is_stopped(case):
    rows, _ = outcome(case)
    for rank in range(2):
        assert re.search(r"rank 2 did not come .*: process \d+ on \S+ is alive but stopped", rows[rank]["heard"])


@pytest.mark.slow
@pytest.mark.parametrize("case", GO_ON)
def test_survivors_go_on(case):
    rows, statuses = outcome(case)
    left = [rank for rank, status in enumerate(statuses) if status == 0]
    assert statuses.count(-9) == 1
    expected = dict.fromkeys(left, left)
    if case.endswith("group"):
        expected = {0: [4], 1: [1, 2], 2: [1, 2]}
    assert {rank: row["members"] for rank, row in rows.items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_where_nobody_is_lost_all_are_members(case):
    rows, _ = outcome(case)
    everyone = list(range(int(case[0])))
    assert {rank: row["members"] for rank, row in rows.items()} == dict.fromkeys(everyone, everyone)


@pytest.mark.slow
def test_without_a_store_ranks_of_several_hosts_are_told_what_to_do():
    rows, statuses = outcome("4/0011/store_lost")
    assert statuses == [-9, 0, 0, 0]
    assert {row["type"] for row in rows.values()} == {"PeerLostError"}
    for rank, row in rows.items():
        assert row["text"].startswith(f"recover: rank {rank} cannot agree with the survivors of the group ")
        assert "let the launcher host it" in row["text"]


@pytest.mark.slow
def test_a_group_is_recovered_once():
    rows, _ = outcome("3/shm/again")
    assert {row["again"] for row in rows.values()} == {
        "recover: this group has already been recovered. Continue with the group that recover() returned"
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE)
def test_who_waits_hears_at_once_that_another_rank_recovers(case):
    rows, statuses = outcome(case)
    everyone = list(range(int(case[0])))
    assert {rank: row["members"] for rank, row in rows.items()} == dict.fromkeys(everyone, everyone)
    assert statuses == [0] * len(everyone)
    kind = "CommRemoteError" if "comm" in case and "verb" not in case else "RemoteError"
    for rank in everyone[:-1]:
        assert rows[rank]["met"] == kind, rows[rank]["heard"]
        # A wait for several ranks may first hear of one that has heard of the last one, and recovers, too.
        who = "[0-9]" if "split" in case or "any_" in case else everyone[-1]
        assert re.search(f"rank {who} has left the group to recover it", rows[rank]["heard"])


@pytest.mark.slow
@pytest.mark.parametrize("case", DIES)
def test_who_waits_outside_of_operations_hears_of_a_death(case):
    rows, statuses = outcome(case)
    assert statuses == [0, 0, -9]
    assert {rank: row["members"] for rank, row in rows.items()} == {0: [0, 1], 1: [0, 1]}
    for rank in (0, 1):
        assert rows[rank]["met"] == "CommPeerLost", rows[rank]["heard"]
        assert "rank 2" in rows[rank]["heard"]


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERRUPTED)
def test_who_waits_in_a_new_communicator_hears_that_a_rank_was_interrupted_before_it_had_it(case):
    rows, statuses = outcome(case)
    assert statuses == [0, 0, 0]
    for rank in (0, 1):
        assert rows[rank]["met"] == "CommRemoteError", rows[rank]["heard"]
        assert re.search("rank 2 .* interrupted", rows[rank]["heard"])


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_VAIN)
def test_an_attempt_to_connect_ends_with_a_member_that_cannot_come(case):
    rows, statuses = outcome(case)
    size, dies = int(case[0]), case.endswith("dies")
    assert statuses == [0] * (size - 1) + [-9 if dies else 0]
    left = [*range(size - dies)]
    assert {rank: row["members"] for rank, row in rows.items()} == dict.fromkeys(left, left)


@pytest.mark.slow
@pytest.mark.parametrize("case", OFTEN)
def test_threads_and_descriptors_end_with_the_group_that_was_recovered(case):
    rows, statuses = outcome(case)
    everyone = list(range(int(case[0])))
    assert statuses == [0] * len(everyone)
    assert {rank: row["members"] for rank, row in rows.items()} == dict.fromkeys(everyone, everyone)
    assert {rank: row["more"] for rank, row in rows.items()} == {rank: {} for rank in everyone}
