"""The page of a process: shared memory with its state, for peers on the same host and for ``easydist top``.

The page has no name: peers open it through ``/proc/<pid>/fd``, so no file can be left behind. If a peer finds the
page's 16 random bytes there, the pid means the same process for both. Reading and writing are not synchronised: the
texts are for people, and the numbers are single words.

======  =====================================================================
bytes   content
======  =====================================================================
0       16 random bytes
16      three u64: the pid, as the process knows it; the number of entries used; the entry of the last call, plus 1
40      two u64: the signal on which the process writes its stacks, the descriptor of the file; 0 if it does not
56      u64: the entry of the group that the process recovers, plus 1; 0 if it recovers none
64      length of the body, u64; the body that the process runs while others wait for it (``bodies``)
512     length, u64; the report of the exception that ended the process
32768   the entries: 2048 bytes for each group
2 MiB   the failure reports: for each group 32 KiB, which begin with the length, u64
======  =====================================================================

======  =====================================================================
bytes   content of an entry
======  =====================================================================
0       number of the last call of all ranks
8       1 inside that call, 0 after it
16      the time when the current call began, or the last one ended: double, seconds of the monotonic clock
24      u32: 1 in a call of all ranks, 2 + r in a call with rank r alone, 0 outside of calls
28      u32: twice the number of the message for which it waits there, plus its kind (``MessageWait``); 0 for none
32      length of the place, u64; the place of the last call (operation, call, file and line)
616     u32: 1 + a rank that waits for a message which this one has not begun (``Crossing.circle``); 0 for none
620     u32: that message, as above
624     the time when the entry was made for its group: double, seconds of the monotonic clock
632     1 once the process has left the group, else 0
640     length of the description, u64; the first four fields of ``PageEntry``, as JSON
1024    the register for recovering the group, twice: number of the version, CRC, length, text
======  =====================================================================
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from typing import NamedTuple

from easydist.liveness import stacks

_BODY, _REPORT, _ENTRIES, _ENTRY_NBYTES = 64, 512, 1 << 15, 1 << 11
_REPORTS, _REPORT_NBYTES = 1 << 21, 1 << 15
_PLACE, _HOLDS, _MADE, _LEFT, _DESCRIPTION, _REGISTER = 32, 616, 624, 632, 640, 1024
_VERSION_NBYTES = (_ENTRY_NBYTES - _REGISTER) // 2
_VERSION = struct.Struct("QII")
_ENTRY_COUNT = (_REPORTS - _ENTRIES) // _ENTRY_NBYTES
_NBYTES = _REPORTS + _ENTRY_COUNT * _REPORT_NBYTES  # the system allocates only the parts that have been touched
_LONGEST = _HOLDS - _PLACE - 8
_SINCE_AND_PARTNER, _SINCE_TO_PLACE, _TIME = struct.Struct("dq"), struct.Struct("dqQ"), struct.Struct("d")
_PARTNER = (1 << 32) - 1
"""The bits of the call's kind."""

_LAST_MESSAGE = (1 << 31) - 1

_PID, _USED, _LAST, _SIGNAL, _STACKS, _RECOVERS = 2, 3, 4, 5, 6, 7
"""Indices of 8-byte words of the page."""


class MessageWait(NamedTuple):
    """The wait of a rank for a message in a call with one other rank.

    Attributes:
        partner: The other rank.
        kind: What that has to do: 0 to send the message, 1 to receive it.
        number: The number of the message among those of this kind between the two, from 1.
    """

    partner: int
    kind: int
    number: int


Held = tuple[int, int, int] | None
"""A rank whose message has not been begun, the number of that message, and its kind; None if there is none."""


class PageEntry(NamedTuple):
    """One rank of a group, as its page describes it.

    Attributes:
        group: The group's name.
        meeting: A text that is equal for all ranks of a group that have met; empty before.
        rank: The rank of the process in the group.
        size: The number of processes in the group.
        number: The number of its last call of all ranks, 0 before the first.
        place: Operation, call, file and line of its last call; empty before the first.
        is_in_call: True if a call is under way.
        peer: The only other rank in that call; None if all ranks take part.
        since: The time when that call began, or when the last one ended; seconds of the monotonic clock.
    """

    group: str
    meeting: str
    rank: int
    size: int
    number: int
    place: str
    is_in_call: bool
    peer: int | None
    since: float


class _Page:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")

    def _text(self, start: int, stop: int) -> str:
        if not self._words[start >> 3]:
            return ""
        length = min(int.from_bytes(self._memory[start : start + 8], "little"), stop - start - 8)
        return self._memory[start + 8 : start + 8 + length].decode(errors="replace")

    def body(self) -> str:
        """Return the body that the process runs while others wait for it; empty if there is none."""
        return self._text(_BODY, _REPORT)

    def recovers(self) -> int:
        """Return the entry of the group that the process recovers; -1 if it recovers none."""
        return self._words[_RECOVERS] - 1

    def entries(self) -> list[PageEntry]:
        """Return the entries of the process: each of its groups, and its state there."""
        found = [self._read_entry(entry) for entry in range(min(self._words[_USED], _ENTRY_COUNT))]
        return [entry for entry in found if entry is not None]

    def _read_entry(self, entry: int) -> PageEntry | None:
        start = _start(entry)
        try:
            group, meeting, rank, size = json.loads(self._text(start + _DESCRIPTION, start + _REGISTER))
        except (TypeError, ValueError):  # a free entry, or read while it was being written
            return None
        since, partner = _SINCE_AND_PARTNER.unpack_from(self._memory, start + 16)
        partner &= _PARTNER
        peer = partner - 2 if partner > 1 else None
        number = self._words[start >> 3]
        return PageEntry(group, meeting, rank, size, number, self._place(entry), partner > 0, peer, since)

    def _place(self, entry: int) -> str:
        return self._text(_start(entry) + _PLACE, _start(entry) + _HOLDS)

    def _versions(self, entry: int) -> tuple[int, str]:
        """Return the number and the text of a register's last complete version; number 0 if there is none.

        A reader that is stopped between the halves may find one half old, and the other one being written again. So it
        looks until two looks are equal.
        """
        seen = None
        while seen != (halves := [self._version(entry, half) for half in (0, 1)]):
            seen = halves
        number, text = max(halves)
        return number, text.decode() if number else ""

    def _version(self, entry: int, half: int) -> tuple[int, bytes]:
        """Return the number and the text of a half; number 0 if it is being written, or has not been written yet."""
        start = _start(entry) + _REGISTER + half * _VERSION_NBYTES
        found = self._memory[start : start + _VERSION_NBYTES]
        number, check, length = _VERSION.unpack_from(found)
        text = found[_VERSION.size : _VERSION.size + length]
        return (number, text) if length and check == zlib.crc32(text, number) else (0, found)

    def _write(self, start: int, stop: int, text: bytes) -> None:
        text = text[: stop - start - 8]
        self._memory[start : start + 8 + len(text)] = len(text).to_bytes(8, "little") + text


class OwnPage(_Page):
    """The page of this process.

    Example:
        >>> page = OwnPage()
        >>> entry = page.new_entry()
        >>> page.begin(entry, b"gather, call 1, at train.py:30", 0.0, number=1)
        >>> page.end(entry, 0.1)
        >>> peer = PeerPage.attach(*page.address)
        >>> peer.place(), peer.number(entry), peer.is_inside(entry)
        ('gather, call 1, at train.py:30', 1, False)

    Attributes:
        address: The arguments for a peer to attach: pid, file descriptor, the random bytes as text.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("easydist", os.MFD_CLOEXEC)
        os.fchmod(self._descriptor, 0o600)  # the page reveals the program's paths and the texts of its exceptions
        os.ftruncate(self._descriptor, _NBYTES)
        super().__init__(mmap.mmap(self._descriptor, _NBYTES))
        self._memory[:16] = token = secrets.token_bytes(16)
        self._words[_PID] = os.getpid()
        self.address = os.getpid(), self._descriptor, token.hex()
        self._words[_SIGNAL], self._words[_STACKS] = stacks.agree()
        self._free: deque[int] = deque()

    def new_entry(self) -> int:
        """Return a cleared entry for the calls of one more group; -1 if the page is full."""
        if (entry := self._take_entry()) < 0:
            return -1
        start = _start(entry)
        _TIME.pack_into(self._memory, start + _MADE, time.monotonic())  # first: it is no longer about the old group
        self._memory[start : start + _MADE] = bytes(_MADE)
        self._memory[start + _LEFT : start + _ENTRY_NBYTES] = bytes(_ENTRY_NBYTES - _LEFT)
        self._words[_report_of(entry) >> 3] = 0
        return entry

    def _take_entry(self) -> int:
        # Ranks that still wait may read a used entry: that the group was left, and its report. All others come first.
        with _making:  # no two threads may get the same one
            if (entry := self._words[_USED]) < _ENTRY_COUNT:
                self._words[_USED] = entry + 1
                return entry
            return self._free.popleft() if self._free else -1

    def leave(self, entry: int) -> None:
        """Record that the process has left the group. In a forked child, whose parent still has it, do nothing."""
        if entry >= 0 and self.address[0] == os.getpid():
            self._words[(_start(entry) + _LEFT) >> 3] = 1
            self._write(_start(entry) + _DESCRIPTION, _start(entry) + _REGISTER, b"")

    def free_entry(self, entry: int) -> None:
        """Free the entry of a destroyed group. In a forked child, whose parent still has the group, do nothing."""
        if entry >= 0 and self.address[0] == os.getpid():
            self._write(_start(entry) + _DESCRIPTION, _start(entry) + _REGISTER, b"")
            self._free.append(entry)

    def describe(self, entry: int, group: str, *who: str | int) -> None:
        """Write which rank of which group an entry is about.

        Args:
            entry: The entry of the group.
            group: The name of the group; the end of one that is too long is left out.
            *who: The next three fields of ``PageEntry``.
        """
        if entry < 0:
            return
        start, stop = _start(entry) + _DESCRIPTION, _start(entry) + _REGISTER
        while len(text := json.dumps([group, *who]).encode()) > stop - start - 8 and group:
            group = group[: len(group) // 2]
        self._write(start, stop, text)

    def begin(self, entry: int, place: bytes, now: float, number: int | None = None, peer: int | None = None) -> None:
        """Record that a call begins.

        Args:
            entry: The entry of the group.
            place: Operation, call, file and line.
            now: The time of the monotonic clock.
            number: The number of the call; None if it is not counted.
            peer: The only other rank that takes part; None if all ranks do.
        """
        if entry < 0:
            return
        start, words, place = _ENTRIES + entry * _ENTRY_NBYTES, self._words, place[:_LONGEST]
        head = _SINCE_TO_PLACE.pack(now, 1 if peer is None else 2 + peer, len(place))
        self._memory[start + 16 : start + 40 + len(place)] = head + place
        if number is not None:
            # Before the number: readers take a rank that is not inside the call of its number for finished.
            words[(start >> 3) + 1] = 1
            words[start >> 3] = number
        words[_LAST] = entry + 1

    def wait(self, entry: int, wait: MessageWait) -> None:
        """Record a wait in the call that has begun; number 0 for none any more.

        Example:
            >>> page = OwnPage()
            >>> entry = page.new_entry()
            >>> page.begin(entry, b"recv_object", 0.0, peer=3)
            >>> page.wait(entry, MessageWait(3, 0, 1))
            >>> PeerPage.attach(*page.address).waits(entry)
            (MessageWait(partner=3, kind=0, number=1), None)
        """
        if entry >= 0:
            self._words[(_start(entry) + _HOLDS) >> 3] = 0  # first: it is about the wait before
            self._words[(_start(entry) + 24) >> 3] = _message(wait) << 32 | 2 + wait.partner

    def holds(self, entry: int, rank: int, wait: MessageWait) -> None:
        """Record that a rank waits for a message which this one has not begun, and will not during its own wait."""
        if entry >= 0:
            self._words[(_start(entry) + _HOLDS) >> 3] = _message(wait) << 32 | 1 + rank

    def end(self, entry: int, now: float, is_done: bool = True) -> None:
        """Record that the last call has ended; unless ``is_done``, its number still counts as under way."""
        if entry < 0:
            return
        start = _ENTRIES + entry * _ENTRY_NBYTES
        if is_done:
            self._words[(start >> 3) + 1] = 0
        _SINCE_AND_PARTNER.pack_into(self._memory, start + 16, now, 0)

    def set_register(self, entry: int, text: str) -> None:
        """Write the register of a group; a reader gets this text or the previous one, never a mixture.

        Args:
            entry: The entry of the group.
            text: The text, which is not empty.

        Raises:
            ValueError: The text is too long.

        Example:
            >>> page = OwnPage()
            >>> entry = page.new_entry()
            >>> peer = PeerPage.attach(*page.address)
            >>> page.set_register(entry, "ready")
            >>> peer.register(entry)
            'ready'
        """
        if len(data := text.encode()) > _VERSION_NBYTES - _VERSION.size:
            raise ValueError(f"a register of {len(data)} bytes does not fit a page: the group has too many ranks")
        number = self._versions(entry)[0] + 1
        start = _start(entry) + _REGISTER + number % 2 * _VERSION_NBYTES  # the other half keeps the previous version
        self._memory[start : start + _VERSION.size + len(data)] = (
            _VERSION.pack(number, zlib.crc32(data, number), len(data)) + data
        )

    def set_recovers(self, entry: int) -> None:
        """Record which group the process recovers, by its entry; -1 for none any more."""
        self._words[_RECOVERS] = entry + 1

    def set_body(self, text: str) -> None:
        """Write the body that the process runs; empty after its end."""
        self._write(_BODY, _REPORT, text.encode(errors="replace"))

    def set_report(self, entry: int, text: str) -> None:
        """Write the failure report of a group, or with entry -1 that of the process, which counts for all its groups.

        Args:
            entry: The entry of the group.
            text: The report as JSON; empty to erase it.
        """
        start, stop = (_report_of(entry), _report_of(entry + 1)) if entry >= 0 else (_REPORT, _ENTRIES)
        self._write(start, stop, text.encode(errors="replace"))


class PeerPage(_Page):
    """The page of another process."""

    @classmethod
    def attach(cls, pid: int, descriptor: int, token: str) -> PeerPage | None:
        """Return the page of process ``pid``; None if it is inaccessible (another host, container or user)."""
        page = cls._open(f"/proc/{pid}/fd/{descriptor}")
        return page if page is not None and page._memory[:16].hex() == token else None

    @classmethod
    def _open(cls, path: str) -> PeerPage | None:
        try:
            if not os.readlink(path).startswith("/memfd:easydist"):  # opening a pipe of another program could block
                return None
            with open(path, "rb") as file:
                return cls(mmap.mmap(file.fileno(), _NBYTES, access=mmap.ACCESS_READ))
        except (OSError, ValueError):
            return None

    @classmethod
    def find(cls, pid: int) -> PeerPage | None:
        """Return the page of process ``pid``, found among its open files; None if it has none, or none accessible.

        Example:
            >>> page = OwnPage()
            >>> PeerPage.find(os.getpid()) is not None
            True
        """
        try:
            names = os.listdir(f"/proc/{pid}/fd")
            with open(f"/proc/{pid}/status") as file:
                own = next((line for line in file if line.startswith("NSpid:")), f"NSpid: {pid}").split()[-1]
        except OSError:
            return None
        pages = [cls._open(f"/proc/{pid}/fd/{name}") for name in names]
        # A forked child has its parent's page open, too.
        return next((page for page in pages if page is not None and page._words[_PID] == int(own)), None)

    def stacks(self) -> tuple[int, int] | None:
        """Return the signal on which the process writes its stacks, and the file's descriptor; None if it does not."""
        return (self._words[_SIGNAL], self._words[_STACKS]) if self._words[_SIGNAL] else None

    def place(self) -> str:
        """Return the place of the last call: operation, call number, file and line; empty before the first call."""
        last = self._words[_LAST]
        return self._place(last - 1) if 0 < last <= _ENTRY_COUNT else ""

    def report(self, entry: int) -> str:
        """Return the failure report of a group, or with entry -1 that of the process, as JSON; empty if none."""
        return self._text(*((_report_of(entry), _report_of(entry + 1)) if entry >= 0 else (_REPORT, _ENTRIES)))

    def register(self, entry: int) -> str:
        """Return the register of a group; empty if the process has written none."""
        return self._versions(entry)[1] if entry >= 0 else ""

    def number(self, entry: int) -> int | None:
        """Return the number of the last call in a group; None if it is not known."""
        return self._words[_start(entry) >> 3] if entry >= 0 else None

    def waits(self, entry: int) -> tuple[MessageWait, Held] | None:
        """Return the wait of the process for a message, and what it has recorded of another one; None if none."""
        word = self._words[(_start(entry) + 24) >> 3] if entry >= 0 else 0
        if not (told := word >> 32):
            return None
        held = self._words[(_start(entry) + _HOLDS) >> 3]
        other = ((held & _PARTNER) - 1, held >> 33, held >> 32 & 1) if held else None
        return MessageWait((word & _PARTNER) - 2, told % 2, told // 2), other

    def has_left(self, entry: int, born: float) -> bool:
        """True if the process has left the group to which the entry belonged at the time ``born`` of its clock."""
        return entry >= 0 and (bool(self._words[(_start(entry) + _LEFT) >> 3]) or self.is_reused(entry, born))

    def is_reused(self, entry: int, born: float) -> bool:
        """True if the entry is about a later group than at the time ``born`` of the process's clock."""
        made: float = _TIME.unpack_from(self._memory, _start(entry) + _MADE)[0]
        return made > born

    def is_inside(self, entry: int) -> bool:
        """True if the process is inside its last call in a group."""
        return entry >= 0 and bool(self._words[(_start(entry) >> 3) + 1])


def _message(wait: MessageWait) -> int:
    """Return the message of a wait in 31 bits."""
    return (2 * wait.number + wait.kind) & _LAST_MESSAGE


def _start(entry: int) -> int:
    """Return the offset of an entry."""
    return _ENTRIES + entry * _ENTRY_NBYTES


def _report_of(entry: int) -> int:
    """Return the offset of the failure report of an entry."""
    return _REPORTS + entry * _REPORT_NBYTES


_making = threading.RLock()
"""The lock that is held while a page is made, or an entry is taken."""


def own_page() -> OwnPage | None:
    """Return the page of this process, made at the first call; None if the system does not support such memory."""
    with _making:  # two threads that come at once have to get the same page
        return _own_page()


@functools.cache
def _own_page() -> OwnPage | None:
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):  # a sandbox may forbid it; the process then has no page
        return OwnPage()
    return None


def _after_fork() -> None:
    """Let a forked child have a page of its own; a thread of the parent may have held the lock."""
    global _making
    _making = threading.RLock()
    _own_page.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
