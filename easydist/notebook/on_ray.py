"""A Ray cluster as the place of a notebook's ranks, each of which is reached by way of the actor beside it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from easydist import settings
from easydist.cluster import failures
from easydist.cluster.facts import Facts, session_folder
from easydist.cluster.ranks import Ranks
from easydist.cluster.world import variables
from easydist.liveness.page import PageEntry
from easydist.notebook import kernel
from easydist.notebook.connection import DRAIN, LARGE
from easydist.notebook.keeper import Keeper, Told
from easydist.notebook.rank import RankHandle, Usage

_EVERY = 0.25
"""Seconds after which a rank without messages is told."""

_OLD = 1.0
"""Seconds after which nothing is known about a rank that has not been told."""

_ANSWERS = 5.0
"""Seconds within which a node answers."""

_LEAVE: tuple[Any, ...] = "", "", {"action": "leave"}, []
"""The request after which a kernel ends."""


class OnRay:
    """Ranks on Ray: the kernel of each runs in its actor, and beside it is another actor, its keeper.

    Args:
        ranks: The ranks, which this place borrows.
        is_owner: True to close them with the place.
    """

    def __init__(self, ranks: Ranks, is_owner: bool) -> None:
        self._ranks, self._is_owner, self._loan = ranks, is_owner, ranks.lend()
        self._actors = self._loan.actors
        self._keepers, self._calls = dict[int, Any](), dict[int, Any]()
        self._owns_gpus = self._actors.resources.get("GPU", 0) >= 1
        key = os.environ.get(settings.JOB_KEY)
        self._key = {} if key is None else {settings.JOB_KEY: key}

    @functools.cached_property
    def folder(self) -> Path:
        """A folder of this machine."""
        return Path(tempfile.mkdtemp(prefix="easydist-", dir=session_folder()))

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Replace those ranks that have begun, and return what all need to meet in the store of rank 0's keeper."""
        import ray

        new = [*ranks]
        if begun := [rank for rank in new if rank in self._keepers]:
            self._loan.replace(begun)
        for rank in new:
            self._end_keeper(rank)
            self._keepers[rank] = self._actors.beside(rank, Keeper, Keeper.CONCURRENCY)
        facts = [self._actors.facts[rank] for rank in range(self._ranks.size)]
        try:
            port = ray.get(self._keepers[0].serve.remote(), timeout=self._actors.limit)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"rank 0 cannot serve a store: {failures.end_of(facts[0], error)}") from error
        meeting = {"epoch": epoch, "address": (facts[0].address, port), "owns_gpus": self._owns_gpus}
        told = variables(facts, port, epoch)
        return {rank: {**meeting, "variables": own | self._key} for rank, own in told.items()}

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RemoteRank]:
        """Start the kernels of ranks, each for its meeting."""
        import ray

        facts, size = self._actors.facts, self._ranks.size
        asked = {rank: self._keepers[rank].begin.remote(facts[rank].pid) for rank in meetings}
        for rank, answer in asked.items():
            try:
                place = ray.get(answer, timeout=self._actors.limit)
            except ray.exceptions.RayError as error:
                text = f"rank {rank} did not start on {facts[rank].address}: {failures.end_of(facts[rank], error)}"
                raise RuntimeError(text) from error
            arguments = {"rank": rank, "size": size, "meeting": meetings[rank], **place}
            message = ray.cloudpickle.dumps((kernel.attend, (), arguments))
            call = self._calls[rank] = self._actors[rank].call.remote(message)
            yield RemoteRank(rank, self._keepers[rank], facts[rank], call)

    def _end_keeper(self, rank: int) -> None:
        import ray

        if (keeper := self._keepers.pop(rank, None)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(keeper)

    def close(self) -> None:
        """Give the ranks back, or close them, and remove the folder."""
        import ray

        if ray.is_initialized():  # otherwise these would start a cluster
            self._loan.give_back({call: rank for rank, call in self._calls.items()})
            for rank in [*self._keepers]:
                self._end_keeper(rank)
        if self._is_owner:
            self._ranks.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteRank(RankHandle):
    """A rank on a node of a Ray cluster.

    Args:
        rank: Its number.
        keeper: The actor beside it.
        facts: Its process.
        kernel: The call in which its kernel runs: a reference of an ``Outcome``.
    """

    settles = 1.5 * _OLD

    def __init__(self, rank: int, keeper: Any, facts: Facts, kernel: Any) -> None:
        super().__init__(rank, facts.pid, facts.host)
        self.node, self.gpus = facts.address, facts.gpus
        self._keeper, self._facts, self._kernel = keeper, facts, kernel
        self._messages: deque[dict[str, Any]] = deque()
        self._told: Told | None = None
        self._told_at = self._offset = 0.0
        self._loss = self._trace = ""
        self._status: int | None = None
        self._drops = self._is_closed = False
        self._ends = [*os.pipe()]
        self._wakes, self._wake = self._ends
        for end in self._ends:  # the pipe fills up if nobody waits
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._listen, name=f"easydist-rank-{rank}", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        """Hear the news of the rank until it is released, or its kernel has ended."""
        import ray

        try:
            while not self._is_closed and not self._hears_all():
                pass
            if self._is_closed:
                self._hear()  # which carries the last request
            else:
                outcome = ray.get(self._kernel)
                self._loss, self._trace = outcome.raised or "its kernel has ended", outcome.traceback
        except BaseException as error:  # Ray raises SystemExit in threads when its connection ends
            loss = "Ray has no connection to it any more"
            with contextlib.suppress(Exception):
                if ray.is_initialized():  # otherwise a question would start a cluster
                    loss, self._status = failures.end_of(self._facts, error), failures.status_of(error)
            self._loss = loss
        self._notify()

    def _hears_all(self) -> bool:
        """Hear the news; True if the kernel has ended, and nothing has come since."""
        if self._hear():
            return False
        return bool(self._ray().wait([self._kernel], timeout=0)[0]) and not self._hear()

    def _hear(self) -> bool:
        """Hear the news; True if there were messages."""
        import ray

        asked_at = time.monotonic()
        told: Told = ray.get(self._call("told", _EVERY, self._drops))
        self._offset = self._offset or time.monotonic() - told.now
        self._messages += told.messages
        self._told, self._told_at = told, asked_at
        if told.messages:
            self._notify()
        return bool(told.messages)

    def _ray(self) -> Any:
        """Return Ray's module.

        Raises:
            ConnectionError: Ray is not connected; a call would start a cluster of its own.
        """
        import ray

        if not ray.is_initialized():
            raise ConnectionError(f"Ray is not connected to the node of rank {self.rank} any more")
        return ray

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor beside the rank."""
        self._ray()
        return getattr(self._keeper, method).remote(*args)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or closed
            os.write(self._wake, b"!")

    def post(self, request: str, source: str, meta: dict[str, Any], buffers: Sequence[Any]) -> None:
        self._drops = False
        self._call("post", request, source, meta, [bytes(buffer) for buffer in buffers])

    def arrived(self, drops: bool) -> Iterator[dict[str, Any]]:
        self._drops = drops
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakes, 1 << 12)
        deadline = time.monotonic() + DRAIN
        while self._messages and time.monotonic() <= deadline:
            message = self._messages.popleft()
            if not (drops and message["msg_type"] == "stream" and len(message["content"]["text"]) > LARGE):
                yield message
        if self._messages:
            self._notify()

    @property
    def connections(self) -> Sequence[int]:
        return (self._wakes,)

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    def entries(self) -> list[PageEntry]:
        if self._told is None or time.monotonic() - self._told_at > _OLD:
            return []
        return [entry._replace(since=entry.since + self._offset) for entry in self._told.entries]

    def usage(self) -> Usage:
        return Usage() if self._told is None else self._told.usage

    @property
    def has_ended(self) -> bool:
        return bool(self._loss) or self._is_closed

    def status(self) -> int | None:
        return self._status

    def end(self) -> str:
        return "stopped" if self._is_closed else self._loss

    def interrupt(self) -> None:
        with contextlib.suppress(ConnectionError):
            if not self.has_ended:
                self._call("interrupt")

    def release(self) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(Exception):  # Ray has ended the rank with its own connection
            self.interrupt()
            self._call("post", *_LEAVE)
        self._is_closed = True

    def close(self) -> None:
        self.release()
        self._thread.join(_ANSWERS)
        if not self._thread.is_alive():  # which might write to what has the same number then
            for end in self._ends:
                os.close(end)
            self._ends = []

    def log(self) -> str:
        return self._trace
