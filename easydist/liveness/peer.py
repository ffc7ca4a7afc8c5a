"""A view of another process of a group: its life and its last call."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence

from easydist import settings
from easydist.liveness import bodies, keepalive, process, texts
from easydist.liveness.bodies import Body
from easydist.liveness.page import Held, MessageWait, OwnPage, PeerPage
from easydist.liveness.process import SeenProcess
from easydist.liveness.report import EXCEPTION, Report
from easydist.liveness.rules import has_finished
from easydist.liveness.signed import seal
from easydist.liveness.stored import decoded

RECORD_NBYTES = 768
"""The length of the record that each process sends its peers about itself."""


_LONGEST_ID = 100
"""The most letters of a host's identifier in a record."""


def host_id() -> str:
    """Return a text that is equal for processes that may share memory. It is a hint: attaching has to prove it."""
    told = settings.read("EASYDIST_HOST_ID") or pid_namespace()
    if len(told) <= _LONGEST_ID and told.isascii():
        return told
    return hashlib.sha256(told.encode(errors="surrogateescape")).hexdigest()  # a record has no room for the text itself


@functools.cache
def pid_namespace() -> str:
    """Return a text that is equal for processes that know one another by the same pids."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        # A pid means a different process in another pid namespace.
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def record(page: OwnPage | None, entry: int, shares: bool) -> bytes:
    """Return the record about this process for its peers; ``shares`` is True if it would use shared memory."""
    address = page.address if page else (os.getpid(), -1, "")
    where = socket.gethostname()[:200], host_id()
    about = shares, entry, *address, settings.fault(), seal().fingerprint, keepalive.addresses()
    text = json.dumps([time.monotonic(), *where, *about])
    return text.encode().ljust(RECORD_NBYTES)


def by_host(records: Sequence[bytes]) -> list[list[int]]:
    """Return the ranks of each host by their records; each rank is alone unless all would use shared memory.

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


_FIELDS = (float, str, str, bool, int, int, int, str, str, str, [str])


class Peer:
    """Another process of a group, as far as this process can observe it.

    Args:
        rank: Its rank in the group.
        told: Its record (``record``); None if it has not arrived yet.

    Attributes:
        rank: Its rank in the group.
        host: The name of its host; None without a record.
        host_id: The identifier of its host (``host_id()`` there); None without a record.
        pid: Its process id on that host; None without a record.
        shares_pages: True if, by its record, it is on this host and has a page.
        malformed: Its malformed variable (``settings.fault()`` there); empty if there is none.
        fingerprint: The fingerprint of its job key; empty if it has none.
        addresses: The addresses of its host in its connections to other hosts.
    """

    def __init__(self, rank: int, told: bytes | None = None) -> None:
        self.rank = rank
        self.host: str | None = None
        self.host_id: str | None = None
        self.pid: int | None = None
        self.malformed = self.fingerprint = ""
        self.addresses: Sequence[str] = ()
        self._entry, self._born = -1, 0.0
        self._process: SeenProcess | None = None
        self.shares_pages = False
        self._told_left: float | None = None
        if told is not None:
            fields = decoded("the record of its process", told, _FIELDS)
            (
                self._born,
                self.host,
                self.host_id,
                _,
                self._entry,
                self.pid,
                *address,
                self.malformed,
                self.fingerprint,
                self.addresses,
            ) = fields
            is_near = self.host_id == host_id()
            self.shares_pages = is_near and self._entry >= 0
            if is_near:
                self._process = SeenProcess.of(fields[5], *address)

    @property
    def _page(self) -> PeerPage | None:
        return None if self._process is None else self._process.page

    @property
    def is_visible(self) -> bool:
        """True if this process can read its page and observe its process, which is on this host."""
        return self._process is not None

    def has_ended(self) -> bool:
        """True if its process is known to have ended, even if it did so before this process could attach to it."""
        if self._process is not None:
            return self._process.has_ended()
        is_here = self.shares_pages and self.host_id == pid_namespace() != socket.gethostname()
        return is_here and process.is_dead(self.pid)

    @property
    def is_stopped(self) -> bool:
        """True if its process is stopped, by SIGSTOP or by a debugger, as far as this process can tell."""
        return self.is_visible and process.is_stopped(self.pid)

    def has_left(self) -> bool:
        """True if it is known to have left the group, so that it will send nothing more there."""
        if self._told_left is not None:
            return True
        return self._page is not None and self._page.has_left(self._entry, self._born)

    def left(self, number: float) -> None:
        """Record the report by which it has left the group, between the call before ``number`` and the one after."""
        self._told_left = number

    def is_gone(self) -> bool:
        """Do as ``has_ended``; also if ``EASYDIST_HOST_ID`` says that it is on this host."""
        return self.has_ended() or (self._process is None and self.shares_pages and process.is_dead(self.pid))

    def exit_status(self) -> int | None:
        """Return its exit status, negative for a signal; None if its parent has already collected it."""
        return process.exit_status(self.pid)

    def number(self) -> int | None:
        """Return the number of its last call in the group; None if it is not visible."""
        return self._page.number(self._entry) if self._page else None

    def has_finished(self, number: int) -> bool:
        """True if it is known to have left the call of this number, so that all its data has been sent."""
        if self._told_left is not None and number < self._told_left:
            return True
        if self._page is None or (last := self._page.number(self._entry)) is None:
            return False
        if self._page.is_reused(self._entry, self._born):
            return False
        return has_finished(number, last, self._page.is_inside(self._entry))

    def is_inside(self, number: int) -> bool:
        """True if it is known to be in the call of this number."""
        return self._page is not None and self.number() == number and self._page.is_inside(self._entry)

    def waits(self) -> tuple[MessageWait, Held] | None:
        """Return its wait for a message, and the rank that it holds up; None if it is not known to wait for one."""
        if self._page is None or self._page.is_reused(self._entry, self._born):
            return None
        return self._page.waits(self._entry)

    def is_same_group(self, entry: int) -> bool:
        """True if an entry of its page is that of the group to which this peer belongs."""
        return entry == self._entry >= 0

    def recovers(self) -> int:
        """Return the entry of the group that its process recovers; -1 if it is not known to recover one."""
        return -1 if self._page is None else self._page.recovers()

    def is_in(self, entry: int, peer: Peer) -> bool:
        """True if this is the process of another peer, and the entry is that of the group to which this one belongs."""
        page, is_one = self._page, self._process is peer._process and self._entry == entry
        return page is not None and is_one and not page.is_reused(entry, self._born)

    def place(self) -> str:
        """Return the place of its last call; empty if it is not visible."""
        return self._page.place() if self._page else ""

    def body(self) -> Body | None:
        """Return the body that it runs; None if it runs none, is stopped, or is not visible."""
        if self._page is None or not (text := self._page.body()) or self.has_ended() or self.is_stopped:
            return None
        return bodies.of_page(text, self._page.entries())

    def register(self) -> str:
        """Return its register for recovering the group; empty if it has written none, or none visible."""
        return self._page.register(self._entry) if self._page else ""

    def report(self) -> Report | None:
        """Return its failure report, if it has left one on its page since the group was made; else None.

        The exception that ended its process goes first, in the words of this group if it has told this group.
        """
        if (page := self._page) is None:
            return None
        ended, text = page.report(-1), page.report(self._entry) if self._entry >= 0 else ""
        report = self.recent(Report.from_page(text))
        if not ended or (report is not None and report.kind == EXCEPTION):
            return report
        return self.recent(Report.from_page(ended)) or report

    def recent(self, report: Report | None) -> Report | None:
        """Return the report, or None if it is older than the group; both times are of the peer's monotonic clock."""
        return report if report is None or report.time >= self._born else None

    def condition(self, even_if_well: bool = True) -> str:
        """Return the system's view of the process as text; empty if it is well, unless ``even_if_well``."""
        if not self.is_visible:
            return ""
        who = texts.process(self.pid, self.host)
        if self.has_ended():
            return f"{who} has ended"
        if self.is_stopped:
            return f"{who} is alive but stopped (SIGSTOP)"
        return f"{who} is alive" if even_if_well else ""
