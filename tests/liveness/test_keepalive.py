"""The options that are set on a process's connections; ``tests/test_leaks.py`` has hosts that vanish."""

import contextlib
import os
import socket

import pytest

from easydist.liveness import keepalive


@pytest.fixture
def connected():
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def test_connections_stay_blocking_and_descriptors_stay_the_same(connected, monkeypatch):
    """Also with a default timeout, for which Python would change the mode of each socket."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10.0)
    try:
        descriptors = os.listdir("/proc/self/fd")
        keepalive.addresses()
        keepalive.watch_hosts({"127.0.0.1"})
        keepalive.watch(connected[0].fileno())
        with keepalive.watching():
            pass
        assert [os.get_blocking(one.fileno()) for one in connected] == [one.gettimeout() is None for one in connected]
        assert os.listdir("/proc/self/fd") == descriptors
    finally:
        socket.setdefaulttimeout(before)


def test_connections_of_this_host_to_itself_are_left_alone(connected):
    keepalive.watch_hosts({"127.0.0.1"})
    assert not connected[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert "127.0.0.1" not in keepalive.addresses()


@pytest.mark.parametrize(("after", "asks"), [(25.0, 1), (0.5, 1), (1e9, 1), (float("inf"), 0)])
def test_a_watched_connection_is_asked_within_the_time(after, asks, connected, monkeypatch):
    monkeypatch.setattr(keepalive, "AFTER", after)
    keepalive.watch(connected[0].fileno())
    assert connected[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == asks
    if after == 25.0:
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        idle, pause, count = (connected[0].getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        assert idle + pause * count == 25


def test_a_process_that_does_not_read_is_not_unreachable(connected, monkeypatch):
    """Its kernel answers the questions whether there is room again."""
    monkeypatch.setattr(keepalive, "AFTER", 0.0)  # every moment without an answer would be too long
    one, _ = connected
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(1 << 16))
    assert not keepalive._is_unreachable(one.fileno())
