"""Failure reports, written and read in one process."""

import json
import signal
import time

import launching
import pytest
import torch.distributed as dist

from easydist.errors import CollectiveTimeout, PeerLostError, WireError
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record
from easydist.liveness.report import EXCEPTION, INTERRUPT, Report, kind_of
from easydist.liveness.timed_store import TimedStore


def posted(error):
    """Return the report that a peer reads after a rank has given up for this error."""
    monitor = Monitor(0, 2, timeout=1.0)
    peer = Peer(0, record(own_page(), monitor.entry, True))
    monitor.begin("gather", "train.py:3")
    monitor.give_up(error)
    return peer.report()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CollectiveTimeout, {"missing": (1, 3)}),
        (PeerLostError, {"rank": 1, "pid": 7, "host": "node1", "exit_status": -9}),
    ],
)
def test_the_reader_gets_the_same_error(kind, fields):
    error = kind("gather: …")
    vars(error).update(fields)
    got = posted(error).error()
    assert (type(got), str(got), got.is_final) == (kind, "gather: …", kind is PeerLostError)
    assert {name: getattr(got, name) for name in fields} == fields


@pytest.mark.parametrize("length", [1600, 20_000])
def test_a_long_text_is_read_whole(length):
    assert posted(CollectiveTimeout("x" * length)).text == "x" * length


def test_a_text_that_is_too_long_for_the_page_is_cut():
    assert posted(CollectiveTimeout("x" * 100_000)).text == "x" * 20_000 + " …"


@pytest.mark.parametrize("letter", ["ü", "\n", '"', "\U0001f600"])
def test_a_text_that_grows_as_json_is_cut_too(letter):
    text = posted(CollectiveTimeout(letter * 20_000)).text
    assert text.endswith(letter + " …")
    assert len(text) > 1000


def test_who_passes_on_that_another_rank_was_interrupted_says_so():
    report = Report(INTERRUPT, "rank 2 was interrupted", 2, 0, 0, 3.0, 0.0)
    assert kind_of(report.error()) == INTERRUPT


@pytest.mark.parametrize("kind", ["late", EXCEPTION])
def test_a_rank_that_has_left_a_call_is_heard_while_it_fails_in_later_ones(kind):
    report = Report(kind, "", 0, 0, 1, 7.0, 0.0, left=5.0)
    assert [report.is_about(number) for number in (4, 5, 6)] == [False, True, True]


@pytest.mark.parametrize("changed", [{"kind": "unknown"}, {"by": 2}, {"by": -1}, {"text": 3}])
def test_a_logged_report_of_another_form_is_damaged_and_ends_one_call_only(changed):
    store = dist.HashStore()
    reader = Monitor(0, 2, timeout=1.0, store=TimedStore(store))
    right = json.loads(Report("late", "gather: …", 1, 0, 0, 2.0, 0.0, left=1.0).to_json())
    for told in (right | changed, right):
        TimedStore(store).append("reports/log", 1, json.dumps(told))
    with pytest.raises(WireError, match="is damaged, or from another version"):
        reader._read_log()
    assert [report.by for report in reader._read_log()] == [1]


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"kind": "late"}', '{"unknown": 1}'])
def test_what_is_no_report_on_a_page_is_none(text):
    assert Report.from_page(text) is None


def test_a_report_about_another_group_of_the_process_is_not_about_this_one():
    here, there = Monitor(0, 2, timeout=1.0), Monitor(0, 2, timeout=1.0)
    reader = Monitor(1, 2, timeout=1.0)
    reader.peers[0] = Peer(0, record(own_page(), here.entry, True))
    reader.begin("gather", "train.py:3")
    for monitor, heard in ((there, []), (here, [0])):
        monitor.begin("gather", "train.py:3")
        monitor.give_up(CollectiveTimeout("late"))
        assert [peer.rank for peer in reader._gave_up()] == heard


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_exception_counts_as_leaving_a_call_of_its_own_group_only(is_ours):
    here, reader, page = Monitor(0, 2, timeout=1.0), Monitor(1, 2, timeout=1.0), own_page()
    reader.peers[0] = Peer(0, record(page, here.entry, True))
    reader.begin("gather", "train.py:3")
    entry = here.entry if is_ours else here.entry + 1
    page.set_report(-1, Report(EXCEPTION, "ValueError", 0, entry, 0, 1.0, time.monotonic(), left=1.0).to_json())
    try:
        assert [peer.rank for peer in reader._gave_up()] == ([0] if is_ours else [])
    finally:
        page.set_report(-1, "")


IS_ENDED = """
import os, signal, sys
from easydist.liveness.monitor import Monitor
from easydist.liveness.watchdog import watchdog

class OfAnotherRank(Monitor):
    def post_exception(self, text):
        print("posted", text, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

watchdog().add(monitor := OfAnotherRank(0, 2, 1.0))
raise ValueError("bad data")
"""


@pytest.mark.slow
def test_the_traceback_is_out_before_the_others_hear_of_the_exception():
    """They may end at once, and the launcher may then end this process."""
    out, err = launching.python("-c", IS_ENDED, status=-signal.SIGKILL)
    assert out == "posted ValueError: bad data\n"
    assert err.endswith("ValueError: bad data\n")
