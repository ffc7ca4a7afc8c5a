"""What both ends of a queue do alike: take turns, wait, be cancelled, be left behind by a fork."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from easydist.errors import PeerLostError
from easydist.liveness import texts
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record
from easydist.shm.futex import give_core
from easydist.typing import Timeout

_log = logging.getLogger("easydist")
_LOOKS = 100
"""How often a wait looks, giving the core to others in between, before it sleeps."""

_FIRST_PAUSE, _PAUSE = 0.001, 0.05
"""Seconds of sleep after which it looks around, although nobody has woken it."""

_WARN_AFTER = 60.0

_all: weakref.WeakSet[End] = weakref.WeakSet()


def deadline(timeout: Timeout | None) -> float | None:
    """The point of the monotonic clock at which a timeout from now is over."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return time.monotonic() + seconds


def own_record() -> bytes:
    """What this process tells the other end of itself."""
    return record(own_page(), -1, True)


def name_of(peer: Peer) -> str:
    """A process for people."""
    return texts.process(peer.pid, peer.host)


class End:
    """One end of a queue."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an interrupt may come between taking it and noting so: no deadlock then
        self._is_cancelled = self._is_closed = self._is_foreign = False
        _all.add(self)

    @contextmanager
    def turn(self, until: float | None) -> Iterator[None]:
        """One thread at a time.

        Raises:
            RuntimeError: This end has been closed, or belongs to another process.
            TimeoutError: Another thread has its turn until then.
        """
        self._check()
        if not self._lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            raise TimeoutError("another thread uses this end of the queue")
        try:
            self._check()
            yield
        finally:
            self._lock.release()

    def _check(self) -> None:
        if self._is_foreign:
            raise RuntimeError(
                "this end of the queue belongs to the process from which this one was forked: make one from the handle"
            )
        if self._is_closed:
            raise RuntimeError("this end of the queue has been closed")

    def _until(
        self, look: Callable[[], bool], until: float | None, late: Callable[[], str], patient: bool = False
    ) -> None:
        """Wait until ``look`` says yes.

        Raises:
            RuntimeError: The wait was cancelled.
            TimeoutError: It is later than ``until``; with the text of ``late``.
            Exception: What ``_fault`` has returned.
        """
        for _ in range(_LOOKS):
            if look():
                return
            give_core()
        began, pause = time.monotonic(), _FIRST_PAUSE
        warn_at = began + _WARN_AFTER
        while not self._sleep(look, pause if until is None else max(0.0, min(pause, until - time.monotonic()))):
            pause = _PAUSE
            if self._is_cancelled:
                raise RuntimeError("cancelled")
            if (fault := self._fault()) is not None:
                if look():  # it came just before
                    return
                raise fault
            now = time.monotonic()
            if until is not None and now >= until:
                raise TimeoutError(late())
            if now >= warn_at and not patient:
                warn_at = now + _WARN_AFTER
                _log.warning("%s; waiting for %.0f s", late(), now - began)

    def _sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        """Sleep until there may be something to do; returns what ``look`` says then."""
        raise NotImplementedError

    def _fault(self) -> Exception | None:
        """Why waiting is in vain."""
        raise NotImplementedError

    def _wake(self) -> None:
        """End the sleep of another thread."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of everything, and tell the other end."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Let go of everything without a word."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the waits of this end, now and later."""
        self._is_cancelled = True
        if not (self._is_closed or self._is_foreign):
            self._wake()

    def close(self) -> None:
        """Close this end; does nothing in a forked child, or a second time."""
        if self._is_closed or self._is_foreign:
            return
        self.cancel()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._release()

    def leave_to_parent(self) -> None:
        """After a fork, in the child."""
        if not (self._is_closed or self._is_foreign):
            self._is_foreign = True
            self._abandon()


def lost(peer: Peer, who: str, how: str = "") -> PeerLostError:
    """The error that names a process that has ended."""
    status = peer.exit_status()
    what = f"{name_of(peer)} {how or f'ended ({texts.status_text(status)})'}"
    error = PeerLostError(texts.lost("MessageQueue", who, what, advice="Close this queue, and make a new one."))
    error.rank = peer.rank if peer.rank >= 0 else None
    error.pid, error.host, error.exit_status = peer.pid, peer.host, status
    return error


def _after_fork() -> None:
    for end in tuple(_all):
        end.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
