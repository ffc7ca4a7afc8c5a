"""The processes of other ranks on this host: one page and one pidfd for each, however many groups it is in."""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Iterator

from easydist.liveness.page import PeerPage

_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")

_seen: weakref.WeakValueDictionary[tuple[int, str], SeenProcess] = weakref.WeakValueDictionary()
"""The processes by pid and token: the token tells a process from a later one with the same pid."""


class SeenProcess:
    """A process of this host, of which this one can read the page.

    Its descriptors are closed with the last group that knows it.

    Args:
        pid: Its process id.
        page: Its page.

    Attributes:
        page: Its page.
    """

    def __init__(self, pid: int, page: PeerPage) -> None:
        self._pid, self.page, self._descriptor = pid, page, -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._descriptor = os.pidfd_open(pid)
                weakref.finalize(self, os.close, self._descriptor)

    @classmethod
    def of(cls, pid: int, descriptor: int, token: str) -> SeenProcess | None:
        """Return the process with this page; None if it has ended, or its page is inaccessible.

        Args:
            pid: Its process id.
            descriptor: The descriptor of the page there.
            token: The token of the page.
        """
        process = _seen.get((pid, token))
        if process is None and (page := PeerPage.attach(pid, descriptor, token)) is not None:
            process = _seen[pid, token] = cls(pid, page)
        return process

    def has_ended(self) -> bool:
        """True if it has ended; its parent need not have collected it."""
        if self._descriptor < 0:
            return is_dead(self._pid)
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))


def is_dead(pid: int | None) -> bool:
    """True if there is no such process, or if it is a zombie."""
    return _state(pid)[0] in _DEAD


def is_stopped(pid: int | None) -> bool:
    """True if the process is stopped, by SIGSTOP or by a debugger, as far as this process can tell."""
    return _state(pid)[0] in _STOPPED


def exit_status(pid: int | None) -> int | None:
    """Return the exit status of a zombie, negative for a signal; None if its parent has already collected it."""
    state, *fields = _state(pid)
    with contextlib.suppress(IndexError, ValueError):
        return os.waitstatus_to_exitcode(int(fields[48])) if state in _DEAD else None
    return None


def ancestors() -> Iterator[int]:
    """Return the processes from which this one descends, its parent first, as far as they are visible here."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        fields = _state(pid)
        pid = int(fields[1]) if len(fields) > 1 else 0


def _state(pid: int | None) -> list[str]:
    """Return the fields of a process's status from its state on: an empty state if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split() or [""]
    except (FileNotFoundError, ProcessLookupError):
        return ["?" if _exists(pid) else ""]
    except OSError:  # it exists, and is hidden from this user
        return ["?"]


def _exists(pid: int | None) -> bool:
    """True if there is such a process, although the system does not show its status."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return pid is not None
