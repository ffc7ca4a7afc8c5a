"""The page of a process: its readers, and the time for which it is valid."""

import json
import os
import socket
import stat
import time
import warnings

import pytest

from easydist.groups.registers import unseen
from easydist.liveness import keepalive
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import _VERSION, _VERSION_NBYTES, OwnPage, PeerPage, own_page
from easydist.liveness.peer import RECORD_NBYTES, Peer, record
from easydist.liveness.report import EXCEPTION


def test_only_the_same_user_can_open_the_page():
    status = os.fstat(OwnPage().address[1])
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.parametrize("text", ["h" * 101, "ü" * 100, "\udcff"])
def test_processes_whose_host_has_a_long_or_foreign_identifier_see_each_other(monkeypatch, text):
    monkeypatch.setenv("EASYDIST_HOST_ID", text)
    told = record(own_page(), 0, True)
    assert len(told) == RECORD_NBYTES
    assert Peer(1, told).shares_pages
    monkeypatch.setenv("EASYDIST_HOST_ID", f"{text} of another")
    assert not Peer(1, told).shares_pages


def test_the_longest_record_has_room(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "n" * 300)
    monkeypatch.setattr(keepalive, "addresses", lambda: ["fe80:1111:2222:3333:4444:5555:6666:7777%eth0"] * 4)
    monkeypatch.setenv("EASYDIST_HOST_ID", "h" * 100)
    monkeypatch.setenv("EASYDIST_UNREACHABLE_AFTER", "\\" * 100)
    monkeypatch.setenv("EASYDIST_JOB_KEY", "k" * 40)
    assert len(told := record(own_page(), 15, True)) == RECORD_NBYTES
    assert len(Peer(1, told).addresses) == 4


@pytest.mark.parametrize("name", ["g" * 400, "ü" * 400, "\U0001f600" * 100, "\0" * 100, "\udcff" * 100])
def test_a_group_with_a_long_or_foreign_name_is_seen(name):
    page = OwnPage()
    entry = page.new_entry()
    page.describe(entry, name, "0123456789abcdef", 3, 4)
    ((group, meeting, rank, size, *_),) = page.entries()
    assert (name.startswith(group), len(group) > 20, meeting, rank, size) == (True, True, "0123456789abcdef", 3, 4)


def test_the_longest_register_touches_no_other():
    page = OwnPage()
    first, second = page.new_entry(), page.new_entry()
    peer, longest = PeerPage.attach(*page.address), "x" * (_VERSION_NBYTES - _VERSION.size)
    for text in ("s", "t"):
        page.set_register(second, text)
    for text in ("before", longest):
        page.set_register(first, text)
    with pytest.raises(ValueError, match="a register of 497 bytes does not fit a page: the group has too many ranks"):
        page.set_register(first, f"{longest}x")
    assert (peer.register(first), peer.register(second)) == (longest, "t")


@pytest.mark.parametrize("is_done", [True, False])
def test_a_call_whose_data_others_may_lack_counts_as_under_way(is_done):
    page = OwnPage()
    entry = page.new_entry()
    peer = PeerPage.attach(*page.address)
    page.begin(entry, b"gather", 0.0, number=3)
    assert (peer.number(entry), peer.is_inside(entry)) == (3, True)
    page.end(entry, 1.0, is_done)
    assert (peer.number(entry), peer.is_inside(entry)) == (3, not is_done)


def forked(child):
    """Fork a process that calls a function and ends; return its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this child does not use
        if pid := os.fork():
            return pid
    child()
    os._exit(3)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_a_process_is_seen_with_and_without_a_descriptor_of_it(has_pidfd, monkeypatch):
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    (told, tell), (end, ended) = os.pipe(), os.pipe()

    def child():
        page = OwnPage()
        os.write(tell, record(page, page.new_entry(), True))
        os.read(end, 1)

    pid = forked(child)
    peer = Peer(1, os.read(told, RECORD_NBYTES))
    assert (peer.is_visible, peer.has_ended(), peer.exit_status()) == (True, False, None)
    os.write(ended, b"x")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (peer.is_visible, peer.has_ended(), peer.exit_status()) == (True, True, 3)
    os.waitpid(pid, 0)
    assert (peer.has_ended(), peer.exit_status()) == (True, None)
    for descriptor in (told, tell, end, ended):
        os.close(descriptor)


def test_a_process_that_ended_before_its_page_was_opened_is_gone():
    """Even while its parent has not collected it, so that the system still lists it."""
    child = forked(lambda: None)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    fields = json.loads(record(own_page(), 0, True))
    fields[5] = child
    peer = Peer(1, json.dumps(fields).encode())
    assert not peer.is_visible
    assert (peer.is_gone(), peer.exit_status(), unseen({1: peer})) == (True, 3, [])
    os.waitpid(child, 0)
    assert (peer.is_gone(), peer.exit_status(), unseen({1: peer})) == (True, None, [])
    fields[5] = os.getppid()
    assert unseen({1: Peer(1, json.dumps(fields).encode())}) == [1]


def test_a_forked_child_that_drops_a_group_does_not_erase_it_from_its_parents_page():
    monitor = Monitor(0, 2, 1.0, name="the parent's")
    page = PeerPage.attach(*own_page().address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this child does not use
        child = os.fork()
    if not child:
        del monitor
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "the parent's" in [entry.group for entry in page.entries()]


def test_a_failure_report_counts_though_the_wall_clock_steps_back(monkeypatch):
    page, monitor = own_page(), Monitor(0, 2, 1.0)
    peer = Peer(1, record(page, monitor.entry, True))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monitor.post("late", "too late", 1.0)
    report = peer.report()
    assert report is not None
    assert report.text == "too late"
    assert Peer(1, record(page, monitor.entry, True)).report() is None  # of an earlier group


def test_each_group_has_a_report_of_its_own_and_an_exception_counts_for_all():
    page, monitors = own_page(), [Monitor(0, 2, 1.0), Monitor(0, 2, 1.0), Monitor(0, 2, 1.0)]
    peers = [Peer(0, record(page, monitor.entry, True)) for monitor in monitors]
    try:
        for monitor in monitors[:2]:
            monitor.post("late", f"of {monitor.entry}", 1.0)
        texts = [report.text for peer in peers if (report := peer.report()) is not None]
        assert texts == [f"of {monitor.entry}" for monitor in monitors[:2]]
        monitors[0].post(EXCEPTION, "bad batch", 1.0)
        assert [peer.report().entry for peer in peers] == [monitors[0].entry] * 3
        monitors[1].post(EXCEPTION, "bad batch", 1.0)
        assert [peer.report().entry for peer in peers] == [monitors[i].entry for i in (0, 1, 1)]
    finally:
        page.set_report(-1, "")


def test_the_last_report_of_a_group_can_be_read_for_some_time_after_its_end():
    page = OwnPage()
    entry = page.new_entry()
    page.set_report(entry, "left")
    page.free_entry(entry)
    reader = PeerPage.attach(*page.address)
    assert page.new_entry() != entry
    assert reader.report(entry) == "left"


def test_a_process_takes_two_descriptors_however_many_groups_it_is_in():
    page = OwnPage()
    records = [record(page, page.new_entry(), True) for _ in range(4)]
    before = len(os.listdir("/proc/self/fd"))
    peers = [Peer(1, told) for told in records]
    assert all(peer.is_visible and not peer.has_ended() for peer in peers)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del peers[1:]
    assert not peers[0].has_ended()
    peers.clear()
    assert len(os.listdir("/proc/self/fd")) == before
