"""Ranks that a notebook, or a plain program, starts and runs code on."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from easydist.base.arguments import integers
from easydist.base.wording import named, needs
from easydist.notebook.failures import RankLostError, fitting
from easydist.notebook.output import Notebook, Output, Sink

if TYPE_CHECKING:
    from easydist.notebook.cell import Cell, CellOutcome
    from easydist.notebook.rank import Place, RankHandle
    from easydist.notebook.status import Status

STARTS_WITHIN = 120.0
"""Seconds within which a rank must be ready; on an idle machine it takes 3."""

_ASK_EVERY = 0.1
"""Seconds between two requests to a rank whose messages have not arrived yet."""

_GIVES_UP_WITHIN = 2.0
"""Seconds within which ranks leave a failed meeting."""


class Cluster:
    """Ranks, each a fresh process with a default process group. ``start`` creates it.

    State stays in the ranks between calls. Cells can use the names ``rank``, ``world_size``, ``torch`` and
    ``easydist``.

    Args:
        size: The number of ranks.
        sink: The target of their output; None: the notebook, or the program's own output.
        place: The place where they run; None: this machine. It is closed with the cluster.

    Attributes:
        size: The number of ranks.

    Raises:
        ImportError: Packages of the extra ``notebook`` are missing.
        RuntimeError: A rank did not start; the text contains its output.
    """

    def __init__(self, size: int, sink: Sink | None = None, place: Place | None = None) -> None:
        demand_extra()
        from easydist.notebook.machine import Machine

        self.size = size
        self._sink = sink or Notebook()
        self._epoch, self._needs_meeting, self._last_cell, self._outputs = 0, False, 0, 0
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._place: Place = place or Machine(size)
        self._is_stopped = False
        self._ranks: list[RankHandle] = []
        self._cell: Cell | None = None
        atexit.register(self.stop)
        try:
            self._begin(range(size), self._meetings(range(size)))
        except BaseException:
            self.stop()
            raise

    @property
    def is_running(self) -> bool:
        """True until it is stopped."""
        return bool(self._ranks) and self._owner == os.getpid()

    def _meetings(self, ranks: Iterable[int]) -> Mapping[int, dict[str, Any]]:
        """Prepare the start of some ranks, and a meeting of all; if that fails, those that run are as before."""
        self._needs_meeting = True
        self._epoch += 1
        return self._place.meeting(ranks, self._epoch)

    def _begin(self, ranks: Collection[int], meetings: Mapping[int, dict[str, Any]]) -> None:
        """Start the processes of some ranks, and let all ranks meet."""
        self._ranks = [rank for rank in self._ranks if rank.rank not in ranks]
        known = list(self._ranks)
        try:
            for rank in known:
                rank.send("", {"action": "join", "meeting": meetings[rank.rank]})
            for rank in self._place.begin({number: meetings[number] for number in ranks}):
                self._ranks.append(rank)
                rank.send("", {})
            self._ranks.sort(key=lambda rank: rank.rank)
            self._await_all()
        except BaseException:
            self._give_up_meeting(known)
            raise
        self._needs_meeting = False

    def _give_up_meeting(self, ranks: Sequence[RankHandle]) -> None:
        """Stop these ranks from waiting for the others."""
        deadline = time.monotonic() + _GIVES_UP_WITHIN
        for rank in ranks:
            rank.interrupt()
        while time.monotonic() < deadline and any(rank.still_runs() and not rank.has_ended for rank in ranks):
            time.sleep(0.005)

    def _await_all(self) -> None:
        """Wait until each rank has answered on both connections, so that it is ready and has met the others."""
        deadline, ask_at = time.monotonic() + STARTS_WITHIN, 0.0
        while waiting := [rank for rank in self._ranks if rank.unanswered]:
            time.sleep(0.005)
            now = time.monotonic()
            for rank in waiting:
                for message in rank.messages():
                    _demand_success(rank, message)
                if rank.has_ended:
                    raise RuntimeError(
                        f"{named([rank.rank])} did not start: its process ended ({rank.end()}){_log(rank)}"
                    )
                if now > deadline:
                    raise RuntimeError(f"{named([rank.rank])} did not start within {STARTS_WITHIN:.0f} s{_log(rank)}")
            if now >= ask_at:
                ask_at = now + _ASK_EVERY
                for rank in waiting:
                    if rank.unanswered == {"status"}:  # published before this process had subscribed
                        rank.send("", {})

    # Running code.

    def execute(self, source: str, ranks: Collection[int] | None = None) -> None:
        """Run source on the ranks, as ``%%ranks`` does, and show their output as it comes.

        Args:
            source: The source of a cell. IPython's magics work.
            ranks: The ranks that run it; None: all. A collective that other ranks would have to join is an error.

        Raises:
            CellError: It raised on a rank, or ranks waited for one that does not come. Variables stay, and the next
                call works.
            RankLostError: The process of a rank has ended, now or before.
            KeyboardInterrupt: The user has interrupted it. Variables stay.
            RuntimeError: The cluster is stopped, or one of its ranks is busy.
        """
        self._last_cell = _cell_number() or self._last_cell + 1
        self._run(source, {"number": self._last_cell}, ranks)

    def _run(
        self,
        source: str,
        meta: dict[str, Any],
        ranks: Collection[int] | None = None,
        buffers: Sequence[Any] = (),
    ) -> dict[int, CellOutcome]:
        from easydist.notebook.cell import Cell

        with self._lock:
            if not (chosen := self._chosen(ranks)):
                return {}
            self._meet_again()
            self._outputs += 1
            file = self._place.folder / f"output-{self._outputs}.txt"
            output = Output([rank.rank for rank in chosen], self._sink, file)
            cell = self._cell = Cell(chosen, self._ranks, output, self._last_cell)  # first, for an interrupt meanwhile
            try:
                for rank in chosen:
                    rank.send(source, meta, buffers)
                return cell.run()
            except BaseException:
                self._needs_meeting = True
                raise
            finally:
                self._cell = None

    def _chosen(self, ranks: Collection[int] | None) -> list[RankHandle]:
        """Return the requested ranks, after making sure that all of them are alive and idle.

        Raises:
            TypeError: These are not integers.
            ValueError: There is no such rank.
            RuntimeError: They cannot run anything.
        """
        numbers = range(self.size) if ranks is None else integers("ranks", ranks, "a list of ranks")
        self._demand(numbers)
        chosen = [rank for rank in self._ranks if rank.rank in numbers]
        if lost := [rank.rank for rank in chosen if rank.has_ended]:
            text = (
                f"{named(lost)} {fitting(lost, 'is', 'are')} lost: cluster.restart(ranks={lost}) replaces "
                f"{fitting(lost, 'it', 'them')}"
            )
            raise RankLostError.of(text, next(rank for rank in chosen if rank.rank == lost[0]))
        if busy := [rank.rank for rank in chosen if rank.still_runs()]:  # they did not react to an interrupt
            raise RuntimeError(
                f"{named(busy)} {fitting(busy, 'is', 'are')} still busy; wait, or end {fitting(busy, 'it', 'them')}: "
                f"cluster.restart(ranks={busy})"
            )
        return chosen

    def _demand(self, ranks: Collection[int]) -> None:
        """Make sure that the cluster runs, and has these ranks.

        Raises:
            ValueError: There is no such rank.
            RuntimeError: It is stopped.
        """
        if not self.is_running:
            raise RuntimeError("the cluster is stopped; start another one: cluster = easydist.notebook.start()")
        if unknown := [rank for rank in ranks if not 0 <= rank < self.size]:
            raise ValueError(f"there is no {named(unknown)}: the cluster has {named(range(self.size))}")

    def _meet_again(self) -> None:
        """After a failure, let all ranks renew their groups together. This must wait until lost ranks are replaced."""
        if self._needs_meeting and not any(rank.has_ended or rank.unanswered for rank in self._ranks):
            self._begin([], self._meetings([]))

    def run(self, fn: Callable[..., Any], *args: Any, ranks: Collection[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on the ranks.

        Law: ``[fn(*args, **kwargs) on rank r for r in ranks]``.

        Args:
            fn: A function. It travels by cloudpickle, with the globals that it uses.
            *args: Its positional arguments.
            ranks: The ranks that call it; None: all.
            **kwargs: Its keyword arguments.

        Returns:
            The result of each rank, unpickled.

        Raises:
            TypeError: It cannot be pickled, or a result cannot be unpickled here; the text has the cause and a remedy.
            CellError: It raised on a rank, or ranks waited for one that does not come, as in ``execute``.
        """
        return self._call(fn, args, kwargs, ranks)

    def launch(self, fn: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
        """Call ``fn(*args)`` on all ranks, as a program launched there, whose result stays there.

        Args:
            fn: A function.
            args: Its arguments.
            environment: Variables to set during the call.
        """
        self._call(fn, args, {}, launch=environment)

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Collection[int] | None = None,
        launch: dict[str, str] | None = None,
    ) -> list[Any]:
        from easydist.notebook.values import pack_call, sources

        meta = {"action": "call", "launch": launch, "sources": sources(fn)}
        outcomes = self._run("", meta, ranks, [pack_call(fn, args, kwargs)])
        return _values(outcomes, f"the result of {getattr(fn, '__name__', fn)}", weights_only=False)

    def push(self, ranks: Collection[int] | None = None, **values: Any) -> None:
        """Send values to the ranks, under names that their cells can use.

        Args:
            ranks: The ranks that get them; None: all.
            **values: The values by name. Tensors and plain data travel as they are, everything else by cloudpickle.

        Raises:
            TypeError: A value cannot be pickled.
        """
        self.push_all(values, ranks)

    def push_all(self, values: Mapping[str, Any], ranks: Collection[int] | None = None) -> None:
        """Do as ``push``, for values of any names, ``ranks`` among them."""
        from easydist.notebook.values import pack

        packed = [pack(value, name) for name, value in values.items()]
        self._run("", {"action": "push", "names": list(values)}, ranks, packed)

    def pull(self, name: str, ranks: Collection[int] | None = None, *, weights_only: bool = True) -> list[Any]:
        """Get the value of a name from each rank.

        Args:
            name: The name in the ranks' cells.
            ranks: The ranks to ask; None: all.
            weights_only: Accept only tensors, arrays and plain data. Otherwise data from the ranks is unpickled, which
                can run any code.

        Returns:
            The ranks' values, with tensors on the CPU.

        Raises:
            CellError: A rank has no such name, or its value is not plain, or cannot be pickled.
            TypeError: A value cannot be unpickled here.
        """
        meta = {"action": "pull", "names": [name], "weights_only": weights_only}
        outcomes = self._run("", meta, ranks)
        return _values(outcomes, name, weights_only=weights_only)

    def status(self) -> Status:
        """Return each rank's process, state, operation, call site, awaited ranks and memory, without asking it."""
        from easydist.notebook.status import look

        for rank in self._ranks:
            if self._lock.acquire(blocking=False):
                rank.still_runs()
                self._lock.release()
        return look(self._ranks, {rank.rank for rank in self._ranks if rank.unanswered}, self._last_cell)

    # Interrupting, restarting and stopping.

    def interrupt(self) -> None:
        """Interrupt the cell that the ranks run, as the stop button does, from any thread."""
        if (cell := self._cell) is not None:
            cell.interrupt()
            return
        for rank in self._ranks:  # those that have not reacted to the last interrupt
            rank.interrupt()

    def restart(self, ranks: Collection[int] | None = None) -> None:
        """Start ranks again, in fresh processes. The others keep their variables, also if it fails or is interrupted.

        Args:
            ranks: The ranks to restart; None: all. If they do not start, they stay lost, and can be restarted.

        Raises:
            ValueError: There is no such rank.
            RuntimeError: The cluster is stopped, other ranks are lost or busy, or a rank did not start.
            CollectiveTimeout: The Ray cluster has no resources for them.
        """
        with self._lock:
            again = sorted(range(self.size) if ranks is None else set(integers("ranks", ranks, "a list of ranks")))
            self._demand(again)
            self._demand_the_others(again)
            ended = {rank.rank: rank for rank in self._ranks if rank.rank in again}
            for rank in ended.values():
                rank.close()
            meetings = self._meetings(again)  # if this fails, they stay lost
            try:
                self._begin(again, meetings)
            except BaseException:
                self._give_up_start(ended)
                raise

    def _give_up_start(self, ended: Mapping[int, RankHandle]) -> None:
        """Let these ranks stay lost, whether or not a process has begun in place of theirs."""
        for rank in self._ranks:
            if rank.rank in ended:
                rank.close()
                rank.unanswered = set()
        known = {rank.rank: rank for rank in self._ranks}
        self._ranks = [rank for _, rank in sorted({**ended, **known}.items())]

    def _demand_the_others(self, ranks: Sequence[int]) -> None:
        """Make sure that all other ranks can meet these.

        Raises:
            RuntimeError: Others are lost or busy.
        """
        others = [rank for rank in self._ranks if rank.rank not in ranks]
        if away := [rank.rank for rank in others if rank.has_ended or rank.still_runs()]:
            advice = f"cluster.restart(ranks={sorted({*ranks, *away})})"
            text = f"{named(away)} {fitting(away, 'is', 'are')} lost or busy, and could not join the others: {advice}"
            raise RuntimeError(text)

    def stop(self) -> None:
        """End all ranks and everything that they have started. At the end of the program this happens by itself."""
        if self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.release()
        for rank in ranks:
            rank.close()
        if not self._is_stopped:
            self._is_stopped = True
            self._place.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _repr_html_(self) -> str:
        return f"<b>{self.size} ranks</b>{self.status()._repr_html_()}" if self.is_running else "<b>stopped</b>"

    def __repr__(self) -> str:
        return f"<Cluster of {self.size} ranks>" if self.is_running else "<Cluster, stopped>"


def demand_extra() -> None:
    """Make sure that the packages of the extra ``notebook`` are here.

    Raises:
        ImportError: One is missing.
    """
    try:
        import cloudpickle  # noqa: F401
        import ipykernel  # noqa: F401
        import jupyter_client  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ImportError(needs("easydist.notebook", str(error.name), "notebook")) from error


def _cell_number() -> int | None:
    """Return the number of the running cell. IPython increments its counter before or after it, by its version."""
    import sys

    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return len(shell.user_ns.get("In", ())) - 1 if shell is not None else None


def _demand_success(rank: RankHandle, message: dict[str, Any]) -> None:
    """Check a message from a rank that starts, or meets the others.

    Raises:
        RuntimeError: It could not join the others.
    """
    if message["msg_type"] == "execute_reply" and message["content"]["status"] == "error":
        text = "\n".join(message["content"]["traceback"])
        raise RuntimeError(f"{named([rank.rank])} could not join the others:\n{text}")


def _values(outcomes: Mapping[int, CellOutcome], what: str, *, weights_only: bool) -> list[Any]:
    """Return the values that ranks have sent, by rank."""
    from easydist.notebook.values import received

    sent = {rank: outcome.values[0] for rank, outcome in sorted(outcomes.items())}
    return [received(value, f"{what} on rank {rank}", weights_only=weights_only) for rank, value in sent.items()]


def _log(rank: RankHandle) -> str:
    log = rank.log()
    return f"; its output:\n{log}" if log else ""
