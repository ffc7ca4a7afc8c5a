"""End connections to hosts that no longer answer, so that no rank has to send heartbeats.

A host that loses its power or its network sends nothing, not even the end of its connections, so whoever waits for it
would wait until its time is over. The kernels of both sides know better, and they answer for processes that are stopped
or busy, too. While nothing moves, TCP's keepalive asks the other host. It does not while data is under way that the
other host has not acknowledged; but the kernel tells since when it has heard nothing (``end_unreachable``). TCP's own
limit for that (TCP_USER_TIMEOUT) would also end the connection to a process that does not read for so long.

gloo and torch's stores have no options for this, so it is set on their sockets, by their descriptors. No Python socket
is made of these, since it would set the blocking mode, which all descriptors of a connection share.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator

from easydist import settings

AFTER: float = settings.read("EASYDIST_UNREACHABLE_AFTER")

TEXT = os.strerror(errno.ETIMEDOUT)
"""Text of gloo's error for a connection to a host that does not answer; gloo's own time limits have other texts."""

_LONGEST = 32_767
"""The most seconds that TCP takes for the time without data after which it asks."""

_QUESTIONS = 8
_AT_LEAST = 2
"""The least number of times that a host that counts as unreachable has not answered."""

_MOST = 4
"""The most addresses of a process in its record, which has a limited length."""

_INFO = struct.Struct("=2xBB52xI68xQ")
"""Numbers of TCP_INFO: how often data was sent again, and how often it was asked, without an acknowledgement since; the
milliseconds since the last acknowledgement; and the bytes received."""

Ends = tuple[str, int, str, int]
"""The address and port of this side of a connection, and those of the other side."""

_libc: ctypes.CDLL | None = None
with contextlib.suppress(OSError):  # a Python that loads no libraries
    _libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_ended: set[str] = set()
"""The addresses of hosts to which connections were ended here."""

_next_look = 0.0

_made: dict[int, Ends] = {}
"""The connections of groups, by their descriptors."""


def watch(connection: int) -> None:
    """Let TCP ask the other host of a connection whether it is there, while nothing moves."""
    if _libc is None or math.isinf(AFTER):
        return
    pause = min(_LONGEST, max(1, round(AFTER * 2 / 3 / _QUESTIONS)))
    _set(connection, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(connection, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _idle())
    _set(connection, socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    _set(connection, socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round((AFTER - _idle()) / pause)))


def watch_hosts(addresses: Container[str]) -> None:
    """Watch the connections of this process to hosts with these addresses."""
    if math.isinf(AFTER):
        return
    for connection, (*_, address, _) in _connections():
        if address in addresses:
            watch(connection)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watch the connections to other hosts that this process makes in the context; no child of it gets any.

    A child that outlives its parent would keep them open, so the other ranks would not hear of the end of the parent.
    """
    before = {ends for _, ends in _all_connections()}
    yield
    for connection, ends in _all_connections():
        if ends not in before:
            _made[connection] = ends
            with contextlib.suppress(OSError):  # another thread has closed it
                os.set_inheritable(connection, False)
            if _is_far(ends):
                watch(connection)


def _after_fork() -> None:
    """Close the connections of the parent's groups; the descriptors stay taken, because gloo closes them once more."""
    inherited = [one for one, ends in (_all_connections() if _made else ()) if _made.get(one) == ends]
    _made.clear()
    if inherited:
        nothing = os.open(os.devnull, os.O_RDWR)
        for connection in inherited:
            os.dup2(nothing, connection, inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_after_fork)


def end_unreachable() -> None:
    """End the watched connections on which data is sent again and again, and nothing was heard for ``AFTER`` seconds.

    It looks five times in that time at most.
    """
    global _next_look
    if math.isinf(AFTER) or (now := time.monotonic()) < _next_look:
        return
    _next_look = now + AFTER / 5
    for connection, (*_, address, _) in _connections():
        if _get(connection, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == _idle() and _is_unreachable(connection):
            _ended.add(address)
            _shut_down(connection)


def has_ended(addresses: Iterable[str]) -> bool:
    """True if a connection to one of these addresses was ended because its host did not answer."""
    return not _ended.isdisjoint(addresses)


def addresses() -> list[str]:
    """Return the addresses of this host in its connections to other hosts."""
    return sorted({ends[0] for _, ends in _connections()})[:_MOST]


def received() -> dict[Ends, int]:
    """Return the bytes that have arrived on each TCP connection of this process, also on those to its own host."""
    rows = ((ends, _info(connection)) for connection, ends in _all_connections())
    return {ends: info[3] for ends, info in rows if info is not None}


def _idle() -> int:
    return min(_LONGEST, math.ceil(AFTER / 3))


def _is_unreachable(connection: int) -> bool:
    if (info := _info(connection)) is None:
        return False
    again, questions, milliseconds, _ = info
    return max(again, questions) >= _AT_LEAST and milliseconds >= 1000 * AFTER


def _info(connection: int) -> tuple[int, int, int, int] | None:
    assert _libc is not None
    info, length = ctypes.create_string_buffer(_INFO.size), ctypes.c_uint32(_INFO.size)
    if _libc.getsockopt(connection, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)):
        return None
    again, questions, milliseconds, nbytes = _INFO.unpack(info.raw)
    return again, questions, milliseconds, nbytes


def _shut_down(connection: int) -> None:
    """End a connection on both sides; its owner closes it. By a duplicate, which no other connection replaces."""
    assert _libc is not None
    with contextlib.suppress(OSError):
        same = os.dup(connection)
        if _is_unreachable(same):
            _libc.shutdown(same, socket.SHUT_RDWR)
        os.close(same)


def _connections() -> Iterator[tuple[int, Ends]]:
    """Yield the descriptors of this process's TCP connections to other hosts."""
    return ((connection, ends) for connection, ends in _all_connections() if _is_far(ends))


def _is_far(ends: Ends) -> bool:
    return ends[0] != ends[2] and not ipaddress.ip_address(ends[2]).is_loopback


def _all_connections() -> Iterator[tuple[int, Ends]]:
    if _libc is None:
        return
    with contextlib.suppress(OSError):  # there is no /proc
        for name in os.listdir("/proc/self/fd"):
            there = _name(_libc.getpeername, int(name))
            here = None if there is None else _name(_libc.getsockname, int(name))
            if here is not None and there is not None:
                yield int(name), (*here, *there)


def _name(function: Callable[..., int], connection: int) -> tuple[str, int] | None:
    """Return an address and port; None if the descriptor is no connection of the internet."""
    name, length = ctypes.create_string_buffer(28), ctypes.c_uint32(28)
    if function(connection, name, ctypes.byref(length)):
        return None
    family, port = int.from_bytes(name.raw[:2], sys.byteorder), int.from_bytes(name.raw[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, name.raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, name.raw[8:24]).removeprefix("::ffff:"), port
    return None


def _set(connection: int, level: int, option: int, value: int) -> None:
    assert _libc is not None
    _libc.setsockopt(connection, level, option, ctypes.byref(ctypes.c_int(value)), 4)


def _get(connection: int, level: int, option: int) -> int:
    assert _libc is not None
    value, length = ctypes.c_int(-1), ctypes.c_uint32(4)
    _libc.getsockopt(connection, level, option, ctypes.byref(value), ctypes.byref(length))
    return value.value
