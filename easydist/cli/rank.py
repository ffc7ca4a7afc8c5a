"""The first program of each rank that a launcher starts: it ties the rank to the launcher, then becomes the rank.

On Linux the kernel kills the rank when the launcher has ended. Elsewhere, and if the rank is a shell script or another
program that may start the real one, a child of the rank waits for the end of a named pipe that the launcher holds open,
and kills the rank's process group.

It runs as a file, without site packages, so that it takes little time, and before anything of the user does.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
_ALIVE = 1.0
"""Seconds between two checks by the child whether the rank still runs."""


def command_of(pipe: str, command: Sequence[str]) -> list[str]:
    """Return the command line of a rank that ends with this process, whose main thread must start it.

    On Linux a rank that another thread has started ends with that thread.

    Args:
        pipe: The named pipe that this process holds open.
        command: The command line of the rank.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), pipe, *command]


def become(launcher: int, pipe: str, command: Sequence[str]) -> NoReturn:
    """Tie this process to the launcher, and execute a command in its place.

    Args:
        launcher: The pid of the launcher.
        pipe: The named pipe that it holds open.
        command: The command line.
    """
    if sys.platform == "linux":
        _end_with_parent()
    if sys.platform != "linux" or os.path.realpath(command[0]) != os.path.realpath(sys.executable):
        _watch(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.getpid())
    if os.getppid() != launcher:  # it has ended before this process was tied to it
        os._exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.exit(f"easydist run: cannot run {command[0]}: {error.strerror}")


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent has ended: the thread that started it, the launcher's main."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(pipe: int, rank: int) -> None:
    """Start a child that kills the rank's process group at the end of the pipe."""
    if os.fork():
        os.close(pipe)
        return
    os.closerange(0, pipe)
    os.closerange(pipe + 1, pipe + 100)
    is_there = True
    while is_there:
        is_there = os.getppid() == rank  # asked before the pipe: the rank may have been killed with the launcher
        # Its pipe may end a moment after that: the launcher's threads do not end at once.
        if select.select([pipe], [], [], _ALIVE)[0]:
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
