"""Ranks that play a random program while a controller kills, stops, continues and interrupts them.

python tests/scripts/storm.py 4/comm_shm/17 … prints for each case what was wrong, and the seconds from each death until
all survivors had recovered, as JSON; if something was wrong, also everything that the ranks told the controller. The
same case gives the same program and the same signals, at the same functions of the ranks as long as these do not
depend on time: a rank that waits calls some of them again and again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
from typing import Any

from forking import forked, side_by_side, store_of_an_agent
from launching import within
from leaks import holders, once, shared_files
from storm_checks import check, seconds_of_recoveries
from storm_plan import Plan
from storm_rank import Rank

Event = dict[str, Any]

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "INT": signal.SIGINT}
DONE = ("end", "left out", "wrong", "unexpected", "killed")


class Controller:
    """Sends the signals of a plan to its ranks.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.log = plan, list[Event]()
        self.events, self._writer = os.pipe()
        self._go = [os.pipe() for _ in range(plan.size)]
        self.statuses: dict[int, int] = {}
        self.files: set[str] = set()
        self._stopped: dict[int, tuple[str, int]] = {}
        self._pids: list[int] = []

    def rank(self, rank: int) -> None:
        """Be a rank."""
        os.close(self.events)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        status = Rank(self.plan, rank, self._writer, self._go[rank][0]).play()
        if status:
            os._exit(status)

    def run(self, pids: list[int]) -> None:
        """Read what the ranks tell until all have ended."""
        self._pids = pids
        os.close(self._writer)
        deadline, rest = time.monotonic() + within(60), b""
        while True:
            ready, _, _ = select.select([self.events], [], [], 1)
            if not ready and time.monotonic() > deadline:
                self._give_up()
                deadline += within(60)
            if not ready:
                continue
            data = os.read(self.events, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        self._collect(*range(self.plan.size))
        for descriptor in (self.events, *(end for pipe in self._go for end in pipe)):
            os.close(descriptor)

    def _hear(self, event: Event) -> None:
        self.log.append(event)
        self.files |= set(event.pop("files", ()))
        if event["event"] == "rehearsed" and sum(one["event"] == "rehearsed" for one in self.log) == self.plan.size:
            for _, go in self._go:
                os.write(go, b".")
        if event["event"] == "due":
            self._strike(event["rank"], event["fault"])
        for rank, (until, since) in [*self._stopped.items()]:
            if self._may_continue(rank, until, self.log[since:]):
                self._say("continued", rank)
                del self._stopped[rank]
                os.kill(self._pids[rank], signal.SIGCONT)

    def _strike(self, rank: int, fault: Event) -> None:
        if fault["signal"] == "KILL":
            self.files |= shared_files(self._pids[rank])
        self._say({"KILL": "killed", "STOP": "stopped", "INT": "interrupted"}[fault["signal"]], rank)
        os.kill(self._pids[rank], SIGNALS[fault["signal"]])
        if fault["signal"] == "KILL":
            self._stopped.pop(rank, None)
        if fault["signal"] == "STOP":
            self._stopped[rank] = fault["until"], len(self.log)
            if fault["waits"]:
                os.write(self._go[rank][1], b".")
        elif fault["signal"] == "KILL" and self.plan.reaps:
            self._collect(rank)

    def _may_continue(self, rank: int, until: str, since: list[Event]) -> bool:
        gone = {event["rank"] for event in self.log if event["event"] in DONE}
        others = {*range(self.plan.size)} - gone - {*self._stopped} - {rank}
        kinds = {"raised": ("error",), "recovered": ("recovered",), "moved": ("met", "error", "recovered")}[until]
        heard = {event["rank"] for event in since if event["event"] in kinds} & others
        return heard == others or (until == "moved" and bool(heard))

    def _say(self, event: str, rank: int) -> None:
        self.log.append({"event": event, "rank": rank, "at": time.monotonic()})

    def _collect(self, *ranks: int) -> None:
        for rank in ranks:
            if rank not in self.statuses:
                self.statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(self._pids[rank], 0)[1])

    def _give_up(self) -> None:
        """Let the ranks write where they are, and end them."""
        self._say("hangs", -1)
        for sent in (signal.SIGCONT, signal.SIGUSR1, signal.SIGKILL):
            for rank, pid in enumerate(self._pids):
                if rank not in self.statuses:
                    os.kill(pid, sent)
            time.sleep(1)


def launch(case: str) -> None:
    """Fork the ranks, be their controller, and judge what they have told."""
    plan = Plan(case)
    with store_of_an_agent(plan.has_agent) as variables:
        known = shared_files()
        controller = Controller(plan)
        variables["EASYDIST_SHM"] = int(plan.shares)
        controller.run(forked(plan.size, controller.rank, whole=(0,) if "gloo" in plan.kind else (), **variables))
    left = once(lambda: holders(controller.files - known))
    wrong = check(plan, controller.log, controller.statuses) + [f"left: {one}" for one in left]
    row = {"case": case, "wrong": wrong, "recovered": seconds_of_recoveries(plan, controller.log)}
    if wrong or max(row["recovered"], default=0) > 2:
        row["log"] = controller.log
    os.write(1, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    side_by_side(3, sys.argv[1:], launch)
