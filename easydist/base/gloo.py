"""Two faults of gloo that easydist makes up for: its threads take cores from ranks, and some of its waits never end.

A rank that sends or receives holds the lock of the connection. gloo's thread only tries that lock, and tries again
without a pause, until the rank has released it; if the thread has just taken the rank's core, that is when its time on
the core is over, some milliseconds later.

gloo writes a message once the other rank has announced that it receives. If the connection breaks at that very moment
(seen once in 150 times that a rank was stopped, and went on after the others had given it up), gloo forgets the
message: it closes the connection, but no wait for the message ever ends. Nor does a wait for a large message that had
arrived in part. Only gloo's C++ has methods for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

_TASKS = Path("/proc/self/task")
_NAME = "gloo_tcp_loop"
"""The name that gloo gives to the thread that moves the messages of a group."""

_CLASSES = "N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork"
"""The classes of messages. Each has a method ``abort``, and a table of virtual methods by which it is recognised."""


def run_after_ranks(ranks: int) -> None:
    """Let gloo's threads not interrupt the threads of ranks, if there are more of both than cores.

    As a batch thread, gloo's does not take the core of a running thread.

    Args:
        ranks: The ranks of this host that exchange messages with one another.
    """
    if ranks < 2 or not hasattr(os, "SCHED_BATCH") or 2 * ranks <= len(os.sched_getaffinity(0)):
        return
    for thread in _TASKS.iterdir() if _TASKS.exists() else ():
        with contextlib.suppress(OSError):  # it may have ended
            if (thread / "comm").read_text().strip() == _NAME:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def end_wait(work: dist.Work) -> None:
    """End another thread's wait for a message: ``work.wait()`` returns False there.

    It does nothing for any other work, or if ``can_end_waits`` is False.
    """
    this = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value if can_end_waits() else None
    if this and (abort := _methods().get(ctypes.c_void_p.from_address(this).value or 0)) is not None:
        abort(this)


def can_end_waits() -> bool:
    """True if ``end_wait`` can end waits; False in a torch that is built in another way.

    There, a verb's wait for a lost message goes on, and a communicator's ends with the operation's time limit.
    """
    return len(_methods()) == len(_CLASSES)


@functools.cache
def _methods() -> Mapping[int, Callable[[int], None]]:
    """Return the methods by the addresses of the tables; none if this torch lacks one."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return dict(_method(library, name) for name in _CLASSES)
    except (OSError, ValueError, AttributeError):
        return {}


def _method(library: ctypes.CDLL, name: str) -> tuple[int, Callable[[int], None]]:
    # The first two entries of a table are about its class; objects point behind them.
    table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E")) + 2 * ctypes.sizeof(ctypes.c_void_p)
    abort = getattr(library, f"_Z{name}5abortEv")
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return table, abort
