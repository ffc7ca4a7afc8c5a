"""Connections to hosts that do not answer any more are ended by TCP, so no rank has to send signs of life.

A host that loses its power or its network sends nothing, not even the end of its connections, so whoever waits for it
would wait until its time is over. The kernels of both sides ask each other instead: also for a process that is stopped,
or busy, the kernel answers. gloo and torch's stores do not ask for this, so it is asked for on their connections.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import socket
from collections.abc import Container, Iterator

from easydist import settings

AFTER: float = settings.read("EASYDIST_UNREACHABLE_AFTER")

TEXT = os.strerror(errno.ETIMEDOUT)
"""What gloo says of a connection to a host that does not answer; its own time limits have other words."""

_LONGEST = 30_000.0
"""The most seconds that TCP counts. It takes 32 767 for the time without data after which it asks."""

_MOST = 4
"""The most addresses of a process in its record, which has a limited length."""

Ends = tuple[str, int, str, int]
"""The address and port of this side of a connection, and those of the other side."""


def watch(connection: socket.socket) -> None:
    """End a TCP connection once the other host has not answered for ``EASYDIST_UNREACHABLE_AFTER`` seconds."""
    if not hasattr(socket, "TCP_USER_TIMEOUT") or math.inf == AFTER:  # Linux has it
        return
    after = min(AFTER, _LONGEST)
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, math.ceil(after / 3))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, math.ceil(after / 15))
        # This counts for data that is not acknowledged, too, and takes the place of a number of questions.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * after))


def watch_hosts(addresses: Container[str]) -> None:
    """Watch the connections of this process to hosts with these addresses."""
    for connection, (*_, address, _) in _connections():
        if address in addresses:
            watch(connection)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watch the connections to other hosts that this process makes in the context."""
    before = {ends for _, ends in _connections()}
    yield
    for connection, ends in _connections():
        if ends not in before:
            watch(connection)


def addresses() -> list[str]:
    """Return the addresses of this host in its connections to other hosts."""
    return sorted({ends[0] for _, ends in _connections()})[:_MOST]


def _connections() -> Iterator[tuple[socket.socket, Ends]]:
    """Yield this process's TCP connections to other hosts; each is closed here when the next one is asked for."""
    with contextlib.suppress(OSError):  # there is no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or no connection
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.type == socket.SOCK_STREAM and (ends := _ends(connection)) is not None:
                        yield connection, ends


def _ends(connection: socket.socket) -> Ends | None:
    """Return the ends of a TCP connection; None if the other side is on this host.

    Raises:
        OSError: It is not connected.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    mine, other = connection.getsockname(), connection.getpeername()
    here, there = (end[0].removeprefix("::ffff:") for end in (mine, other))
    is_near = here == there or ipaddress.ip_address(there.partition("%")[0]).is_loopback
    return None if is_near else (here, mine[1], there, other[1])
