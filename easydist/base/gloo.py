"""Two faults of gloo that easydist makes up for: its threads take cores from ranks, and it can lose a message.

A rank that sends or receives holds the lock of the connection. gloo's thread only tries that lock, and tries again
without a pause, until the rank has released it; if the thread has just taken the rank's core, that is when its time on
the core is over, some milliseconds later.

gloo writes a message once the other rank has announced that it receives. If the connection breaks at that very moment
(seen once in 150 times that a rank was stopped, and went on after the others had given it up), gloo forgets the
message: it closes the connection, but no wait for the message ever ends. Only its C++ has a method for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

_TASKS = Path("/proc/self/task")
_NAME = "gloo_tcp_loop"
"""The name that gloo gives to the thread that moves the messages of a group."""

_ABORT = "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv"
_TABLE = "_ZTVN4c10d16ProcessGroupGloo8SendWorkE"
"""The method, and the table of virtual methods by which an object of its class is recognised."""


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
    """End another thread's wait for a message that is being sent: ``work.wait()`` returns False there.

    It does nothing for any other work, or in a torch that is built in another way: there, a verb's wait for a lost
    message goes on, and a communicator's ends with the operation's time limit.
    """
    if (found := _method()) is not None:
        table, abort = found
        this = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
        if this and ctypes.c_void_p.from_address(this).value == table:
            abort(this)


@functools.cache
def _method() -> tuple[int, Callable[[int], None]] | None:
    """Return the address of the table, and the method; None if this torch does not have them."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE)) + 2 * ctypes.sizeof(ctypes.c_void_p)
        abort = getattr(library, _ABORT)
    except (OSError, ValueError, AttributeError):
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return table, abort
