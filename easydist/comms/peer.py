"""Another process of a group: whether it is there, and what it was doing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

from easydist.shm import OwnPage, PeerPage

RECORD_NBYTES = 512
"""The length of what each process tells its peers about itself."""


def host_id() -> str:
    """What is equal for processes that may share memory; a hint, which attaching has to prove."""
    return os.environ.get("EASYDIST_HOST_ID") or _host_id()


@functools.cache
def _host_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        # What another container calls process 7 is not the process 7 that is seen from here.
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def record(page: OwnPage | None, slot: int, shares: bool) -> bytes:
    """What this process tells its peers about itself; ``shares``: it would use shared memory."""
    address = page.address if page else (os.getpid(), -1, "")
    text = json.dumps([time.time(), socket.gethostname()[:200], host_id()[:100], shares, slot, *address])
    return text.encode().ljust(RECORD_NBYTES)


def by_host(records: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each host, as far as they say; each is alone unless all of them would use shared memory.

    Example:
        >>> with_shared_memory = [record(None, 0, True) for _ in range(3)]
        >>> by_host(with_shared_memory)
        [[0, 1, 2]]
    """
    told = [json.loads(record)[2:4] for record in records]
    hosts: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(told):
        hosts.setdefault(host, []).append(rank)
    return list(hosts.values()) if all(shares for _, shares in told) else [[rank] for rank in range(len(told))]


class Peer:
    """Another process of a group, as far as it can be seen from here.

    Args:
        rank: In the group.
        told: What it told of itself (``record``); None: nothing yet.

    Attributes:
        rank: In the group.
        host: The name of its host; None where it has not told.
        pid: Its process on that host, likewise.
    """

    def __init__(self, rank: int, told: bytes | None = None) -> None:
        self.rank = rank
        self.host: str | None = None
        self.pid: int | None = None
        self._slot, self._process, self._born = -1, -1, 0.0
        self._page: PeerPage | None = None
        if told is not None:
            self._born, self.host, host, _, self._slot, self.pid, *address = json.loads(told)
            if host == host_id():
                self._attach(*address)

    def _attach(self, descriptor: int, token: str) -> None:
        assert self.pid is not None
        self._page = PeerPage.attach(self.pid, descriptor, token)
        if self._page is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(self.pid)
                weakref.finalize(self, os.close, self._process)

    @property
    def is_visible(self) -> bool:
        """Whether it is on this host, so that its page and its process can be seen."""
        return self._page is not None

    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        if self._page is None or self.pid is None:
            return False
        if self._process >= 0:
            watch = select.poll()
            watch.register(self._process, select.POLLIN)
            return bool(watch.poll(0))
        import psutil

        return not psutil.pid_exists(self.pid) or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE

    def exit_status(self) -> int | None:
        """How it ended, negative for a signal; None where its parent has asked already, so that nobody knows."""
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            if fields[0] in "ZX":
                return os.waitstatus_to_exitcode(int(fields[49]))
        return None

    def number(self) -> int | None:
        """The number of its last call in the group; None where that is not to be seen."""
        return self._page.number(self._slot) if self._page else None

    def has_finished(self, number: int) -> bool:
        """Whether it is known to have left the call of this number, so that all that it sent is on its way."""
        if self._page is None or (last := self._page.number(self._slot)) is None:
            return False
        return last > number or (last == number and not self._page.is_inside(self._slot))

    def is_same_group(self, slot: int) -> bool:
        """Whether what it says under this slot is about the group in which it is this peer."""
        return slot == self._slot >= 0

    def place(self) -> str:
        """Where it was last; empty where that is not to be seen."""
        return self._page.place() if self._page else ""

    def words(self) -> dict[str, Any] | None:
        """Its last words, where it has left some since the group was made."""
        text = self._page.words() if self._page else ""
        try:
            words = json.loads(text) if text else None
        except ValueError:  # read while they were being written
            return None
        return self.recent(words)

    def recent(self, words: dict[str, Any] | None) -> dict[str, Any] | None:
        """What it has said, unless that was before the group was made."""
        return words if words is None or words["time"] >= self._born else None

    def condition(self, even_if_well: bool = True) -> str:
        """What the system says about the process; nothing where it is well, unless that is asked for."""
        if not self.is_visible:
            return ""
        import psutil

        status = psutil.STATUS_DEAD
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(self.pid).status()
        who = f"process {self.pid} on {self.host}"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return f"{who} has ended"
        if status == psutil.STATUS_STOPPED:
            return f"{who} is alive but stopped (SIGSTOP)"
        return f"{who} is alive" if even_if_well else ""


def status_text(status: int | None) -> str:
    """An exit status for people.

    Example:
        >>> status_text(-9), status_text(3), status_text(None)
        ('killed by SIGKILL', 'exit status 3', 'exit status not known')
    """
    if status is None:
        return "exit status not known"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
