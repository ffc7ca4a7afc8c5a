"""The actor beside that of a rank on Ray: it carries the messages of the rank's kernel, its page and its memory."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import deque
from typing import Any, NamedTuple

from easydist.cluster.facts import session_folder
from easydist.cluster.worker import Actor
from easydist.liveness.page import PageEntry
from easydist.notebook.rank import END, Usage

_LOOK_EVERY = 0.25
"""Seconds between two looks at what a rank uses, which take as long as carrying its messages."""

_TOGETHER = 0.005
"""Seconds for which messages after the first one are awaited: a short cell has three, and each answer costs a call."""


class Told(NamedTuple):
    """The news of a rank.

    Attributes:
        messages: Those that have arrived from it.
        entries: Its groups, and its state in each.
        usage: What its process uses.
        now: The time there, on the clock of the entries.
    """

    messages: list[dict[str, Any]]
    entries: list[PageEntry]
    usage: Usage
    now: float


class Keeper(Actor):
    """The keeper of a rank's kernel. Requests are carried by ``told``, so that one thread uses the sockets.

    Args:
        rank: The rank.

    Attributes:
        CONCURRENCY: The calls that it serves at a time.
    """

    CONCURRENCY = 6

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._requests: deque[tuple[Any, ...]] = deque()
        self._wakes, self._wake = os.pipe()
        self._usage, self._look_at = Usage(), 0.0

    def begin(self, pid: int) -> dict[str, str]:
        """Prepare the connection to the kernel, and return those arguments of ``kernel.attend`` that describe it.

        Args:
            pid: The process of the rank, which will have the kernel.
        """
        from easydist.notebook.cluster import demand_extra

        demand_extra()
        import zmq

        from easydist.notebook.connection import Connection
        from easydist.notebook.machine import KernelProcess, private_folder

        # Of Ray's session: if Ray ends the rank, nobody removes it.
        folder = private_folder(session_folder() or tempfile.gettempdir())
        self._seen = KernelProcess(pid)
        self._connection = Connection(folder / str(self._rank), zmq.Context())
        self._poller = zmq.Poller()
        for connection in (self._wakes, *self._connection.sockets):
            self._poller.register(connection, zmq.POLLIN)
        return {"folder": str(folder), "connection_file": self._connection.file}

    def post(self, *request: Any) -> None:
        """Send a request to the kernel: arguments of ``RankHandle.post``."""
        self._requests.append(request)
        os.write(self._wake, b"!")

    def told(self, seconds: float, drops: bool) -> Told:
        """Return the news of the rank, once a request has ended, or a moment after the first message.

        Args:
            seconds: How long to wait for messages.
            drops: As for ``RankHandle.messages``.
        """
        messages: list[dict[str, Any]] = []
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._wakes in dict(self._poller.poll(1000 * left)):
                os.read(self._wakes, 1 << 12)
            while self._requests:
                self._connection.post(*self._requests.popleft())
            arrived = [_short(message) for message in self._connection.arrived(drops)]
            if arrived and not messages:
                until = min(until, time.monotonic() + _TOGETHER)
            messages += arrived
            if {message["msg_type"] for message in messages} >= END:
                break
        if (now := time.monotonic()) >= self._look_at:
            self._usage, self._look_at = self._seen.usage(), now + _LOOK_EVERY
        return Told(messages, self._seen.entries(), self._usage, now)

    def interrupt(self) -> None:
        """Interrupt the cell."""
        self._seen.send_signal(signal.SIGINT)


def _short(message: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a message that a cell reads."""
    kept = {name: message[name] for name in ("msg_type", "content", "parent_header")}
    return {**kept, "buffers": [bytes(buffer) for buffer in message["buffers"]]}
