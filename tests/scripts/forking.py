"""Functions for scripts that fork their ranks, so that torch is loaded only once."""

import atexit
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def statuses(pids: Sequence[int]) -> list[int]:
    """Return the exit statuses of these children, negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def serve_a_store() -> tuple[int, int]:
    """Start a process that serves a store, as the agent of torchrun does, and return its pid and port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(writer, f"{store.port}".encode())
        signal.pause()
    return pid, int(os.read(reader, 16))


def end() -> None:
    """End a rank with all that runs at exit, but leave its objects: to destroy them takes a quarter of a second.

    For the many ranks that share memory; those over gloo end as any program does, since its threads are C++.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def side_by_side(count: int, cases: Sequence[str], launch: Callable[[str], bool]) -> None:
    """Launch ``count`` cases at a time, since they mostly wait. ``launch`` returns True in a rank."""
    gc.collect()
    gc.freeze()  # objects loaded before the fork are then not scanned and copied, which saves half a second a rank
    pids = []
    for first in range(count):
        pid = os.fork()
        if pid == 0:
            any(launch(case) for case in cases[first::count])  # ends in a rank, and continues in its parent
            return
        pids.append(pid)
    sys.exit(any(statuses(pids)))
