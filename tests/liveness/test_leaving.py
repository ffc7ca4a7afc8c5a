"""Ranks that leave their group while their processes live on: the others hear of it, and what was sent arrives."""

import functools
import json
import time
from pathlib import Path

import launching
import pytest
from torch.distributed import HashStore

from easydist.liveness.events import Heard, Why
from easydist.liveness.log import Log
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import OwnPage, PeerPage
from easydist.liveness.peer import Peer, record
from easydist.liveness.report import LEAVING, Report
from easydist.liveness.rules import CallProtocol
from easydist.liveness.timed_store import TimedStore

SCRIPT = Path(__file__).parent.parent / "scripts" / "leaving.py"
WAITS = {
    "shm": ["all_reduce", "barrier", "send", "recv", "recv_object"],
    "gloo": ["all_reduce", "barrier", "send", "recv_object"],
    "hosts": ["all_reduce", "recv"],
    "verbs_shm": ["gather"],
    "queue": ["broadcast_object"],
    "verbs_gloo": ["gather", "recv"],
    "private_shm": ["gather"],
    "private_gloo": ["gather"],
    "torch_shm": ["all_reduce", "polled", "barrier", "send", "recv", "gather"],
    "comm_shm": ["all_reduce", "asynchronous", "polled", "barrier", "recv", "wait_signal", "gather"],
    "comm_gloo": ["all_reduce", "asynchronous", "polled", "recv", "gather"],
}
TAKES = {
    "shm": ["isend", "isend_large"],
    "gloo": ["isend", "isend_large"],
    "hosts": ["isend_large"],
    "torch_shm": ["recv", "broadcast"],
    "comm_shm": ["recv", "broadcast", "wait_signal"],
    "queue": ["broadcast_object"],
}
ENDS = {
    "shm": ["all_reduce", "barrier"],
    "gloo": ["all_reduce"],
    "hosts": ["all_reduce"],
    "verbs_gloo": ["gather"],
    "private_gloo": ["gather"],
    "torch_shm": ["all_reduce"],
    "comm_shm": ["all_reduce"],
    "comm_gloo": ["all_reduce", "barrier"],
}


def cases(act, methods, every=2):
    """Return the cases of these methods, each with another number of ranks than the one before."""
    pairs = [(kind, method) for kind, known in methods.items() for method in known]
    sizes = [2 + (i + i // 3) % 3 for i in range(len(pairs))]
    return launching.sampled(
        [f"{n}/{kind}/{act}/{method}" for n, (kind, method) in zip(sizes, pairs, strict=True)], every
    )


ALL = {"wait": cases("wait", WAITS, 3), "take": cases("take", TAKES), "end": cases("end", ENDS)}
ALL["recover"] = [f"3/{kind}/recover/gather" for kind in ("verbs_shm", "verbs_gloo", "comm_shm", "comm_gloo")]


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, [case for known in ALL.values() for case in known])


def rows_of(case):
    rows, statuses = launched()[0][case]
    assert "terminate called" not in launched()[1]
    assert set(statuses) == {0}
    return [row for _, row in sorted(rows.items())]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL["wait"])
def test_a_wait_for_a_rank_that_has_left_ends_and_names_it(case):
    *waiting, last = rows_of(case)
    for row in waiting:
        if "queue" in case:
            assert (row["type"], row["next"]) == ("EOFError", "EOFError")
            assert "has closed the queue" in row["text"]
            continue
        assert row["is_lost"], row
        assert row["rank of error"] == last["rank"]
        assert f"rank {last['rank']}" in row["text"]
        assert "has left the" in row["text"]
        assert row["next"] in ("PeerLostError", "CommPeerLost", "RuntimeError")
        assert row["seconds"] < row["limit"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL["take"] + ALL["end"])
def test_what_a_rank_has_sent_before_it_leaves_arrives(case):
    assert [(row["type"], row["text"]) for row in rows_of(case)] == [(None, "")] * int(case[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL["recover"])
def test_the_others_recover_without_waiting_for_a_rank_that_has_left(case):
    *waiting, _ = rows_of(case)
    assert [row["members"] for row in waiting] == [[0, 1]] * 2
    assert all(row["seconds"] < row["limit"] / 2 for row in waiting)


def test_an_entry_tells_of_its_group_until_there_is_no_other():
    page = OwnPage()
    first = page.new_entry()
    born = time.monotonic()
    page.begin(first, b"gather", born, number=3)
    page.end(first, born)
    peer = PeerPage.attach(*page.address)
    assert not peer.has_left(first, born)
    page.leave(first)
    page.free_entry(first)
    assert peer.has_left(first, born)
    while (entry := page.new_entry()) != first:
        assert entry >= 0
        assert (peer.has_left(first, born), peer.number(first), peer.is_inside(first)) == (True, 3, False)
    assert peer.has_left(first, born)  # of the old group; the new one is another
    assert not peer.has_left(first, time.monotonic())
    assert page.new_entry() == -1


def test_a_rank_of_another_host_is_known_to_have_left_by_its_report():
    peer = Peer(
        1, json.dumps([*json.loads(record(None, -1, False))[:2], "another", False, -1, 7, -1, "", "", "", []]).encode()
    )
    assert [peer.has_left(), peer.has_finished(2)] == [False, False]
    peer.left(2.5)
    assert [peer.has_left(), peer.has_finished(2), peer.has_finished(3)] == [True, True, False]


def test_leaving_is_announced_once_in_the_store_for_ranks_that_cannot_see_the_page():
    store = TimedStore(HashStore())
    monitor = Monitor(0, 2, 1.0, store)
    monitor.begin("gather", "here")
    monitor.end()
    monitor.announce_leaving()
    monitor.announce_leaving()
    ((_, rank, told),) = Log("reports/log").news(store)
    report = Report.from_page(told.decode())
    assert (rank, report.kind, report.by, report.number) == (0, LEAVING, 0, 1.5)


@pytest.mark.parametrize(("peer", "looks"), [(None, 2), (1, 5)])
def test_a_wait_ends_if_a_rank_had_left_at_the_looks_before(peer, looks):
    rules = CallProtocol(0, 3)
    rules.begin_call(0.0, 10.0, 10.0, peer)
    found = [rules.look([Heard(1, has_left=True)]) for _ in range(looks)]
    assert found[:-1] == [None] * (looks - 1)
    assert (found[-1].why, found[-1].rank) == (Why.LEFT, 1)
    rules.begin_call(1.0, 10.0, 10.0, peer)
    assert rules.look([Heard(1, has_left=True)]) is None  # the next call looks again


def test_data_that_a_rank_has_posted_is_waited_for_though_it_has_left():
    rules = CallProtocol(0, 2)
    rules.begin_call(0.0, 10.0, 10.0, 1)
    rules.is_promised = True
    assert [rules.look([Heard(1, has_left=True)]) for _ in range(9)] == [None] * 9
    assert [rules.look([Heard(1, has_left=True, has_ended=True)]) for _ in range(2)][-1].why is Why.LOST
