"""The stacks of a process that hangs, if it has enabled them by the variable ``EASYDIST_STACK_SIGNAL``.

On the signal, faulthandler writes the stacks of all threads to a nameless file, even if the process is stuck in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import time

from easydist import settings

VARIABLE = "EASYDIST_STACK_SIGNAL"
_FILE = "stacks of easydist"
_OUTERMOST = " in <module>\n"
_log = logging.getLogger("easydist")


def agree() -> tuple[int, int]:
    """Write the stacks of this process on each signal that the variable names, such as ``SIGUSR2``.

    Returns:
        The signal and the file's descriptor; 0, 0 if the variable is not set, or does not name a usable signal.
    """
    name = settings.read(VARIABLE)
    if not name:
        return 0, 0
    try:
        number = signal.Signals[name]
        descriptor = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        faulthandler.register(number, file=descriptor)
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("%s=%s cannot be used to print stacks: %r. Use SIGUSR1 or SIGUSR2.", VARIABLE, name, error)
        return 0, 0
    return number, descriptor


def ask(pid: int, number: int, descriptor: int, seconds: float) -> str:
    """Return the stacks of a process that has enabled them, or the part written when the time is over.

    Args:
        pid: The process id.
        number: The signal.
        descriptor: The descriptor of the file.
        seconds: The time limit in seconds.
    """
    path, deadline = f"/proc/{pid}/fd/{descriptor}", time.monotonic() + seconds
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_FILE}"):
            return ""
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, number)
            found = b""
            while not found.endswith(_OUTERMOST.encode()) and time.monotonic() < deadline:
                time.sleep(0.01)
                found += file.read()
            return found.decode(errors="replace")
    return ""
