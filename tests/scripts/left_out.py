"""Ranks that are stopped, late, interrupted or killed around ``recover``. Each prints its outcome as JSON.

python tests/scripts/left_out.py 3/shm/stop 4/0011/kill …

A case is the world size, the backend (shm; gloo; torch_shm, i.e. "easydist_shm"; comm_shm; comm_gloo; or for each rank
a digit that stands for its host), and the scenario. In the scenarios of ``ALONE`` the last rank calls ``recover`` or
dies, and nothing else tells the others, which wait for it.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forking import forked, side_by_side, statuses, store_of_an_agent
from launching import within
from leaks import holdings, once

import easydist
from easydist import EasydistError, ProcessState
from easydist.base import torch_groups
from easydist.comms import SignalCmpOp, TorchComm, making, new_comm
from easydist.comms.circles import Splits
from easydist.comms.operations import Operations
from easydist.groups import communicators, recovering
from easydist.groups.recovering import Recovery

SHORT, LONG = within(0.7), within(20)
ALONE = ("alone", "async", "verb", "torch", "messages", "chain", "chain_dies", "split", "split_dies")
INTERRUPTED = ("connect_interrupted", "split_interrupted")
ALONE += ("signal", "any_signal", "signal_dies", "connect_dies", "connect_dies_late", *INTERRUPTED)
IN_VAIN = ("attempt_dies", "attempt_interrupted", "meeting_interrupted")
"""The scenarios in which the last rank dies, or is interrupted, while the survivors are being connected."""
STOPS = ("stop", "store_stops", "reconnect_stops", "connect_stops")
"""The scenarios in which a rank is stopped until the others have given it up."""

QUICK = (*STOPS, "late", "early")
"""The scenarios in which the others wait in vain for one rank."""

OFTEN = 4
"""The further recoveries of the scenarios "often" and "rounds", in which all ranks recover at once."""

AGENT = ("often", "rounds", "early", "hosts", "stop", "late", "nobody", "interrupt", "group", *ALONE, *IN_VAIN)
"""The scenarios in which no rank serves the store."""


def kill_me(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Ranks:
    """The shared part of a case's ranks: pipes, for messages that must not go through easydist."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.size, self.backend, self.scenario = int(case.split("/")[0]), *case.split("/")[1:]
        self.done, self.began = os.pipe(), os.pipe()
        self.all_have_begun = multiprocessing.get_context("fork").Barrier(self.size)
        self.last = self.size - 1

    def tell(self, pipe: tuple[int, int], times: int = 1) -> None:
        os.write(pipe[1], b"." * times)

    def wait(self, pipe: tuple[int, int], times: int = 1) -> None:
        for _ in range(times):
            os.read(pipe[0], 1)

    def spoil(self, rank: int) -> None:
        """Misbehave on one rank after all have met."""
        victim = 0 if self.scenario in ("store_stops", "reconnect_stops", "store_lost") else self.last
        if rank != victim:
            return
        if self.scenario in STOPS:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.scenario in ("hosts", "store_lost", "again", "kill"):
            kill_me()
        elif self.scenario == "late":
            self.wait(self.done, self.last)

    def meet(self, rank: int) -> None:
        """Make the call that one rank misses."""
        if self.scenario in ("nobody", "interrupt", "connect_stops", "often", "rounds", *IN_VAIN):
            return
        if self.scenario in ALONE:
            self.meet_alone(rank)
            return
        if self.scenario == "early" and rank == self.last:
            dist.barrier(ProcessState().process_group)
            kill_me()
        if self.scenario == "early":
            dist.barrier(ProcessState().process_group)
        self.spoil(rank)
        try:
            easydist.gather(rank, timeout=SHORT)
        except EasydistError as error:
            self.met = type(error).__name__
        if self.scenario == "reconnect_stops" and rank:
            self.reconnect_in_vain(rank)

    def reconnect_in_vain(self, rank: int) -> None:
        """Begin to connect again on the last rank before the other one recovers."""
        if rank < self.last:
            self.wait(self.began)
            return
        reconnect = communicators.reconnect

        def begun(*args: Any) -> Any:
            self.tell(self.began)
            return reconnect(*args)

        communicators.reconnect = begun
        with contextlib.suppress(EasydistError):
            easydist.gather(rank, timeout=SHORT)

    def stop_before_connecting(self, rank: int) -> None:
        """Stop the rank that serves the store once all survivors are about to connect."""
        recovering.LIMIT = within(1)
        if rank == 0:
            connected = Recovery._connected

            def stopped(*args: Any) -> Any:
                os.kill(os.getpid(), signal.SIGSTOP)
                return connected(*args)

            Recovery._connected = stopped  # type: ignore[method-assign]

    def spoil_attempt(self, rank: int) -> None:
        """Fail on the last rank while the others wait to be connected with it; they hear of it before the limit."""
        recovering.LIMIT = within(1000)
        if self.scenario == "meeting_interrupted":
            self.spoil_meeting(rank)
            return
        connected = Recovery._connected

        def failing(*args: object) -> None:
            Recovery._connected = connected  # type: ignore[method-assign]
            self.wait(self.done, self.last)
            if self.scenario == "attempt_dies":
                kill_me()
            raise KeyboardInterrupt

        def waiting(*args: Any) -> Any:
            Recovery._connected = connected  # type: ignore[method-assign]
            self.tell(self.done)
            return connected(*args)

        Recovery._connected = failing if rank == self.last else waiting  # type: ignore[assignment, method-assign]
        if rank == self.last and self.scenario == "attempt_interrupted":
            with contextlib.suppress(KeyboardInterrupt):
                self.recover(rank)

    def spoil_meeting(self, rank: int) -> None:
        """Interrupt the last rank when the new group has been connected, before the ranks have met in it."""
        if rank < self.last:
            return
        set_timeout = torch_groups.set_timeout

        def interrupt(*args: object) -> None:
            torch_groups.set_timeout = set_timeout
            raise KeyboardInterrupt

        torch_groups.set_timeout = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            self.recover(rank)

    def meet_alone(self, rank: int) -> None:
        """Wait for the last rank, which calls ``recover`` instead, or dies."""
        if rank == self.last:
            if self.scenario in INTERRUPTED:
                self.interrupted_in_split()
                self.wait(self.done, self.last)  # else they could hear only that this rank recovers
            if "connect_dies" in self.scenario:  # after the ranks have met
                making._shm = making._gloo = kill_me  # type: ignore[assignment]
                self.wait_for_last()
            elif self.scenario.endswith("dies"):
                kill_me()
            return
        try:
            self.wait_for_last()
        except (EasydistError, RuntimeError) as error:
            self.met, self.heard = type(error).__name__, str(error)
        self.tell(self.done)

    def wait_for_last(self) -> None:
        if self.scenario == "torch":
            dist.all_reduce(torch.ones(1))
        else:
            easydist.gather(0)

    def again(self, rank: int) -> None:
        """Recover once more; in "rounds" a default group that easydist has made after the first one was destroyed."""
        if self.scenario == "rounds":
            dist.destroy_process_group()
            self.begin(rank)
        self.recover(rank)


class Verbs(Ranks):
    """The verbs over the default group."""

    def begin(self, rank: int) -> None:
        if self.backend == "torch_shm":
            from easydist.process_group import NAME

            dist.init_process_group(NAME, timeout=timedelta(seconds=LONG))
        if self.scenario != "early":
            easydist.gather(rank)

    def recover(self, rank: int) -> list[int]:
        patience = SHORT if self.scenario in QUICK else LONG
        if self.scenario == "interrupt" and rank == self.last:
            self.interrupted()
        elif self.scenario == "interrupt" and rank == 0:
            self.wait(self.done)  # else the others could agree while the last rank has left
        easydist.recover(timeout=patience)
        state = ProcessState()
        got: list[int] = easydist.gather(rank).tolist()
        assert (state.process_index, state.num_processes) == (got.index(rank), len(got))
        return got

    def interrupted(self) -> None:
        """Interrupt this rank while it waits for the others. It then calls again, and tells them."""
        look = Recovery._look

        def interrupt(*args: object) -> None:
            Recovery._look = again  # type: ignore[assignment, method-assign]
            raise KeyboardInterrupt

        def again(*args: Any) -> Any:
            Recovery._look = look  # type: ignore[method-assign]
            self.tell(self.done)
            return look(*args)

        Recovery._look = interrupt  # type: ignore[assignment, method-assign]
        try:
            easydist.recover(timeout=LONG)
        except KeyboardInterrupt:
            return
        raise AssertionError


class GivenGroup(Verbs):
    """A group other than the default one."""

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self.group = dist.new_group(list(range(1, self.size)))
        if rank:
            easydist.gather(rank, group=self.group)

    def meet(self, rank: int) -> None:
        if rank == self.last:
            kill_me()

    def recover(self, rank: int) -> list[int]:
        if rank == 0:
            return [ProcessState().num_processes]
        try:
            easydist.gather(rank, group=self.group)
        except EasydistError:
            group = easydist.recover(self.group, timeout=LONG)
        ranks: list[int] = easydist.gather(rank, group=group).tolist()
        assert dist.get_process_group_ranks(group) == ranks
        assert ProcessState().num_processes == self.size
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=1, group=group)
        assert tensor.tolist() == [1]
        return ranks


KEPT = collections.Counter({"thread easydist-call": 2, "thread easydist-progress": 1})
"""The most threads that a process keeps for later calls."""


def threads() -> collections.Counter[str]:
    """Return the numbers of this process's threads by name, without those that are kept.

    A thread of C++ has the name of the main thread until it runs for the first time and names itself.
    """
    deadline, main = time.monotonic() + LONG, Path("/proc/self/comm").read_text().strip()
    while (found := _threads())[f"thread {main}"] and time.monotonic() < deadline:
        pass
    return found - KEPT


def _threads() -> collections.Counter[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()} | {os.getpid(): "main"}
    found: collections.Counter[str] = collections.Counter()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            found[f"thread {names.get(int(path.parent.name)) or path.read_text().strip()}"] += 1
    return found


class Communicator(Ranks):
    """A communicator."""

    def begin(self, rank: int) -> None:
        kind = self.backend.removeprefix("comm_")
        self.comm: TorchComm = new_comm(kind, torch.device("cpu"), "main", timeout=timedelta(seconds=LONG))
        self.gather(rank)
        if "signal" in self.scenario:
            self.window, self.signals = self.comm.new_window(torch.zeros(1)), self.comm.window_allocate(8)
        elif self.scenario == "verb":
            easydist.gather(rank, group=self.comm)
        elif self.scenario == "messages":  # only the last rank and its neighbour know of them
            self.send_some(rank)

    def interrupted_in_split(self) -> None:
        """Interrupt this rank when all have come, or when the others have the communicator already."""
        watch, shm, gloo = Operations.watch, making._shm, making._gloo

        def interrupt(*args: object) -> None:
            Operations.watch, making._shm, making._gloo = watch, shm, gloo  # type: ignore[method-assign]
            raise KeyboardInterrupt

        if self.scenario == "connect_interrupted":
            making._shm = making._gloo = interrupt  # type: ignore[assignment]
        else:
            Operations.watch = interrupt  # type: ignore[assignment, method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            self.comm.split(range(self.size), "part")

    def notice_late(self) -> None:
        """Let this rank look again only when rank 0 has noticed the death, and recovers."""
        assert self.comm.monitor is not None
        peers, look = self.comm.monitor.peers, Splits.look

        def late(splits: Splits) -> None:
            while peers[self.last].has_ended() and not peers[0].register():
                pass
            look(splits)

        Splits.look = late  # type: ignore[method-assign]

    def send_some(self, rank: int) -> None:
        for _ in range(3):
            if rank == self.last:
                self.comm.send(torch.ones(1), rank - 1, async_op=False)
            elif rank == self.last - 1:
                self.comm.recv(torch.ones(1), self.last, async_op=False)

    def wait_for_last(self) -> None:
        if self.scenario == "connect_dies_late" and self.comm.get_rank() == 1:
            self.notice_late()
        if self.scenario in ("split", "split_dies") or "connect_dies" in self.scenario:
            self.comm.split(range(self.size), "part")
        elif self.scenario in INTERRUPTED:
            self.comm.split(range(self.size), "part").barrier(async_op=False)
        elif self.scenario in ("signal", "signal_dies"):
            self.window.wait_signal(self.last, async_op=False)
        elif self.scenario == "any_signal":
            self.signals.wait_signal(0, 1, SignalCmpOp.EQ, async_op=True).wait()
        elif self.scenario == "verb":
            easydist.gather(0, group=self.comm)
        elif "chain" in self.scenario:  # each rank waits for the next one only
            self.comm.recv(torch.ones(1), self.comm.get_rank() + 1, async_op=False)
        else:
            self.comm.barrier(async_op=self.scenario == "async").wait()

    def gather(self, rank: int) -> list[int]:
        rows = torch.empty(self.comm.get_size(), dtype=torch.int64)
        self.comm.all_gather_single(rows, torch.tensor([rank]), async_op=False)
        return rows.tolist()

    def meet(self, rank: int) -> None:
        if self.scenario in ALONE:
            self.meet_alone(rank)
            return
        if self.scenario in ("connect_stops", "often", *IN_VAIN):
            return
        self.spoil(rank)
        try:
            self.comm.barrier(async_op=False, timeout=timedelta(seconds=SHORT))
        except RuntimeError as error:
            self.met, self.heard = type(error).__name__, str(error)

    def recover(self, rank: int) -> list[int]:
        self.comm = self.comm.recover(timedelta(seconds=SHORT if self.scenario in QUICK else LONG))
        return self.gather(rank)


def work(ranks: Ranks, rank: int) -> None:
    row: dict[str, object] = {
        "case": ranks.case,
        "rank": rank,
        "type": None,
        "text": "",
        "members": None,
        "gone_on": None,
    }
    ranks.met = ranks.heard = ""
    ranks.begin(rank)
    ranks.all_have_begun.wait()  # else a slow rank could hear of what comes next in its first call
    ranks.meet(rank)
    if ranks.scenario == "connect_stops":
        ranks.stop_before_connecting(rank)
    if ranks.scenario in IN_VAIN:
        ranks.spoil_attempt(rank)
    try:
        row["members"] = ranks.recover(rank)
        if ranks.scenario in ("often", "rounds"):
            row |= {"more": more(lambda: ranks.again(rank))}
    except (EasydistError, RuntimeError) as error:
        row |= {"type": type(error).__name__, "text": str(error), "is_runtime": isinstance(error, RuntimeError)}
        row["gone_on"] = getattr(error, "members", None)
    if ranks.scenario in (*STOPS, "late"):
        ranks.tell(ranks.done)
    if row["gone_on"] is not None and "comm" not in ranks.case:
        try:
            easydist.gather(rank)
        except EasydistError as error:
            row["next"] = [type(error).__name__, str(error)]
    if row["type"] is None and ranks.scenario == "again":
        try:
            easydist.recover(dist.group.WORLD)
        except RuntimeError as error:
            row["again"] = str(error)
    os.write(1, (json.dumps(row | {"met": ranks.met, "heard": ranks.heard}) + "\n").encode())


def more(recover: Callable[[], object]) -> dict[str, int]:
    """Return the threads and descriptors that more recoveries leave behind; gloo ends its own in a thread."""
    before = holdings() + threads()
    for _ in range(OFTEN):
        recover()
    return dict(once(lambda: holdings() + threads() - before))


def ranks_of(case: str) -> Ranks:
    kind = case.split("/")[1]
    if case.endswith("/group"):
        return GivenGroup(case)
    return Communicator(case) if kind.startswith("comm") else Verbs(case)


def launch(case: str) -> None:
    """Fork the ranks and wait for them."""
    ranks = ranks_of(case)

    def live(rank: int) -> None:
        if ranks.backend.isdigit():
            os.environ["EASYDIST_HOST_ID"] = ranks.backend[rank]
        work(ranks, rank)

    with store_of_an_agent(ranks.scenario in AGENT) as variables:
        variables["EASYDIST_SHM"] = int(ranks.backend not in ("gloo", "comm_gloo"))
        pids = forked(ranks.size, live, whole=() if "shm" in ranks.backend else (0,), **variables)
        if ranks.scenario in STOPS:
            ranks.wait(ranks.done, ranks.last)
            os.kill(pids[ranks.last if ranks.scenario == "stop" else 0], signal.SIGCONT)
        row = {"case": case, "statuses": statuses(pids)}
    os.write(1, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    side_by_side(4, sys.argv[1:], launch)
