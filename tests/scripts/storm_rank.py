"""One rank of a storm: it plays the program, tells the controller what happens, and recovers after each error."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from launching import within
from leaks import holdings, once, shared_files
from left_out import threads
from storm_plan import STEPS, Fault, Plan
from storm_steps import PLAY, Place, TorchCalls, Wrong

import easydist
from easydist import CollectiveTimeout, EasydistError, LeftOutError, ProcessState
from easydist.comms import TorchComm, new_comm, objcol
from easydist.groups import recovering
from easydist.liveness.watchdog import watchdog
from easydist.parallel import GroupCoordinator
from easydist.process_group import NAME

LONG, SHORT = within(20), within(1)
"""Seconds that ranks wait for one another: in all plans, and in those in which a rank is stopped."""


POOL = Counter({"thread easydist-work": 4})
"""The threads that wait for operations; a process keeps them."""

REHEARSED = 4
"""Steps before the storm."""

_numbers = itertools.count()


@functools.cache
def _store(rank: int) -> dist.Store:
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not has_agent
    )


class Group:
    """The ranks that are left, as verbs find them: the default group."""

    def __init__(self, kind: str, seconds: float) -> None:
        self._kind, self._seconds, limit = kind, seconds, timedelta(seconds=seconds)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if kind == "torch_shm":
            store = dist.PrefixStore(f"{next(_numbers)}", _store(rank))
            dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=limit)
        else:
            ProcessState(timeout=limit)

        is_plain = kind in ("shm", "gloo")
        self._coordinator = GroupCoordinator([[*range(size)]], rank, "gloo", False) if is_plain else None

    def place(self, members: tuple[int, ...], rank: int) -> Place:
        calls = TorchCalls(ProcessState().process_group) if self._kind == "torch_shm" else None
        return Place(members, members.index(rank), None, calls, self._coordinator)

    def gather(self, row: list[int], timeout: float | None) -> list[list[int]]:
        """Return the rows of all ranks, within this time; None is the group's."""
        rows: list[list[int]] = easydist.gather_object([row], timeout=timeout)
        return rows

    def recover(self) -> None:
        self._end_coordinator()
        easydist.recover(timeout=self._seconds)

    def _end_coordinator(self) -> None:
        """Tell those who wait in the coordinator that this rank does not come."""
        if self._coordinator is not None:
            coordinator, self._coordinator = self._coordinator, None
            coordinator.destroy()

    def end(self) -> None:
        self._end_coordinator()
        dist.destroy_process_group()


class Communicator(Group):
    """The ranks that are left, in a communicator."""

    def __init__(self, kind: str, seconds: float) -> None:
        self._seconds, limit = seconds, timedelta(seconds=LONG)
        self.comm: TorchComm = new_comm(kind.removeprefix("comm_"), torch.device("cpu"), "main", timeout=limit)
        self.comm.set_timeout(timedelta(seconds=seconds))

    def place(self, members: tuple[int, ...], rank: int) -> Place:
        return Place(members, members.index(rank), self.comm, self.comm)

    def gather(self, row: list[int], timeout: float | None) -> list[list[int]]:
        rows: list[Any] = [None] * self.comm.get_size()
        objcol.all_gather_object(self.comm, rows, row, None if timeout is None else timedelta(seconds=timeout))
        return rows

    def recover(self) -> None:
        self.comm = self.comm.recover(timedelta(seconds=self._seconds))

    def end(self) -> None:
        self.comm.finalize()


class Signals:
    """The faults of one rank: it counts the functions that it calls, and tells the controller when one is due.

    Signals other than SIGKILL strike it only inside of calls of the library, where a program expects an error.

    Args:
        faults: Its faults, in their order.
        rank: The rank, which ``tell`` needs.
    """

    def __init__(self, faults: list[Fault], rank: Rank) -> None:
        self._faults, self._rank, self._was_interrupted = faults, rank, False
        self._left = -1

    @contextlib.contextmanager
    def inside(self, place: str, number: int) -> Iterator[None]:
        """Be inside of the library."""
        if self._left < 0 and self._faults and self._faults[0].place == place and self._faults[0].number <= number:
            self._left = self._faults[0].calls
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._was_interrupted:
                self._was_interrupted = False
                raise KeyboardInterrupt
            if self._left >= 0:
                sys.setprofile(self._count)
            yield
        finally:
            sys.setprofile(None)
            self._leave()

    def _leave(self) -> None:
        try:
            signal.signal(signal.SIGINT, self.note)
        except KeyboardInterrupt:  # it came at the last moment
            signal.signal(signal.SIGINT, self.note)
            raise

    def note(self, *args: object) -> None:
        self._was_interrupted = True

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        self._left -= 1
        if self._left < 0:
            sys.setprofile(None)
            fault = self._faults.pop(0)
            where = f"{frame.f_code.co_qualname} in {os.path.basename(frame.f_code.co_filename)}"
            self._rank.tell("due", fault=fault._asdict(), where=where)
            if fault.waits:
                self._rank.wait_for_the_signal()


def has_ended(error: RuntimeError) -> bool:
    """True for the error of a further operation after the first one has failed."""
    return bool(re.search("can no longer complete|is broken", str(error)))


class Rank:
    """One rank.

    Args:
        plan: The plan.
        rank: Its rank in the world.
        events: The pipe to the controller.
        go: The pipe from the controller.
    """

    def __init__(self, plan: Plan, rank: int, events: int, go: int) -> None:
        self.plan, self.rank, self.events, self.go = plan, rank, events, go
        self.next, self.recoveries, self.members = 0, 0, tuple(range(plan.size))
        self.group: Group | None = None
        self.place: Place | None = None
        self.signals = Signals(plan.of(rank), self)

    def tell(self, event: str, **what: object) -> None:
        row = {"event": event, "rank": self.rank, "at": time.monotonic(), "group": self.recoveries, "step": self.next}
        os.write(self.events, (json.dumps(row | what) + "\n").encode())

    def wait_for_the_signal(self) -> None:
        """Wait until the controller has sent a signal: one that came just before a wait in C does not end that wait."""
        while not select.select([self.go], [], [], 0.05)[0]:
            pass
        os.read(self.go, 1)

    def play(self) -> int:
        """Play the program, and return the exit status."""
        try:
            before = self._rehearsed()
            self._begin()
            while self.next <= STEPS:
                self._go_on()
            self._end(before)
        except LeftOutError as error:
            self._tell_error("left out", error, gone_on=error.members)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            self.tell("wrong" if isinstance(error, Wrong) else "unexpected", text=text[-3500:])
            return 1
        return 0

    def _rehearsed(self) -> Counter[str]:
        """Play some steps in a group of their own, and return what this process has after its end."""
        signal.signal(signal.SIGINT, self.signals.note)
        self._make(LONG)
        for number in range(REHEARSED):
            step = self.plan.step(-number)
            PLAY[step.kind](self.place, step)
        self._meet(LONG)  # operations that nobody waits for end, too, before the first rank leaves
        self._end_group()
        watchdog()  # a process keeps it
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # the first one opens a pipe for good
        return holdings() + threads()

    def _begin(self) -> None:
        self.tell("rehearsed")
        os.read(self.go, 1)  # a rank may have needed seconds to end the group before, more than some plans allow
        self._make(SHORT if self.plan.has_stop else LONG)
        if self.plan.has_stop:
            recovering.LIMIT = within(1)
        self.tell("files", files=sorted(shared_files()))

    def _make(self, seconds: float) -> None:
        kind = Communicator if self.plan.kind.startswith("comm") else Group
        self.group, self.next = kind(self.plan.kind, seconds), 0
        self._meet(LONG)

    def _end_group(self) -> None:
        self.group.end()
        self.place = self.group = None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        easydist.gather(ProcessState().process_index)  # easydist releases destroyed groups when it meets another one
        dist.destroy_process_group()

    def _meet(self, timeout: float | None = None) -> None:
        """Learn the members, and with which step all continue."""
        rows = self.group.gather([self.rank, self.next], timeout)
        self.members, self.next = tuple(rank for rank, _ in rows), max(number for _, number in rows) + 1
        self.place = self.group.place(self.members, self.rank)
        self.tell("met", members=self.members, next=self.next)

    def _go_on(self) -> None:
        """Play one step, and recover if it fails."""
        try:
            with self.signals.inside("step", self.next):
                if self.place is None:
                    self._meet()
                    return
                step = self.plan.step(self.next)
                PLAY[step.kind](self.place, step)
            self.next += 1
        except (EasydistError, RuntimeError, KeyboardInterrupt) as error:
            if not isinstance(error, EasydistError | KeyboardInterrupt) and not has_ended(error):
                raise
            self._tell_error("error", error)
            if self.plan.goes_on and isinstance(error, EasydistError) and not error.is_final and self.place:
                self.next += 1
            else:
                self._recover()

    def _recover(self) -> None:
        self.place = None
        while True:
            try:
                with self.signals.inside("recovery", self.recoveries + 1):
                    self.group.recover()
                self.recoveries += 1
                self.tell("recovered")
                return
            except (CollectiveTimeout, KeyboardInterrupt) as error:  # it may be called again
                self._tell_error("error", error)

    def _tell_error(self, event: str, error: BaseException, **what: object) -> None:
        self.tell(
            event,
            type=type(error).__name__,
            text=str(error)[:1500],
            named=getattr(error, "rank", None),
            missing=getattr(error, "missing", ()),
            members=getattr(error, "members_of_part", None),
            status=getattr(error, "exit_status", None),
            kind="recovery" if self.place is None else self.plan.step(self.next).kind,
            **what,
        )

    def _end(self, before: Counter[str]) -> None:
        self.tell("files", files=sorted(shared_files()))
        self._end_group()
        self.tell("end", left=dict(once(lambda: holdings() + threads() - before - POOL)))
