"""Questions to hosts; ``tests/test_leaks.py`` has a host that vanishes while its ranks meet others."""

import errno
import os
import socket

import pytest

from easydist.liveness import keepalive, questions
from easydist.liveness.events import Cause, Why
from easydist.liveness.monitor import Monitor
from easydist.liveness.questions import Questions

HERE = "127.0.0.1"


@pytest.fixture
def asked(monkeypatch):
    """Questions that are asked again at each look."""
    monkeypatch.setattr(keepalive, "AFTER", 0.0)
    found = Questions()
    yield found
    found.end()


def looks(asked, addresses, count=5):
    return [asked.are_unanswered(addresses) for _ in range(count)]


def test_a_host_that_answers_is_there_whether_or_not_anybody_listens(asked, monkeypatch):
    assert not any(looks(asked, [HERE]))
    with socket.create_server((HERE, 0)) as listener:
        monkeypatch.setattr(questions, "_PORT", listener.getsockname()[1])
        assert not any(looks(asked, [HERE]))


@pytest.mark.parametrize("error", [None, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM])
def test_only_a_host_that_has_answered_before_can_be_missed(error, asked, monkeypatch):
    def connect_ex(self, address):
        return errno.EINPROGRESS if error is None else error

    assert not any(looks(asked, [HERE]))
    monkeypatch.setattr(socket.socket, "connect_ex", connect_ex)
    monkeypatch.setattr(questions, "_outcome", lambda question: None)
    assert looks(asked, [HERE])[-1]
    assert not any(looks(asked, ["127.0.0.2"]))
    assert not any(looks(asked, []))
    assert looks(asked, [HERE, "127.0.0.2"])[-1]


def test_a_host_whose_rank_has_not_been_met_has_not_left():
    monitor = Monitor(0, 2, 60.0)
    monitor.begin("gather", "train.py:7")
    text = str(monitor.error_of(Cause(Why.UNREACHABLE, 1), []))
    assert text.startswith(
        "gather: rank 1 is lost: its host has not answered for 25 s; that host, or the network, is down\n"
    )
    assert "rank 1 is lost: it left before the ranks had connected" in str(monitor.error_of(Cause(Why.BROKE, 1), []))


def test_questions_leave_no_descriptors_and_need_none(asked, monkeypatch):
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(questions, "_outcome", lambda question: None)
    many = [f"127.0.0.{number}" for number in range(1, 200)]
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: errno.EINPROGRESS)
    looks(asked, many)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + questions._MOST_OPEN
    asked.end()
    assert {*os.listdir("/proc/self/fd")} <= {*before}  # those of earlier tests may be closed meanwhile
    monkeypatch.setattr(socket.socket, "setblocking", _fail)
    assert not any(looks(asked, many[:3]))


def _fail(self, blocking):
    raise OSError(errno.EMFILE, "Too many open files")
