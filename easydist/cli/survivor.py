"""The wrapper of each rank under ``easydist run --survivors``, which hides the rank's failure from torchrun.

torchrun ends all ranks when one fails. So this process succeeds whatever happens to the rank, and writes the rank's
exit status to a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from easydist.cli.rank import command_of
from easydist.liveness.texts import status_text


def run(folder: str, pipe: str, command: Sequence[str]) -> int:
    """Run a rank to its end, and write its exit status, negative for a signal, to a file named after the rank.

    Args:
        folder: The folder of the file.
        pipe: The named pipe that the launcher holds open.
        command: The command line of the rank.

    Returns:
        0; but if this process received a signal to end, the rank's exit status.
    """
    told: list[int] = []
    # torchrun signals this process's group: there, the rank would get each signal twice.
    rank = subprocess.Popen(command_of(pipe, command), start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    status = rank.wait()
    Path(folder, os.environ["RANK"]).write_text(str(status))
    if status and not told:
        text = f"rank {os.environ['RANK']}: {end_of(rank.pid, status)}; the others continue"
        print(text, file=sys.stderr, flush=True)
        _report(rank.pid, status)
    return shell_status(status) if told else 0


def _report(pid: int, status: int) -> None:
    """Let the other ranks know of the end of this rank, which they have never seen if it has made no call."""
    from easydist.errors import PeerLostError  # a rank that succeeds needs no torch here
    from easydist.groups.founding import report_end
    from easydist.liveness.texts import lost, process
    from easydist.state import ProcessState

    comms = ProcessState(cpu=True).communicators()
    if comms.founding is None:  # the only rank
        return
    host = socket.gethostname()
    what = f"{process(pid, host)} ended ({status_text(status)}) before its first call"
    error = PeerLostError(lost("easydist run", f"rank {comms.rank}", what))
    error.rank, error.pid, error.host, error.exit_status = comms.rank, pid, host, status
    report_end(comms.founding, comms.monitor, error)


def shell_status(status: int) -> int:
    """Return an exit status as a shell reports it."""
    return status if status >= 0 else 128 - status


def end_of(pid: int, status: int) -> str:
    """Return the words for the end of a process.

    Example:
        >>> end_of(7, -9), end_of(7, 3)
        ('process 7 was killed by SIGKILL', 'process 7 ended with exit status 3')
    """
    return f"process {pid} {'was' if status < 0 else 'ended with'} {status_text(status)}"


def statuses(folder: str) -> dict[int, int]:
    """Return the exit statuses of the ranks of this host, by rank."""
    told = {int(path.name): int(path.read_text()) for path in Path(folder).iterdir()}
    return dict(sorted(told.items()))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
