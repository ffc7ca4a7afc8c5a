"""One rank: its process, and the authenticated messages to and from it.

The process is an IPython kernel. Its sockets are files in a folder that only this user can open. It ends when the pipe
that it inherits is closed, so it cannot outlive the notebook's kernel, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.connect import write_connection_file
from jupyter_client.session import Session

from easydist.liveness.page import PageEntry, PeerPage
from easydist.liveness.texts import status_text
from easydist.notebook.rank import RankHandle, Usage

META = "easydist"
"""The key of a request's metadata: ``number`` is the cell's; ``action`` and its arguments replace the source."""

ACT = "__easydist__()"
"""The source of a request for an action."""

VALUE = "easydist_value"
"""The type of a message that carries bytes from a rank."""

_PORTS = {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "hb_port": 4, "control_port": 5}
_FROM_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_COMM_WORLD_", "PMI_", "SLURM_")
"""Variables from a launcher of the notebook. They do not describe a rank."""

_GRACE = 1.0
"""Seconds within which a killed process is collected."""

LARGE = 1 << 16
"""The bytes beyond which a piece of text is large."""

_LARGEST_LOG = 1 << 24
"""The bytes beyond which the log is emptied."""

DRAIN = 0.05
"""Seconds for which the messages of one connection are read before something else has its turn."""


@dataclass(frozen=True)
class Home:
    """The resources that all ranks of a cluster share.

    Attributes:
        size: The number of ranks.
        folder: Their folder, which only this user can open.
        lifeline: The read end of a pipe. A rank ends when the other end is closed.
        port: A port for process groups that the user creates; the cluster itself needs none.
        context: The context of the sockets.
    """

    size: int
    folder: Path
    lifeline: int
    port: int
    context: zmq.Context[Any]


class RankProcess(RankHandle):
    """A rank whose process is on this machine.

    Args:
        rank: Its number.
        meeting: The first meeting of the ranks that it joins: arguments of ``OwnRank.join``.
        home: The cluster's resources.
        variables: Variables in place of those of ranks on one machine; an empty one is removed.
    """

    def __init__(self, rank: int, meeting: dict[str, Any], home: Home, variables: Mapping[str, str]) -> None:
        place = home.folder / f"{rank}-{meeting['epoch']}"
        self._log = place.with_suffix(".log")
        self._session = Session(key=secrets.token_hex(32).encode())
        file, _ = write_connection_file(
            f"{place}.json", transport="ipc", ip=str(place), key=self._session.key, **_PORTS
        )
        places: list[Any] = sys.path
        path = [place for place in places if isinstance(place, str)]  # Python itself ignores all others
        settings = {"rank": rank, "size": home.size, "meeting": meeting, "folder": str(home.folder), "path": path}
        settings |= {"connection_file": file, "lifeline": home.lifeline, "parent": os.getpid()}
        self._process = self._start(settings, home.lifeline, _environment(rank, home, variables))
        super().__init__(rank, self._process.pid, socket.gethostname())
        self._page: PeerPage | None = None
        self.shell, self.iopub = home.context.socket(zmq.DEALER), home.context.socket(zmq.SUB)
        self.iopub.rcvhwm = 0  # nothing is dropped
        self.iopub.subscribe(b"")
        for connection, number in ((self.shell, "shell_port"), (self.iopub, "iopub_port")):
            connection.linger = 0
            connection.connect(f"ipc://{place}-{_PORTS[number]}")

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
        code, silent = ACT if "action" in meta else source, not source
        content = {"code": code, "silent": silent, "store_history": False, "allow_stdin": False, "stop_on_error": False}
        header = self._session.msg_header("execute_request") | {"msg_id": request}
        message = self._session.msg("execute_request", content, header=header, metadata={META: meta})
        self._session.send(self.shell, message, buffers=list(buffers))

    def arrived(self, drops: bool) -> Iterator[dict[str, Any]]:
        self._shorten_log()
        for connection in self.connections:
            deadline = time.monotonic() + DRAIN
            while time.monotonic() <= deadline and (frames := _received(connection)):
                if not (drops and frames[0].startswith(b"stream.") and sum(map(len, frames)) > LARGE):
                    yield self._session.deserialize(self._session.feed_identities(frames)[1])

    def _shorten_log(self) -> None:
        """Empty the log if it is large: programs that the rank runs may write to it, too."""
        with contextlib.suppress(OSError):
            if os.stat(self._log).st_size > _LARGEST_LOG:
                os.truncate(self._log, 0)

    @property
    def connections(self) -> Sequence[zmq.Socket[Any]]:
        return self.iopub, self.shell

    @property
    def has_messages(self) -> bool:
        return any(connection.get(zmq.EVENTS) & zmq.POLLIN for connection in self.connections)

    def entries(self) -> list[PageEntry]:
        self._page = self._page or PeerPage.find(self.pid)
        return [] if self._page is None else self._page.entries()

    def usage(self) -> Usage:
        import psutil

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return Usage(process.memory_info().rss, process.status() == psutil.STATUS_STOPPED)
        return Usage()

    @property
    def has_ended(self) -> bool:
        return self.status() is not None

    def status(self) -> int | None:
        return self._process.poll()

    def end(self) -> str:
        return status_text(self.status())

    def interrupt(self) -> None:
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self.shell.close()
        self.iopub.close()

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-4000:].strip()
        return ""


def _received(connection: zmq.Socket[Any]) -> list[bytes]:
    """Return the parts of the next message; none if there is no message."""
    try:
        frames: list[bytes] = connection.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return []
    return frames


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, home: Home, variables: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_LAUNCHERS)}
    env.pop("MPLBACKEND", None)  # the notebook's own kernel has set it
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // home.size)))
    env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    place = {"RANK": rank, "WORLD_SIZE": home.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": home.size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": home.port, "PYDEVD_DISABLE_FILE_VALIDATION": 1}
    env |= {name: str(value) for name, value in (place | address).items()}
    return {name: value for name, value in {**env, **variables}.items() if variables.get(name) != ""}
