"""The actor on a node of a Ray cluster that keeps the kernel of a rank: starts it, and carries its messages."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from easydist.cluster.facts import interface, session_folder
from easydist.cluster.worker import Actor
from easydist.liveness.page import PageEntry
from easydist.notebook.rank import Usage


class Told(NamedTuple):
    """The news of a rank.

    Attributes:
        messages: Those that have arrived from it.
        entries: Its groups, and its state in each.
        usage: What its process uses.
        now: The time there, on the clock of the entries.
        has_ended: True if its process has ended, and all its messages are told.
        status: The exit status of the process.
        end: How it has ended.
    """

    messages: list[dict[str, Any]]
    entries: list[PageEntry]
    usage: Usage
    now: float
    has_ended: bool
    status: int | None
    end: str


class Keeper(Actor):
    """The keeper of a rank's kernel. Requests are carried by ``told``, so that one thread uses the sockets.

    Args:
        rank: The rank.
    """

    CONCURRENCY = 6

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._requests: deque[tuple[Any, ...]] = deque()
        self._wakes, self._wake = os.pipe()

    def begin(self, size: int, meeting: dict[str, Any]) -> tuple[int, str]:
        """Start the kernel of this rank, and return its pid and its GPUs.

        Args:
            size: The number of ranks.
            meeting: The first meeting that it joins.
        """
        import ray

        from easydist.notebook.cluster import demand_extra

        demand_extra()
        import zmq

        from easydist.notebook.machine import Machine

        # The key of the job may be among them, which the arguments of a process would show.
        variables = {**_environment(), **meeting.pop("variables")}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray starts its processes with it blocked
        self._machine = Machine(size, session_folder())  # when Ray ends the kernel, nobody removes what it leaves
        (self._process,) = self._machine.begin({self._rank: meeting}, variables)
        self._poller = zmq.Poller()
        for connection in (self._wakes, *self._process.connections):
            self._poller.register(connection, zmq.POLLIN)
        return self._process.pid, ", ".join(map(str, ray.get_gpu_ids()))

    def post(self, *request: Any) -> None:
        """Send a request to the kernel: arguments of ``RankHandle.post``."""
        self._requests.append(request)
        os.write(self._wake, b"!")

    def told(self, seconds: float, drops: bool) -> Told:
        """Return the news of the rank, at once if there are messages.

        Args:
            seconds: How long to wait for messages.
            drops: As for ``RankHandle.messages``.
        """
        if self._wakes in dict(self._poller.poll(1000 * seconds)):
            os.read(self._wakes, 1 << 12)
        while self._requests:
            self._process.post(*self._requests.popleft())
        process, has_ended = self._process, self._process.has_ended
        messages = [_short(message) for message in process.arrived(drops)]
        is_last = has_ended and not process.has_messages
        end = process.end() if is_last else ""
        return Told(messages, process.entries(), process.usage(), time.monotonic(), is_last, process.status(), end)

    def interrupt(self) -> None:
        """Interrupt the cell."""
        self._process.interrupt()

    def kill(self) -> None:
        """End the kernel and everything that it has started, and remove its folder."""
        self._process.kill()
        shutil.rmtree(self._machine.folder, ignore_errors=True)

    def log(self) -> str:
        """Return the end of the kernel's log."""
        return self._process.log()


def _environment() -> dict[str, str]:
    """Return the variables of a kernel on this node: where it finds easydist, and the interface for gloo, if known."""
    import ray

    package = str(Path(__file__).parents[2])  # the rest of the path follows when the kernel has begun
    name = interface(ray.util.get_node_ip_address()) or ""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name),
    }


def _short(message: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a message that a cell reads."""
    kept = {name: message[name] for name in ("msg_type", "content", "parent_header")}
    return {**kept, "buffers": [bytes(buffer) for buffer in message["buffers"]]}
