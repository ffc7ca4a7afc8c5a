"""The authenticated messages to and from a kernel on this machine, over sockets that are files of a private folder."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.connect import write_connection_file
from jupyter_client.session import Session

META = "easydist"
"""The key of a request's metadata: ``number`` is the cell's; ``action`` and its arguments replace the source."""

ACT = "__easydist__()"
"""The source of a request for an action."""

VALUE = "easydist_value"
"""The type of a message that carries bytes from a rank."""

LARGE = 1 << 16
"""The bytes beyond which a piece of text is large."""

DRAIN = 0.05
"""Seconds for which the messages of one connection are read before something else has its turn."""

_PORTS = {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "hb_port": 4, "control_port": 5}


class Connection:
    """The connection to a kernel, which need not run yet.

    Args:
        place: The path of its sockets, without their numbers.
        context: The context of the sockets.

    Attributes:
        file: The file from which the kernel learns where to listen.
        sockets: The sockets of which messages arrive.
    """

    def __init__(self, place: Path, context: zmq.Context[Any]) -> None:
        self._session = Session(key=secrets.token_hex(32).encode())
        self.file, _ = write_connection_file(
            f"{place}.json", transport="ipc", ip=str(place), key=self._session.key, **_PORTS
        )
        self._shell, iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        iopub.rcvhwm = 0  # nothing is dropped
        iopub.subscribe(b"")
        self.sockets = iopub, self._shell
        for socket, port in zip(self.sockets, ("iopub_port", "shell_port"), strict=True):
            socket.linger = 0
            socket.connect(f"ipc://{place}-{_PORTS[port]}")

    def post(self, request: str, source: str, meta: dict[str, Any], buffers: Sequence[Any]) -> None:
        """Send a request: arguments of ``RankHandle.post``."""
        code, silent = ACT if "action" in meta else source, not source
        content = {"code": code, "silent": silent, "store_history": False, "allow_stdin": False, "stop_on_error": False}
        header = self._session.msg_header("execute_request") | {"msg_id": request}
        message = self._session.msg("execute_request", content, header=header, metadata={META: meta})
        self._session.send(self._shell, message, buffers=list(buffers))

    def arrived(self, drops: bool) -> Iterator[dict[str, Any]]:
        """Yield messages that have arrived, as ``RankHandle.messages`` does."""
        for socket in self.sockets:
            deadline = time.monotonic() + DRAIN
            while time.monotonic() <= deadline and (frames := _received(socket)):
                if not (drops and frames[0].startswith(b"stream.") and sum(map(len, frames)) > LARGE):
                    yield self._session.deserialize(self._session.feed_identities(frames)[1])

    @property
    def has_messages(self) -> bool:
        """True if there are messages that have not been read."""
        return any(socket.get(zmq.EVENTS) & zmq.POLLIN for socket in self.sockets)

    def close(self) -> None:
        """Close the sockets."""
        for socket in self.sockets:
            socket.close()


def _received(socket: zmq.Socket[Any]) -> list[bytes]:
    """Return the parts of the next message; none if there is no message."""
    try:
        frames: list[bytes] = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return []
    return frames
