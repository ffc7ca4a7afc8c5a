"""Waits for gloo's messages, which end if the other rank can no longer come."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from easydist.liveness import keepalive
from easydist.liveness.background import within
from easydist.liveness.monitor import Monitor

FOREVER = timedelta(days=365)
TAG = 0xEA51
"""The tag that separates easydist's messages from the caller's own send and recv on the same group."""

NOBODYS_TAG = TAG + 2
"""The tag of receives that nobody answers."""

LOST = "gloo has lost a message to a rank whose connection broke"
"""The text of the error after ``end_wait``."""

_LOOK_EVERY = 1.0
"""Seconds between two looks at the connection on which a large message is under way."""

_QUIET, _LITTLE = 2, 1 << 15
"""The looks after which nothing seems to arrive any more, and the bytes on one connection between two looks that count
as nothing, as those of a store."""


class Waiting(Protocol):
    """A backend over gloo, as far as a wait needs it."""

    monitor: Monitor | None
    sending: dict[dist.Work, int]

    @property
    def recv_alone(self) -> Callable[..., dist.Work]:
        """The method of its group that begins to receive."""

    def wait_alone(
        self, work: dist.Work, peer: int, timeout: timedelta | None, check: Callable[[], None] | None
    ) -> None:
        """Wait for a message without a monitor."""


class MessageWork:
    """A message under way; waiting for it follows the rules of its backend."""

    __slots__ = ("_backend", "_is_large", "_is_recv", "_peer", "_work")

    def __init__(self, backend: Waiting, work: dist.Work, peer: int, is_recv: bool, is_large: bool) -> None:
        self._backend, self._work, self._peer = backend, work, peer
        self._is_recv, self._is_large = is_recv, is_large

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end of the message.

        Raises:
            EasydistError: The backend's monitor explains why it cannot end.
            RuntimeError: gloo's error, if the backend has no monitor; its ``peer`` is the other rank.
        """
        if self._is_recv:
            return self._wait(timeout)
        self._backend.sending[self._work] = self._peer
        try:
            self._wait(timeout)
        finally:
            self._backend.sending.pop(self._work, None)

    def _wait(self, timeout: timedelta | None) -> None:
        monitor = self._backend.monitor
        check = _Lookout(self._backend, self._peer, self._is_recv, monitor) if self._is_large else None
        if monitor is not None:
            if timeout is None and monitor.left is not None:
                timeout = FOREVER  # the watchdog ends the wait when the call's time is over
            wait = self._work.wait if timeout is None else functools.partial(self._work.wait, timeout)
            return wait_watched(monitor, self._peer, wait, check)
        try:
            self._backend.wait_alone(self._work, self._peer, timeout, check)
        except RuntimeError as error:
            error.peer = self._peer  # type: ignore[attr-defined]  # for a later explanation
            raise

    def is_completed(self) -> bool:
        """True if gloo knows that it has ended."""
        return bool(self._work.is_completed())


class _Lookout:
    """The check during the wait for a large message: gloo does not end a part of one when its connection breaks.

    A receive that nobody answers shows whether that has happened: gloo refuses to begin it. But it also sends a notice,
    and a process that has ended after all its data was sent, but before all has arrived, answers that with a reset,
    which drops what is under way. So while a message is received, this looks only if nothing arrives any more, and one
    of the connections of this process has ended, or a host counts as unreachable after such a time.
    """

    __slots__ = ("_ended", "_has_failed", "_is_recv", "_look_at", "_monitor", "_peer", "_quiet", "_received", "_recv")

    def __init__(self, backend: Waiting, peer: int, is_recv: bool, monitor: Monitor | None) -> None:
        self._recv: Callable[..., dist.Work] = backend.recv_alone
        self._peer, self._is_recv, self._monitor = peer, is_recv, monitor
        self._received: Mapping[keepalive.Ends, int] | None = None
        self._quiet, self._ended = 0, False
        self._has_failed, self._look_at = False, time.monotonic() + _LOOK_EVERY

    def __call__(self) -> None:
        if self._monitor is not None:
            self._monitor.raise_if_broken()
        if self._received is None and self._is_recv:
            self._received = keepalive.received()
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            keepalive.end_unreachable()
            if not self._is_recv or self._is_over():
                self._look()

    def _is_over(self) -> bool:
        """True if nothing seems to arrive any more, and a connection has ended or a host counts as unreachable."""
        before, now = self._received or {}, keepalive.received()
        self._received, self._ended = now, self._ended or not before.keys() <= now.keys()
        moves = any(nbytes - before.get(ends, 0) > _LITTLE for ends, nbytes in now.items())
        self._quiet = 0 if moves else self._quiet + 1
        return self._quiet >= (_QUIET if self._ended else keepalive.AFTER / _LOOK_EVERY)

    def _look(self) -> None:
        try:
            self._recv([torch.empty(1, dtype=torch.uint8, device="cpu")], self._peer, NOBODYS_TAG)
        except RuntimeError:
            if self._has_failed:
                raise
            self._has_failed, self._look_at = True, 0.0  # the message may just have arrived


def wait_watched(
    monitor: Monitor, peer: int, wait: Callable[[], object], check: Callable[[], None] | None = None
) -> None:
    """Wait in C++ for a message; the watchdog breaks the connections if it cannot arrive.

    Args:
        monitor: The monitor of the group.
        peer: The other rank.
        wait: The function that waits.
        check: A function to call while a thread waits, which may raise; None to wait in this thread. If a rank dies in
            the middle of a large message, gloo waits on in spite of broken connections.

    Raises:
        EasydistError: The monitor explains why the connection broke, or this rank has given up meanwhile.
    """
    # A message between hosts is waited for inside of another such wait, perhaps in its thread: the watchdog sees one.
    if is_outer := monitor.waits % 2 == 0:
        monitor.begin_wait()
    try:
        if (wait() if check is None else within(FOREVER.total_seconds(), wait, check)) is False:
            raise RuntimeError(LOST)
    except RuntimeError as error:
        raise monitor.explain(error, peer) from error
    finally:
        if is_outer:
            monitor.end_wait()
    if monitor.broken is not None:  # the message came after this rank had given up
        monitor.raise_if_broken()
