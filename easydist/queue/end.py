"""The common part of both ends of a queue: the handle, turns, waits, cancelling, and the state after a fork."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from easydist import settings
from easydist.agreement.calling import in_seconds
from easydist.errors import PeerLostError
from easydist.liveness import keepalive, texts
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record
from easydist.shm.futex import give_core
from easydist.typing import Timeout

_log = logging.getLogger("easydist")
_LOOKS, _SOON = 300, 0.005
"""The number of times, and the seconds, in which a wait checks its condition, yielding the core, before it sleeps.

On an idle core these checks take 0.2 ms. Waking a process takes half of that: with fewer checks, both ends would sleep,
and wake each other for every message. If the core is busy, each check takes milliseconds.
"""

_FIRST_PAUSE, _PAUSE = 0.001, 0.05
"""The longest sleep in seconds after which a wait checks its condition without being woken."""

_WARN_AFTER = 60.0
_FOREVER = 1e9
"""Seconds from which a timeout counts as none. A lock cannot wait for more than ten times as many."""

_CLOSED = "this end of the queue has been closed"
_FOREIGN = "this end of the queue belongs to the process from which this one was forked. Make a new one from the handle"

_all: weakref.WeakSet[End] = weakref.WeakSet()


@dataclass(frozen=True)
class Handle:
    """The argument of ``MessageQueue.create_from_handle``, to be pickled, or sent as ``plain()``.

    It contains the key of the queue: any process that has it can become a reader. A handle serves each rank once.

    Attributes:
        local_reader_ranks: The readers that are expected to share memory with the writer.
        n_reader: The number of all readers.
        ring: The name and shape of the shared memory; None if there is none.
        address: The host and port for readers that do not share memory; None if there are none.
        key: The key with which such readers and the writer authenticate each other.
        writer: The record of the writer's process.
        weights_only: True if readers decode with the restricted decoder.
    """

    local_reader_ranks: tuple[int, ...]
    n_reader: int
    ring: tuple[str, tuple[int, int, int]] | None
    address: tuple[str, int] | None
    key: bytes = field(repr=False)
    writer: bytes = field(repr=False)
    weights_only: bool

    @property
    def remote_subscribe_addr(self) -> str | None:
        """The address for readers on other hosts; None if all are on the writer's. vLLM's executor asks for it."""
        if self.address is None or self.n_reader == len(self.local_reader_ranks):
            return None
        return f"tcp://{address_text(self.address)}"

    def plain(self) -> tuple[Any, ...]:
        """Return the handle as plain data, which every decoder accepts. ``Handle(*plain)`` restores it."""
        return tuple(vars(self).values())


def address_text(address: tuple[str, int]) -> str:
    """Return a host and a port as one text.

    Example:
        >>> address_text(("10.0.0.1", 7)), address_text(("2001:db8::1", 7))
        ('10.0.0.1:7', '[2001:db8::1]:7')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def deadline(timeout: Timeout | None) -> float | None:
    """Return the time on the monotonic clock at which a timeout that starts now is over; None if it never is.

    Raises:
        TypeError: The timeout is neither a number of seconds nor a timedelta.
        ValueError: It is NaN.
    """
    if timeout is None:
        return None
    seconds = in_seconds(timeout, "MessageQueue")
    if math.isnan(seconds):
        raise ValueError("timeout is not a number")
    return time.monotonic() + seconds if seconds < _FOREVER else None


def own_record() -> bytes:
    """Return the record of this process for the other end."""
    return record(own_page(), -1, True)


def name_of(peer: Peer) -> str:
    """Describe a process for error messages."""
    return texts.process(peer.pid, peer.host)


class _Turn:
    """The context in which a thread has its turn: a generator would take as long as the rest of a small message."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class End:
    """One end of a queue.

    Attributes:
        is_cancelled: True once ``cancel`` or ``close`` has been called.

    Raises:
        ValueError: An environment variable of easydist is malformed.
    """

    def __init__(self) -> None:
        settings.check()
        self._lock = threading.RLock()  # an interrupt between acquiring it and recording so must not cause a deadlock
        self._turn = _Turn(self._lock)
        self.is_cancelled = False
        self._over = ""  # the reason why this end can no longer be used
        _all.add(self)

    def turn(self, until: float | None) -> _Turn:
        """Give one thread at a time its turn, which ends with the context that is returned.

        Raises:
            RuntimeError: This end has been closed, or belongs to another process.
            TimeoutError: Another thread has kept its turn until then.
        """
        self._check()  # in a forked child, nobody lets go of the lock
        if not self._lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            raise TimeoutError("another thread is using this end of the queue")
        if self._over:  # another thread may have closed this end meanwhile
            self._lock.release()
            self._check()
        return self._turn

    def _check(self) -> None:
        if self._over:
            raise _ending(self._over)

    def _until(
        self, look: Callable[[], bool], until: float | None, late: Callable[[], str], patient: bool = False
    ) -> None:
        """Wait until ``look`` returns True.

        Raises:
            RuntimeError: The wait was cancelled.
            TimeoutError: ``until`` has passed; ``late`` gives the text.
            Exception: The fault that ``_fault`` has returned.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE
        soon = began + _SOON if until is None else min(until, began + _SOON)
        # A message that is due comes in microseconds, and to be put to sleep and woken would take longer.
        for _ in range(_LOOKS):
            if look():
                return
            if time.monotonic() >= soon:
                break
            give_core()
        warn_at = began + _WARN_AFTER
        while not self._sleep(look, pause if until is None else max(0.0, min(pause, until - time.monotonic()))):
            pause = _PAUSE
            keepalive.end_unreachable()
            if self.is_cancelled:
                raise _ending("cancelled")
            if (fault := self._fault()) is not None:
                if look():  # it came at the last moment
                    return
                raise fault
            now = time.monotonic()
            if until is not None and now >= until:
                raise TimeoutError(late())
            if now >= warn_at and not patient:
                warn_at = now + _WARN_AFTER
                _log.warning("%s; waiting for %.0f s", late(), now - began)

    def _sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        """Sleep until woken or until the time is over, and return the result of ``look``."""
        raise NotImplementedError

    def _fault(self) -> Exception | None:
        """Return the reason why waiting is useless; None if there is none."""
        raise NotImplementedError

    def _wake(self) -> None:
        """End the sleep of another thread."""
        raise NotImplementedError

    def _release(self) -> None:
        """Release everything, and tell the other end."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Release everything without telling the other end."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the waits of this end, now and in future."""
        self.is_cancelled = True
        with suppress(AttributeError):  # another thread is closing this end, which has no waits then
            if not self._over:
                self._wake()

    def close(self) -> None:
        """Close this end. In a forked child, or a second time, do nothing."""
        if self._over:
            return
        self.cancel()  # first, because a thread that waits holds the lock
        with self._lock:
            if not self._over:
                self._over = _CLOSED
                self._release()

    def leave_to_parent(self) -> None:
        """Mark this end as the parent's, in a forked child."""
        if not self._over:
            self._over = _FOREIGN
            self._abandon()


def _ending(text: str) -> BaseException:
    """Return the error of an end that is closed; for a daemon thread at the process's exit, one without a traceback."""
    exits = threading.current_thread().daemon and not threading.main_thread().is_alive()
    return SystemExit(text) if exits else RuntimeError(text)


def lost(peer: Peer, who: str, how: str = "") -> PeerLostError:
    """Return the error that names an ended process."""
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
