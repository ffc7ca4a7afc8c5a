"""Gloo over a private group. Ctrl-C ends its waits."""

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
    """Gloo over a private group.

    gloo waits in C++, where Python does not handle signals. At Ctrl-C the watchdog first tells the other ranks which
    rank was interrupted, then breaks the connections of the communicator for which the main thread waits.

    Args:
        group: The group.
        device: The CPU.
        ranks: The monitor of the other processes.

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
        ranks.disconnect, ranks.waits_in_memory = self.disconnect, False
        watchdog().add(self)

    def wait_alone(self, work: dist.Work, timeout: timedelta | None) -> None:
        """Wait for a message. Ctrl-C ends a wait of the main thread."""
        with signals_wake_watchdog() as is_heard:
            self.waits += is_heard
            try:
                work.wait() if timeout is None else work.wait(timeout)
            finally:
                self.waits += is_heard

    def interrupted(self, error: BaseException, wait: int) -> None:
        """Tell the other ranks, then break the connections. The watchdog calls this."""
        if wait == self.waits:
            self._ranks.interrupted(error)

    def publish(self) -> None:
        """Do nothing. The messages themselves carry all information for ranks of other hosts."""

    def check_wait(self, wait: int) -> None:
        """Do nothing. The connection to an ended rank breaks, and each wait has its time limit."""

    def failed(self, error: Exception, wait: int) -> None:
        """Do as ``interrupted``, because of an error of the watchdog's own."""
        if wait == self.waits:
            self._ranks.failed(error)
            self.disconnect()

    def post_exception(self, text: str) -> None:
        """Do nothing, for the reason given in ``check_wait``."""

    def close(self) -> None:
        """Close the connections."""
        self._ranks.detach()
        self.process_group = None
        del self._group
