"""Gloo's own threads, on hosts with fewer cores than threads that exchange messages."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "gloo_tcp_loop"
"""The name that gloo gives to the thread that moves the messages of a group."""


def run_after_ranks(ranks: int) -> None:
    """Let gloo's threads not interrupt the threads of ranks, if there are more of both than cores.

    A rank that sends or receives holds the lock of the connection. gloo's thread only tries that lock, and tries again
    without a pause, until the rank has released it; if the thread has just taken the rank's core, that is when its time
    on the core is over, some milliseconds later. As a batch thread it does not take the core of a running thread.

    Args:
        ranks: The ranks of this host that exchange messages with one another.
    """
    if ranks < 2 or not hasattr(os, "SCHED_BATCH") or 2 * ranks <= len(os.sched_getaffinity(0)):
        return
    for thread in _TASKS.iterdir() if _TASKS.exists() else ():
        with contextlib.suppress(OSError):  # it may have ended
            if (thread / "comm").read_text().strip() == _NAME:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
