"""One cell on several ranks: output as it comes, failing ranks, and the release of ranks that wait for nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq

from easydist.base.wording import named
from easydist.notebook.connection import VALUE
from easydist.notebook.failures import CellError, CellInterrupted, RankLostError, fitting
from easydist.notebook.output import Output
from easydist.notebook.rank import RankHandle
from easydist.notebook.status import Pages, Wait, where

_TICK = 50
"""Milliseconds between two checks of the processes."""

_AGAIN = 1.0
"""Seconds after which a rank that continues after an interrupt is interrupted again."""

_STOPS_WITHIN = 5.0
"""Seconds within which ranks must stop after the user has interrupted the cell."""

_OUTPUT_WITHIN = 10.0
"""Seconds within which what they have written before must have arrived; the end of the cell comes after it."""


@dataclass
class CellOutcome:
    """The outcome of the cell on one rank.

    Attributes:
        status: ``"ok"``, ``"error"``, ``"lost"`` or ``"busy"``.
        error: The content of its ``error`` message.
        wait: The wait from which it was released.
        values: The bytes that it has sent.
    """

    status: str = "busy"
    error: Mapping[str, Any] = field(default_factory=dict)
    wait: Wait | None = None
    values: list[Any] = field(default_factory=list)


class Cell:
    """A running cell.

    Args:
        ranks: The ranks that run it. They have received the source.
        everyone: All ranks of the cluster.
        output: The target of their output.
        number: The number of the cell, as the notebook counts.
    """

    def __init__(
        self, ranks: Sequence[RankHandle], everyone: Sequence[RankHandle], output: Output, number: int
    ) -> None:
        self._ranks = {rank.rank: rank for rank in ranks}
        self._everyone, self._output, self._number = list(everyone), output, number
        self.outcomes = {rank: CellOutcome() for rank in self._ranks}
        self._pages = Pages(everyone)
        self._failed: list[int] = []
        self._in_vain: dict[int, tuple[str, float]] = {}
        self._interrupted_at: dict[int, float] = {}
        # A rank is released if it waits for nothing at two looks.
        self._look_at, self._look_every = 0.0, max(rank.settles for rank in everyone)
        self._interrupted_by_user = threading.Event()
        self._stop_at = self._stop_latest = float("inf")

    @property
    def running(self) -> set[int]:
        """The ranks that have not ended it."""
        return {rank for rank, outcome in self.outcomes.items() if outcome.status == "busy"}

    def run(self) -> dict[int, CellOutcome]:
        """Wait until the cell has ended on every rank, and show output meanwhile.

        Raises:
            CellError: A rank raised, or was released.
            RankLostError: The process of a rank has ended.
            CellInterrupted: The user has interrupted it.
        """
        poller = zmq.Poller()
        for rank in self._ranks.values():
            for connection in rank.connections:
                poller.register(connection, zmq.POLLIN)
        with _on_ctrl_c(self.interrupt):
            while self.running and time.monotonic() < self._stop_at:
                poller.poll(_TICK)
                self._step()
        self._output.close()
        self._raise()
        return self.outcomes

    def interrupt(self) -> None:
        """Interrupt all ranks, including those about to begin, from any thread or a signal handler."""
        self._interrupted_by_user.set()

    def _step(self) -> None:
        for rank in self._ranks:
            self._hear(rank)
            self._heed_user()
        for rank in self.running:
            self._look_whether_alive(rank)
        now = time.monotonic()
        self._output.flush(now)
        if self._stop_at == float("inf") and len(self.running) < len(self._everyone) and now >= self._look_at:
            self._look_at = now + self._look_every
            self._release(now)

    def _heed_user(self) -> None:
        """Interrupt the ranks if the user has interrupted the cell."""
        if not self._interrupted_by_user.is_set():
            return
        now = time.monotonic()
        if self._stop_at == float("inf"):
            self._stop_at, self._stop_latest = now + _STOPS_WITHIN, now + _OUTPUT_WITHIN
        for rank in self.running:
            self._interrupt(rank, now)

    def _hear(self, rank: int) -> None:
        process, outcome = self._ranks[rank], self.outcomes[rank]
        if outcome.status == "busy" and process.has_messages:
            self._stop_at = min(max(self._stop_at, time.monotonic() + 10 * _TICK / 1000), self._stop_latest)
        for message in process.messages(drops=self._stop_at < float("inf")):
            kind, content = message["msg_type"], message["content"]
            for page in content.get("payload", ()):  # of a reply: the help for a name, as in "len?"
                if page["source"] == "page":
                    self._output.display(rank, "display_data", {"data": page["data"]})
            if kind == "stream":
                self._output.stream(rank, content["name"], content["text"])
            elif kind in ("display_data", "update_display_data", "clear_output"):
                self._output.display(rank, kind, content)
            elif message["parent_header"].get("msg_id") != process.request:
                continue
            elif kind == "execute_result":
                self._output.result(rank, content)
            elif kind == VALUE:
                outcome.values += message["buffers"]
            elif kind == "error" or (kind == "execute_reply" and content["status"] == "error" and not outcome.error):
                outcome.error = content
        if not process.unanswered and outcome.status == "busy":
            outcome.status = "error" if outcome.error else "ok"
            if outcome.error:
                self._failed.append(rank)

    def _look_whether_alive(self, rank: int) -> None:
        process = self._ranks[rank]
        if process.has_ended and not process.has_messages:  # all output that it has written before is read
            self.outcomes[rank].status = "lost"
            self._failed.append(rank)

    def _release(self, now: float) -> None:
        """Interrupt ranks that wait for nothing: the awaited rank has left the cell, never ran it, or is lost."""
        waits = {rank: wait for rank, wait in self._pages.waits(self.running).items() if wait.is_vain}
        for rank, wait in waits.items():
            if self._in_vain.get(rank) == (wait.operation, wait.since):
                self.outcomes[rank].wait = self.outcomes[rank].wait or wait
                self._interrupt(rank, now)
        self._in_vain = {rank: (wait.operation, wait.since) for rank, wait in waits.items()}

    def _interrupt(self, rank: int, now: float) -> None:
        if now - self._interrupted_at.get(rank, 0.0) >= _AGAIN:
            self._interrupted_at[rank] = now
            self._ranks[rank].interrupt()

    # The end of a cell.

    def _raise(self) -> None:
        if self._stop_at < float("inf"):
            raise CellInterrupted(self._interrupted())
        lost = [rank for rank in self._failed if self.outcomes[rank].status == "lost"]
        if self._failed and all(map(self._waited_for_the_lost, self._failed)):  # which do not run this cell
            lost = sorted(self._gone())
        if lost:
            raise self._lost(lost)
        raised = [rank for rank in self._failed if not self._is_released(rank)]
        if raised:
            raise self._error(raised)
        if released := self._released():
            raise CellError([], "", "", note=released)

    def _is_released(self, rank: int) -> bool:
        """True if the rank's error only says that it or another rank was released."""
        outcome = self.outcomes[rank]
        name = outcome.error.get("ename", "")
        if outcome.wait is not None and name in ("KeyboardInterrupt", "CancelledError"):
            return True
        return name in ("RemoteError", "PeerLostError") and any(o.wait is not None for o in self.outcomes.values())

    def _error(self, raised: Sequence[int]) -> CellError:
        """Return the first error, with all ranks that have raised the same."""
        first = self.outcomes[raised[0]].error
        same = [rank for rank in raised if _text(self.outcomes[rank].error) == _text(first)]
        others = [
            f"{named([rank])} raised {_text(self.outcomes[rank].error)}" for rank in sorted(set(raised) - set(same))
        ]
        note = "\n".join(filter(None, [*others, self._released()]))
        return CellError(sorted(same), first["ename"], first["evalue"], first["traceback"], note)

    def _released(self) -> str:
        """Describe the waits that were released, one line for each place."""
        places: dict[str, list[int]] = {}
        for rank, outcome in sorted(self.outcomes.items()):
            if (wait := outcome.wait) is not None:
                text = f"{self._reason(wait.missing)} in {wait.operation}, {where(wait.site, self._number)}"
                places.setdefault(text, []).append(rank)
        return "\n".join(
            f"{named(ranks)} waited for {text}, and {fitting(ranks, 'was', 'were')} released"
            for text, ranks in places.items()
        )

    def _reason(self, missing: Sequence[int]) -> str:
        outside = [rank for rank in missing if rank not in self._ranks]
        gone = [rank for rank in missing if rank in self._ranks]
        texts = [f"{named(gone)}"] if gone else []
        if outside:
            texts.append(f"{named(outside)}, which {fitting(outside, 'does', 'do')} not run this cell,")
        return " and ".join(texts) or "a rank of its group that does not come"

    def _lost(self, lost: Sequence[int]) -> RankLostError:
        everyone = {rank.rank: rank for rank in self._everyone}
        ended = [everyone[rank] for rank in lost]
        texts = [f"{named([one.rank])} is lost: process {one.pid} ended ({one.end()})" for one in ended]
        released = self._released()
        if heard := [rank for rank in self._failed if self._has_heard(rank)]:
            texts.append(f"{named(heard)} waited for {fitting(lost, 'it', 'them')}, and raised PeerLostError")
        advice = (
            f"cluster.restart(ranks={sorted(lost)}) replaces {fitting(lost, 'it', 'them')}, and the others keep "
            "their variables; cluster.restart() starts all ranks again."
        )
        if len(lost) == len(self._everyone):
            advice = "cluster.restart() starts them again."
        return RankLostError.of("\n".join([*texts, *filter(None, [released]), advice]), ended[0])

    def _has_heard(self, rank: int) -> bool:
        """True if a wait of the rank has ended by itself because another one is lost."""
        outcome = self.outcomes[rank]
        return outcome.wait is None and outcome.error.get("ename") == "PeerLostError"

    def _gone(self) -> set[int]:
        return {rank.rank for rank in self._everyone if rank.has_ended}

    def _waited_for_the_lost(self, rank: int) -> bool:
        """True if the rank only waited for one that is lost, and has heard of that, or was released."""
        wait, gone = self.outcomes[rank].wait, self._gone()
        return not gone.isdisjoint(wait.missing) if wait is not None else self._has_heard(rank) and bool(gone)

    def _interrupted(self) -> str:
        if busy := self.running:
            return (
                f"Interrupted, but {named(busy)} {fitting(busy, 'is', 'are')} still running code that ignores it. "
                f"Wait, or end {fitting(busy, 'it', 'them')}: cluster.restart(ranks={sorted(busy)})"
            )
        return "Interrupted on all ranks; their variables are kept."


def _text(error: Mapping[str, Any]) -> str:
    return f"{error.get('ename')}: {error.get('evalue')}"


@contextmanager
def _on_ctrl_c(interrupt: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call ``interrupt`` during the block, as it must not come between two steps."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
