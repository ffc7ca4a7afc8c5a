"""Failure reports, written and read in one process."""

import pytest

from easydist.errors import CollectiveTimeout, PeerLostError
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record


def posted(error):
    """What a peer reads after a rank has given up for this error."""
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
