"""Gloo over a group that nobody else knows, whose waits Ctrl-C ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from easydist.liveness.monitor import Monitor
from easydist.liveness.watchdog import signals_wake_watchdog, watchdog
from easydist.transport.backends.c10d import Gloo


class OwnGloo(Gloo):
    """Gloo over a group that nobody else knows.

    gloo waits in C++, where Python hears no signal: at Ctrl-C the watchdog breaks the connections of a communicator
    for which the main thread waits, after the other ranks have been told who was interrupted.

    Args:
        group: The group.
        device: The CPU.
        ranks: Knows the other processes.

    Attributes:
        process_group: The group; None once the backend is closed.
        waits: Odd while the main thread waits.
        was_interrupted: Set by the watchdog at Ctrl-C.
        sync_signals: Set by the watchdog; not used here.
    """

    def __init__(self, group: Any, device: torch.device, ranks: Monitor) -> None:
        super().__init__(group, device, "gloo")
        self.process_group = group
        self.waits, self.was_interrupted = 0, False
        self.sync_signals: Callable[[], None] = ranks.sync_signals
        self._ranks = ranks
        watchdog().add(self)

    def wait_alone(self, work: dist.Work, peer: int, timeout: timedelta | None) -> None:
        """Wait for a message; in the main thread, Ctrl-C is heard."""
        with signals_wake_watchdog() as is_heard:
            self.waits += is_heard
            try:
                super().wait_alone(work, peer, timeout)
            finally:
                self.waits += is_heard

    def interrupted(self, error: BaseException, wait: int) -> None:
        """Tell the other ranks, and break the connections; the watchdog calls this."""
        if wait == self.waits:
            self._ranks.interrupted(error)
            self.disconnect()

    def publish(self) -> None:
        """Nothing: what ranks of other hosts need to know travels with the messages."""

    def check_wait(self, wait: int) -> None:
        """Nothing: the connection to a rank that has ended breaks, and each wait has its time limit."""

    def post_exception(self, text: str) -> None:
        """Nothing: likewise."""

    def close(self) -> None:
        """Close the connections."""
        self.process_group = None
        del self._group
