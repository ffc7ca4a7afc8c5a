"""This machine as the place of ranks: their folder, the pipe that ends them, and their processes.

A rank ends when the pipe that it inherits is closed, so it cannot outlive the notebook's kernel, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from easydist.liveness.page import PageEntry, PeerPage
from easydist.liveness.texts import status_text
from easydist.notebook.connection import Connection
from easydist.notebook.rank import RankHandle, Usage

_FROM_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_COMM_WORLD_", "PMI_", "SLURM_")
"""Variables from a launcher of the notebook. They do not describe a rank."""

_GRACE = 1.0
"""Seconds within which a killed process is collected."""

_LARGEST_LOG = 1 << 24
"""The bytes beyond which the log is emptied."""

_LONGEST_FOLDER = 70
"""The longest path of the folder in bytes. The paths of the sockets in it can have 107."""


class KernelProcess:
    """The process of a rank, as this machine shows it: the leader of its process group.

    Args:
        pid: Its pid.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._page: PeerPage | None = None

    def entries(self) -> list[PageEntry]:
        """Return its groups, and its state in each, as its page tells."""
        self._page = self._page or PeerPage.find(self._pid)
        return [] if self._page is None else self._page.entries()

    def usage(self) -> Usage:
        """Return what it uses."""
        import psutil

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._pid)
            return Usage(process.memory_info().rss, process.status() == psutil.STATUS_STOPPED)
        return Usage()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it, and to what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)


class RankProcess(RankHandle):
    """A rank whose process is a child of this one.

    Args:
        rank: Its number.
        meeting: The first meeting of the ranks that it joins: arguments of ``OwnRank.join``.
        machine: The place that starts it.
    """

    def __init__(self, rank: int, meeting: dict[str, Any], machine: Machine) -> None:
        place = machine.folder / f"{rank}-{meeting['epoch']}"
        self._log = place.with_suffix(".log")
        self._connection = Connection(place, machine.context)
        places: list[Any] = sys.path
        path = [place for place in places if isinstance(place, str)]  # Python itself ignores all others
        settings = {"rank": rank, "size": machine.size, "meeting": meeting, "folder": str(machine.folder), "path": path}
        settings |= {"connection_file": self._connection.file, "lifeline": machine.lifeline, "parent": os.getpid()}
        self._process = self._start(settings, machine.lifeline, _environment(rank, machine))
        self._seen = KernelProcess(self._process.pid)
        super().__init__(rank, self._process.pid, socket.gethostname())

    def _start(self, settings: dict[str, Any], lifeline: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "easydist.notebook.kernel", json.dumps(settings)]
        with self._log.open("ab") as log:  # to append, as ``_shorten_log`` empties it
            return subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lifeline],
                start_new_session=True,  # no Ctrl-C from the notebook; kill() ends its children, too
            )

    def post(self, request: str, source: str, meta: dict[str, Any], buffers: Sequence[Any]) -> None:
        self._connection.post(request, source, meta, buffers)

    def arrived(self, drops: bool) -> Iterator[dict[str, Any]]:
        self._shorten_log()
        return self._connection.arrived(drops)

    def _shorten_log(self) -> None:
        """Empty the log if it is large: programs that the rank runs may write to it, too."""
        with contextlib.suppress(OSError):
            if os.stat(self._log).st_size > _LARGEST_LOG:
                os.truncate(self._log, 0)

    @property
    def connections(self) -> Sequence[zmq.Socket[Any]]:
        return self._connection.sockets

    @property
    def has_messages(self) -> bool:
        return self._connection.has_messages

    def entries(self) -> list[PageEntry]:
        return self._seen.entries()

    def usage(self) -> Usage:
        return self._seen.usage()

    @property
    def has_ended(self) -> bool:
        return self.status() is not None

    def status(self) -> int | None:
        return self._process.poll()

    def end(self) -> str:
        return status_text(self.status())

    def interrupt(self) -> None:
        if not self.has_ended:
            self._seen.send_signal(signal.SIGINT)

    def release(self) -> None:
        self._seen.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._connection.close()

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-4000:].strip()
        return ""


class Machine:
    """This machine.

    Args:
        size: The number of ranks.

    Attributes:
        size: The number of ranks.
        folder: Their folder, which only this user can open.
        lifeline: The read end of a pipe. A rank ends when the other end is closed.
        port: A port for process groups that the user creates; the cluster itself needs none.
        context: The context of the sockets.
    """

    def __init__(self, size: int) -> None:
        self.lifeline, self._write_end = os.pipe()
        self.size, self.folder = size, private_folder(tempfile.gettempdir())
        self.port = _free_port()
        self.context: zmq.Context[Any] = zmq.Context()

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Return what each rank needs for a meeting: they meet in a file of their folder."""
        return {rank: {"epoch": epoch} for rank in range(self.size)}

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RankProcess]:
        """Start the processes of ranks, each for the meeting that it joins."""
        for rank, meeting in meetings.items():
            yield RankProcess(rank, meeting, self)

    def close(self) -> None:
        """End what is left of the ranks, and remove their folder."""
        os.close(self._write_end)
        os.close(self.lifeline)
        self.context.term()
        shutil.rmtree(self.folder, ignore_errors=True)


def private_folder(parent: str) -> Path:
    """Create a folder that only this user can open, with a path short enough for sockets."""
    is_short = len(os.fsencode(parent)) < _LONGEST_FOLDER
    return Path(tempfile.mkdtemp(prefix="easydist-", dir=parent if is_short else "/tmp"))


def _free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, machine: Machine) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_LAUNCHERS)}
    env.pop("MPLBACKEND", None)  # the notebook's own kernel has set it
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // machine.size)))
    env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    place = {"RANK": rank, "WORLD_SIZE": machine.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": machine.size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": machine.port, "PYDEVD_DISABLE_FILE_VALIDATION": 1}
    return env | {name: str(value) for name, value in (place | address).items()}
