"""A page on which a process says what it is doing, for its peers on the same host to read.

The page has no name: peers open it through ``/proc/<pid>/fd``, so that nothing can stay behind, and that a peer finds
the page's 16 random bytes there proves that the pid means the same process for both. Reading and writing are not
synchronised: the texts are for people, the numbers are single words.

======  =====================================================================
bytes   content
======  =====================================================================
0       16 random bytes
16      length of the place, u64; the place (operation, call, file and line)
512     length of the failure report, u64; the failure report
32768   one entry per group, two u64: number of its last call; 1 inside it, 0 after it
======  =====================================================================
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import secrets

_NBYTES = 1 << 16
_PLACE, _REPORT, _ENTRIES = 16, 512, 1 << 15
_ENTRY_COUNT = (_NBYTES - _ENTRIES) // 16


class _Page:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._numbers = memoryview(memory)[_ENTRIES:].cast("q")

    def _text(self, start: int, stop: int) -> str:
        length = min(int.from_bytes(self._memory[start : start + 8], "little"), stop - start - 8)
        return self._memory[start + 8 : start + 8 + length].decode(errors="replace")

    def _write(self, start: int, stop: int, text: bytes) -> None:
        text = text[: stop - start - 8]
        self._memory[start : start + 8 + len(text)] = len(text).to_bytes(8, "little") + text


class OwnPage(_Page):
    """The page of this process.

    Example:
        >>> page = OwnPage()
        >>> entry = page.new_entry()
        >>> page.begin(entry, 1, b"gather, call 1, at train.py:30")
        >>> page.end(entry)
        >>> peer = PeerPage.attach(*page.address)
        >>> peer.place(), peer.number(entry), peer.is_inside(entry)
        ('gather, call 1, at train.py:30', 1, False)

    Attributes:
        address: What a peer needs to attach: pid, file descriptor, the random bytes as text.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("easydist", os.MFD_CLOEXEC)
        os.fchmod(self._descriptor, 0o600)  # it says where the program is, and what its exceptions say
        os.ftruncate(self._descriptor, _NBYTES)
        super().__init__(mmap.mmap(self._descriptor, _NBYTES))
        self._memory[:16] = token = secrets.token_bytes(16)
        self.address = os.getpid(), self._descriptor, token.hex()
        self._entries = itertools.count()
        self._free: list[int] = []

    def new_entry(self) -> int:
        """Room for the call numbers of one more group; -1 where there is none."""
        entry = self._free.pop() if self._free else next(self._entries)
        if entry >= _ENTRY_COUNT:
            return -1
        self._numbers[2 * entry] = self._numbers[2 * entry + 1] = 0
        return entry

    def free_entry(self, entry: int) -> None:
        """A group is no more."""
        if entry >= 0:
            self._free.append(entry)

    def begin(self, entry: int, number: int, place: bytes) -> None:
        """A call begins."""
        self._write(_PLACE, _REPORT, place)
        if entry >= 0:
            self._numbers[2 * entry + 1] = 1
            self._numbers[2 * entry] = number

    def end(self, entry: int) -> None:
        """The call that began last has ended."""
        if entry >= 0:
            self._numbers[2 * entry + 1] = 0

    def set_report(self, text: str) -> None:
        """Leave a failure report."""
        self._write(_REPORT, _ENTRIES, text.encode(errors="replace"))


class PeerPage(_Page):
    """The page of another process."""

    @classmethod
    def attach(cls, pid: int, descriptor: int, token: str) -> PeerPage | None:
        """The page of process ``pid``; None where it is not to be seen: another host, container or user."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            if not os.readlink(path).startswith("/memfd:easydist"):  # opening a pipe of another program could block
                return None
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), _NBYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        return cls(memory) if memory[:16].hex() == token else None

    def place(self) -> str:
        """Where the process was last: operation, call number, file and line; empty before the first call."""
        return self._text(_PLACE, _REPORT)

    def report(self) -> str:
        """Its failure report as JSON; empty where there is none."""
        return self._text(_REPORT, _ENTRIES)

    def number(self, entry: int) -> int | None:
        """The number of its last call in a group; None where that is not known."""
        return self._numbers[2 * entry] if entry >= 0 else None

    def is_inside(self, entry: int) -> bool:
        """True if it is inside that call."""
        return entry >= 0 and bool(self._numbers[2 * entry + 1])


def own_page() -> OwnPage | None:
    """The page of this process, made at the first call; None where the system has no such memory."""
    return _own_page(os.getpid())


@functools.lru_cache(maxsize=1)
def _own_page(pid: int) -> OwnPage | None:  # a forked child has its own
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):  # a sandbox does without
        return OwnPage()
    return None
