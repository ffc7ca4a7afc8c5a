"""A page on which a process says what it is doing, for its peers on the same host to read.

The page has no name: peers open it through ``/proc/<pid>/fd``, so that nothing can stay behind, and that a peer finds
the page's 16 random bytes there proves that the pid means the same process for both. Reading and writing are not
synchronised: the texts are for people, the numbers are single words.

======  =====================================================================
bytes   content
======  =====================================================================
0       16 random bytes
16      length of the place, u64; the place (operation, call, file and line)
512     length of the last words, u64; the last words
2048    per group two u64: number of its last call; 1 inside it, 0 after it
======  =====================================================================
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import secrets

_NBYTES = 1 << 16
_PLACE, _WORDS, _SLOTS = 16, 512, 2048
_SLOT_COUNT = (_NBYTES - _SLOTS) // 16


class _Page:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._numbers = memoryview(memory)[_SLOTS:].cast("q")

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
        >>> slot = page.new_slot()
        >>> page.begin(slot, 1, b"gather, call 1, at train.py:30")
        >>> page.end(slot)
        >>> peer = PeerPage.attach(*page.address)
        >>> peer.place(), peer.number(slot), peer.is_inside(slot)
        ('gather, call 1, at train.py:30', 1, False)

    Attributes:
        address: What a peer needs to attach: pid, file descriptor, the random bytes as text.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("easydist", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _NBYTES)
        super().__init__(mmap.mmap(self._descriptor, _NBYTES))
        self._memory[:16] = token = secrets.token_bytes(16)
        self.address = os.getpid(), self._descriptor, token.hex()
        self._slots = itertools.count()
        self._free: list[int] = []

    def new_slot(self) -> int:
        """Room for the call numbers of one more group; -1 where there is none."""
        slot = self._free.pop() if self._free else next(self._slots)
        if slot >= _SLOT_COUNT:
            return -1
        self._numbers[2 * slot] = self._numbers[2 * slot + 1] = 0
        return slot

    def free_slot(self, slot: int) -> None:
        """A group is no more."""
        if slot >= 0:
            self._free.append(slot)

    def begin(self, slot: int, number: int, place: bytes) -> None:
        """A call begins."""
        self._write(_PLACE, _WORDS, place)
        if slot >= 0:
            self._numbers[2 * slot + 1] = 1
            self._numbers[2 * slot] = number

    def end(self, slot: int) -> None:
        """The call that began last has ended."""
        if slot >= 0:
            self._numbers[2 * slot + 1] = 0

    def say(self, words: str) -> None:
        """Leave last words."""
        self._write(_WORDS, _SLOTS, words.encode(errors="replace"))


class PeerPage(_Page):
    """The page of another process."""

    @classmethod
    def attach(cls, pid: int, descriptor: int, token: str) -> PeerPage | None:
        """The page of process ``pid``; None where it is not to be seen: another host, container or user."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            if not os.readlink(path).startswith("/memfd:easydist"):  # to open a stranger's pipe could block
                return None
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), _NBYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        return cls(memory) if memory[:16].hex() == token else None

    def place(self) -> str:
        """Where the process was last: operation, call number, file and line; empty before the first call."""
        return self._text(_PLACE, _WORDS)

    def words(self) -> str:
        """What it said last; empty where it said nothing."""
        return self._text(_WORDS, _SLOTS)

    def number(self, slot: int) -> int | None:
        """The number of its last call in a group; None where that is not known."""
        return self._numbers[2 * slot] if slot >= 0 else None

    def is_inside(self, slot: int) -> bool:
        """Whether it is inside that call."""
        return slot >= 0 and bool(self._numbers[2 * slot + 1])


def own_page() -> OwnPage | None:
    """The page of this process, made at the first call; None where the system has no such memory."""
    return _own_page(os.getpid()) if hasattr(os, "memfd_create") else None


@functools.lru_cache(maxsize=1)
def _own_page(pid: int) -> OwnPage:  # a forked child has its own
    return OwnPage()
