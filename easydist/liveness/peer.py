"""Another process of a group: whether it is there, and what it was doing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

from easydist.errors import WireError
from easydist.liveness import texts
from easydist.liveness.page import OwnPage, PeerPage
from easydist.liveness.report import Report
from easydist.liveness.rules import has_finished

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


def record(page: OwnPage | None, entry: int, shares: bool) -> bytes:
    """What this process tells its peers about itself; ``shares``: it would use shared memory."""
    address = page.address if page else (os.getpid(), -1, "")
    text = json.dumps([time.monotonic(), socket.gethostname()[:200], host_id()[:100], shares, entry, *address])
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


_FIELDS = (float, str, str, bool, int, int, int, str)


def _parsed(told: bytes) -> Any:
    """What ``record`` has written.

    Raises:
        WireError: It has not.
    """
    try:
        fields = json.loads(told)
    except (ValueError, RecursionError):  # also of the decoder of UTF-8
        fields = None
    if not isinstance(fields, list) or tuple(map(type, fields)) != _FIELDS:
        raise WireError("what it tells of its process is damaged, or from another version of easydist")
    return fields


class Peer:
    """Another process of a group, as far as it can be seen from here.

    Args:
        rank: In the group.
        told: What it told of itself (``record``); None: nothing yet.

    Attributes:
        rank: In the group.
        host: The name of its host; None where it has not told.
        pid: Its process on that host, likewise.
        shares_pages: True if it has told that it is on this host, and has a page.
    """

    def __init__(self, rank: int, told: bytes | None = None) -> None:
        self.rank = rank
        self.host: str | None = None
        self.pid: int | None = None
        self._entry, self._process, self._born = -1, -1, 0.0
        self._page: PeerPage | None = None
        self.shares_pages = False
        if told is not None:
            self._born, self.host, host, _, self._entry, self.pid, *address = _parsed(told)
            self.shares_pages = host == host_id() and self._entry >= 0
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
        """True if it is on this host, so that its page and its process can be seen."""
        return self._page is not None

    def has_ended(self) -> bool:
        """True if its process is known to have ended."""
        if self._page is None or self.pid is None:
            return False
        if self._process >= 0:
            poller = select.poll()
            poller.register(self._process, select.POLLIN)
            return bool(poller.poll(0))
        import psutil

        return not psutil.pid_exists(self.pid) or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE

    def is_gone(self) -> bool:
        """True if its process has ended, also if that was before this one could look after it."""
        if self._page is None:
            return self.shares_pages and not os.path.exists(f"/proc/{self.pid}")
        return self.has_ended()

    def exit_status(self) -> int | None:
        """How it ended, negative for a signal; None where its parent has asked already, so that nobody knows."""
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            if fields[0] in "ZX":
                return os.waitstatus_to_exitcode(int(fields[49]))
        return None

    def number(self) -> int | None:
        """The number of its last call in the group; None where that is not to be seen."""
        return self._page.number(self._entry) if self._page else None

    def has_finished(self, number: int) -> bool:
        """True if it is known to have left the call of this number, so that all that it sent is on its way."""
        if self._page is None or (last := self._page.number(self._entry)) is None:
            return False
        return has_finished(number, last, self._page.is_inside(self._entry))

    def is_same_group(self, entry: int) -> bool:
        """True if what it says under this entry is about the group in which it is this peer."""
        return entry == self._entry >= 0

    def place(self) -> str:
        """Where it was last; empty where that is not to be seen."""
        return self._page.place() if self._page else ""

    def register(self) -> str:
        """Its register for recovering the group; empty where it has written none that can be seen."""
        return self._page.register(self._entry) if self._page else ""

    def report(self) -> Report | None:
        """Its failure report, where it has left one on its page since the group was made."""
        return self.recent(Report.from_json(self._page.report())) if self._page else None

    def recent(self, report: Report | None) -> Report | None:
        """The report, unless it is older than the group; both times are of its own monotonic clock."""
        return report if report is None or report.time >= self._born else None

    def condition(self, even_if_well: bool = True) -> str:
        """What the system says about the process; nothing where it is well, unless that is asked for."""
        if not self.is_visible:
            return ""
        import psutil

        status = psutil.STATUS_DEAD
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(self.pid).status()
        who = texts.process(self.pid, self.host)
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return f"{who} has ended"
        if status == psutil.STATUS_STOPPED:
            return f"{who} is alive but stopped (SIGSTOP)"
        return f"{who} is alive" if even_if_well else ""
