"""A rank as its cluster sees it: requests to its process, messages from it, and what can be seen of it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from easydist.liveness.page import PageEntry

END = frozenset({"execute_reply", "status"})
"""The kinds of the two messages with which a rank ends a request; the status is that it is idle."""


class Usage(NamedTuple):
    """The memory and the state of a process.

    Attributes:
        memory: Resident bytes.
        is_stopped: True if it is stopped by a signal.
    """

    memory: int = 0
    is_stopped: bool = False


class RankHandle(ABC):
    """A rank of a cluster.

    Args:
        rank: Its number.
        pid: The pid of its process, there.
        host: The host of its process.

    Attributes:
        rank: Its number.
        pid: The pid of its process, there.
        host: The host of its process.
        node: The address of that host's node in a cluster of machines; empty if it is this machine.
        gpus: The GPUs that it was given there, as text.
        request: The identifier of the last request.
        unanswered: The kinds of messages that still have to come before the request has ended.
        settles: Seconds after which another look at ``entries`` tells something later.
    """

    node = gpus = ""
    settles = 0.1

    def __init__(self, rank: int, pid: int, host: str) -> None:
        self.rank, self.pid, self.host = rank, pid, host
        self.request, self.unanswered = "", set[str]()

    def send(self, source: str, meta: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Let the rank execute source.

        Args:
            source: The source; empty for an action, or to see whether the rank answers.
            meta: Further information for its kernel.
            buffers: Bytes for it.
        """
        self.request, self.unanswered = secrets.token_hex(16), {*END}
        try:
            self.post(self.request, source, meta, buffers)
        except BaseException:
            self.unanswered = set()
            raise

    def still_runs(self) -> bool:
        """True if the last request has not ended. Messages that have arrived from it since are dropped."""
        for _ in self.messages(drops=True) if self.unanswered else ():
            pass
        return bool(self.unanswered)

    def messages(self, drops: bool = False) -> Iterator[dict[str, Any]]:
        """Yield messages that have arrived from the rank, for a short time: it may write faster than they are read.

        Args:
            drops: True to drop large pieces of text, so that the messages behind them come soon.
        """
        for message in self.arrived(drops):
            self._note_end(message)
            yield message

    def _note_end(self, message: dict[str, Any]) -> None:
        """Note the two messages of ``END``. They come on two connections, in any order."""
        is_end = message["msg_type"] != "status" or message["content"]["execution_state"] == "idle"
        if is_end and message["parent_header"].get("msg_id") == self.request:
            self.unanswered.discard(message["msg_type"])

    @abstractmethod
    def post(self, request: str, source: str, meta: dict[str, Any], buffers: Sequence[Any]) -> None:
        """Send a request of this identifier, with arguments as for ``send``."""

    @abstractmethod
    def arrived(self, drops: bool) -> Iterator[dict[str, Any]]:
        """Yield messages as ``messages`` does."""

    @property
    @abstractmethod
    def connections(self) -> Sequence[Any]:
        """Sockets and file descriptors that a ZeroMQ poller finds readable when messages have arrived."""

    @property
    @abstractmethod
    def has_messages(self) -> bool:
        """True if there are messages that have not been read."""

    @abstractmethod
    def entries(self) -> list[PageEntry]:
        """Return its groups, and its state in each, as its page tells; none if they cannot be seen now."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return what its process uses."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """True if its process has ended."""

    @abstractmethod
    def status(self) -> int | None:
        """Return the exit status of its process; None while it runs, and if it is not known."""

    @abstractmethod
    def end(self) -> str:
        """Return how its process has ended."""

    @abstractmethod
    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running cell, and interrupt the programs that it runs, as Jupyter does.

        Outside of cells this does nothing to the rank itself.
        """

    @abstractmethod
    def release(self) -> None:
        """End the process and everything that it has started; if it belongs to its place, only leave it."""

    @abstractmethod
    def close(self) -> None:
        """Release the process, and wait until that is done."""

    @abstractmethod
    def log(self) -> str:
        """Return the end of the text that the process wrote before it could write to the notebook."""


class Place(Protocol):
    """The place of a cluster's ranks: this machine, or the nodes of another cluster."""

    @property
    def folder(self) -> Path:
        """A folder of this machine that only this user can open, for files until ``close``."""

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Prepare the start of some ranks, and a meeting of all.

        Args:
            ranks: The ranks that will be started, in place of those that they have been.
            epoch: The number of the meeting.

        Returns:
            What each rank needs for it: arguments of ``OwnRank.join``.
        """

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RankHandle]:
        """Start the processes of ranks, each for the meeting that it joins."""

    def close(self) -> None:
        """Give everything back, once the ranks are closed."""
