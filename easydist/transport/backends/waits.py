"""Waits for gloo's messages, which end if the other rank can no longer come."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from easydist.base.gloo import can_end_waits, end_wait
from easydist.liveness import keepalive
from easydist.liveness.background import within
from easydist.liveness.monitor import Monitor
from easydist.liveness.watchdog import watchdog

FOREVER = timedelta(days=365)
TAG = 0xEA51
"""The tag that separates easydist's messages from the caller's own send and recv on the same group."""

NOBODYS_TAG = TAG + 2
"""The tag of receives that nobody answers."""

LOST = "the wait for a message was ended, because its connection had broken"
"""The text of the error after ``end_wait``."""

_LOOK_EVERY = 1.0
"""Seconds between two looks at the connection on which a large message is under way."""

_QUIET, _LITTLE = 2, 1 << 15
"""The looks after which nothing seems to arrive any more, and the bytes on one connection between two looks that count
as nothing, as those of a store."""


class Waiting(Protocol):
    """A backend over gloo, as far as a wait needs it."""

    monitor: Monitor | None
    gloo_waits: Waits

    @property
    def recv_alone(self) -> Callable[..., dist.Work]:
        """The method of its group that begins to receive."""

    def wait_alone(self, wait: Callable[[], object], peer: Callable[[], int], check: Callable[[], None] | None) -> None:
        """Wait for messages without a monitor."""


class GlooMessage(NamedTuple):
    """A message under way.

    Attributes:
        work: gloo's handle.
        peer: The other rank.
        is_recv: True if this rank receives it.
        is_large: True if it may be half sent when a rank dies.
    """

    work: dist.Work
    peer: int
    is_recv: bool
    is_large: bool


class GlooMessages:
    """The messages of an operation; waiting for them follows the rules of their backend.

    Args:
        backend: The backend.
        messages: The messages, in the order in which to wait for them.

    Attributes:
        at: The message for which a thread waits.
        is_large: True if any message is large.
    """

    __slots__ = ("_backend", "_lookout", "_messages", "at", "is_large")

    def __init__(self, backend: Waiting, messages: Sequence[GlooMessage]) -> None:
        self._backend, self._messages, self.at = backend, messages, messages[0]
        self._lookout: _Lookout | None = None
        self.is_large = any(message.is_large for message in messages)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end of all messages; the limit is that of each.

        Raises:
            EasydistError: The backend's monitor explains why one cannot end.
            RuntimeError: gloo's error, if the backend has no monitor; its ``peer`` is the other rank.
        """
        monitor, check = self._backend.monitor, self.look if self.is_large and not can_end_waits() else None
        if monitor is not None:
            if timeout is None and monitor.left is not None:
                timeout = FOREVER  # the watchdog ends the wait when the call's time is over
            return wait_watched(monitor, self._peer, functools.partial(self._wait_for_each, timeout), check)
        try:
            self._backend.wait_alone(functools.partial(self._wait_for_each, timeout), self._peer, check)
        except RuntimeError as error:
            error.peer = self.at.peer  # type: ignore[attr-defined]  # for a later explanation
            raise

    def _wait_for_each(self, timeout: timedelta | None) -> None:
        under_way = self._backend.gloo_waits.under_way
        under_way.add(self)
        try:
            for message in self._messages:
                self.at = message  # only now: the wait for one that has long arrived must not end
                if (message.work.wait() if timeout is None else message.work.wait(timeout)) is False:
                    raise RuntimeError(LOST)
        finally:
            under_way.discard(self)

    def _peer(self) -> int:
        return self.at.peer

    def look(self) -> None:
        """Look whether the message for which a thread waits can still end.

        Raises:
            EasydistError: The group's exchanges have ended.
            RuntimeError: Its connection broke.
        """
        if self._lookout is None or self._lookout.message is not self.at:
            self._lookout = _Lookout(self._backend, self.at)
        self._lookout()

    def is_completed(self) -> bool:
        """True if gloo knows that all have ended."""
        return all(message.work.is_completed() for message in self._messages)


class Waits:
    """The waits of all threads for messages over the connections of one group.

    Where gloo's waits can be ended, the watchdog looks at those for large messages; elsewhere a thread waits for them,
    and the caller looks, which takes 50 µs longer.

    Attributes:
        under_way: The operations for whose messages threads wait.
    """

    __slots__ = ("__weakref__", "under_way")

    def __init__(self) -> None:
        self.under_way = set[GlooMessages]()
        if can_end_waits():
            watchdog().look_regularly(self._look)

    def end(self) -> None:
        """End all waits. gloo itself ends those for messages on a connection that breaks, but for lost ones."""
        for messages in tuple(self.under_way):  # a copy, since other threads wait, too
            end_wait(messages.at.work)

    def _look(self) -> None:
        for messages in tuple(self.under_way):
            if (message := messages.at).is_large:
                try:
                    messages.look()
                except Exception:  # whatever it is, nobody else could end this wait
                    end_wait(message.work)


class _Lookout:
    """The check during the wait for a large message: gloo does not end a part of one when its connection breaks.

    A receive that nobody answers shows whether that has happened: gloo refuses to begin it. But it also sends a notice,
    and a process that has ended after all its data was sent, but before all has arrived, answers that with a reset,
    which drops what is under way. So while a message is received, this looks only if nothing arrives any more, and one
    of the connections of this process has ended, or a host counts as unreachable after such a time.
    """

    __slots__ = ("_backend", "_ended", "_has_failed", "_look_at", "_quiet", "_received", "message")

    def __init__(self, backend: Waiting, message: GlooMessage) -> None:
        self._backend, self.message = backend, message
        self._received: Mapping[keepalive.Ends, int] | None = None
        self._quiet, self._ended = 0, False
        self._has_failed, self._look_at = False, time.monotonic() + _LOOK_EVERY

    def __call__(self) -> None:
        if self._backend.monitor is not None:
            self._backend.monitor.raise_if_broken()
        if self._received is None and self.message.is_recv:
            self._received = keepalive.received()
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            keepalive.end_unreachable()
            if not self.message.is_recv or self._is_over():
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
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            self._backend.recv_alone([nothing], self.message.peer, NOBODYS_TAG)
        except RuntimeError:
            if self._has_failed:
                raise
            self._has_failed, self._look_at = True, 0.0  # the message may just have arrived


def wait_watched(
    monitor: Monitor, peer: Callable[[], int], wait: Callable[[], object], check: Callable[[], None] | None = None
) -> None:
    """Wait in C++ for messages; the watchdog breaks the connections if they cannot arrive.

    Args:
        monitor: The monitor of the group.
        peer: Returns the rank at the other end of the message for which ``wait`` waits now.
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
        wait() if check is None else within(FOREVER.total_seconds(), wait, check)
    except RuntimeError as error:
        raise monitor.explain(error, peer()) from error
    finally:
        if is_outer:
            monitor.end_wait()
    if monitor.broken is not None:  # the message came after this rank had given up
        monitor.raise_if_broken()
