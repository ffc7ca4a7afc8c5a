"""Questions to the hosts of ranks that meet: they have no connection that would notice when one of them vanishes.

A question is an attempt to connect to a port at which nobody listens. The kernel of a host that is there refuses at
once, whatever its processes do. A host that has answered, and then does not for ``keepalive.AFTER`` seconds, is
unreachable. One that has never answered, perhaps because of a firewall, is not.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import time
from collections.abc import Iterable

from easydist.liveness import keepalive

_PORT = 9
"""The port of the discard protocol: if anybody listens there, a connection without data does no harm."""

_AT_LEAST = 3
"""The least number of questions in a row without an answer."""

_MOST_OPEN = 64
"""The most questions that are open at once: each takes a file descriptor."""

_ANSWERS = frozenset((0, errno.ECONNREFUSED, errno.ECONNRESET))


class Questions:
    """The questions of one rank to the hosts of the others."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    @property
    def have_begun(self) -> bool:
        """True if this rank has asked: it goes on when a lower rank of its host comes, which has had no answer yet."""
        return bool(self._hosts)

    def are_unanswered(self, addresses: Iterable[str]) -> bool:
        """True if a host has answered, and now does not any more at any of its addresses; asks again if it is time."""
        if math.isinf(keepalive.AFTER):
            return False
        hosts = [self._hosts.setdefault(one, _Host(one)) for one in addresses]
        now = time.monotonic()
        for host in hosts:
            host.listen()
            if host.is_due(now) and (host.is_open or sum([one.is_open for one in self._hosts.values()]) < _MOST_OPEN):
                host.ask(now)
        answered = [host for host in hosts if host.has_answered]
        return bool(answered) and all(host.is_silent(now) for host in answered)

    def end(self) -> None:
        """Ask no more."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()


class _Host:
    """The questions to one address.

    Attributes:
        has_answered: True if it has answered once.
    """

    def __init__(self, address: str) -> None:
        self.has_answered = False
        self._address = address
        self._open: socket.socket | None = None
        self._count, self._heard, self._next = 0, 0.0, 0.0

    @property
    def is_open(self) -> bool:
        """True if a question has no answer yet."""
        return self._open is not None

    def is_due(self, now: float) -> bool:
        """True if it is time to ask again."""
        return now >= self._next

    def listen(self) -> None:
        """Look for an answer."""
        if self._open is not None and (error := _outcome(self._open)) is not None:
            self._note(error)

    def ask(self, now: float) -> None:
        """Ask, and count the last question if it has no answer."""
        self._count += self.is_open
        self.close()
        self._next = now + keepalive.AFTER / 5
        with contextlib.suppress(OSError):  # no descriptor is free
            self._open = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
            self._open.setblocking(False)
            if (error := self._open.connect_ex((self._address, _PORT))) != errno.EINPROGRESS:
                self._note(error)

    def _note(self, error: int) -> None:
        """End the question; an error of this host's own is no answer."""
        self.close()
        if error in _ANSWERS:
            self.has_answered, self._count, self._heard = True, 0, time.monotonic()
        else:
            self._count += 1

    def is_silent(self, now: float) -> bool:
        """True if it has not answered for too long."""
        return self._count >= _AT_LEAST and now - self._heard >= keepalive.AFTER

    def close(self) -> None:
        """End the question that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None


def _outcome(question: socket.socket) -> int | None:
    """Return the error of a question, which can be read once, 0 if it was accepted; None if there is no answer yet."""
    poll = select.poll()
    poll.register(question, select.POLLOUT)
    return question.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if poll.poll(0) else None
