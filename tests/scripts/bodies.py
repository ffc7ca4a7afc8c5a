"""Ranks that wait for others in the body of ``main_process_first``, longer than the group's limit.

python tests/scripts/bodies.py 3/shm/long 2/01/raises …

A case is the world size, the backend (shm; gloo; easydist_shm; or for each rank a digit that stands for its host), and
the scenario. The ranks are forked, so that torch is loaded once. The warning that comes after the group's limit ends
the body. Each rank prints its outcome as JSON.
"""

import importlib
import json
import logging
import os
import select
import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from forking import forked, side_by_side, statuses
from hearing import Heard
from launching import within

import easydist
from easydist import EasydistError, ProcessState
from easydist.liveness import monitor
from easydist.state import communicators

DEADLINE = within(20)
LIMIT = within(1.25)
monitor.WARN_AFTER = LIMIT + 1


def wait_for(pipe: tuple[int, int]) -> None:
    assert select.select([pipe[0]], [], [], DEADLINE)[0]


def body(scenario: str, pipe: tuple[int, int], other: dist.ProcessGroup) -> None:
    """Run the body of the rank that others wait for."""
    if scenario == "stops":
        communicators().monitor.publish()  # as the watchdog does from time to time, for ranks of other hosts
        os.kill(os.getpid(), signal.SIGSTOP)
    if scenario == "calls":
        easydist.gather(1, group=other)
    wait_for(pipe)
    if scenario == "raises":
        raise ValueError("no space")
    if scenario in ("killed", "local_killed"):
        os.kill(os.getpid(), signal.SIGKILL)


def work(case: str, rank: int, size: int, pipe: tuple[int, int]) -> None:
    _, backend, scenario = case.split("/")
    if backend.isdigit():
        os.environ["EASYDIST_HOST_ID"] = f"host {backend[rank]}"
        os.environ["LOCAL_RANK"] = str(backend[:rank].count(backend[rank]))
    os.environ["EASYDIST_SHM"] = str(int(backend != "gloo"))
    if backend == "easydist_shm":
        importlib.import_module("easydist.process_group")
    is_first = scenario in ("first", "local", "local_killed")
    limit = LIMIT if is_first else DEADLINE  # all may start at once, which takes longer than a body
    state = ProcessState(backend="easydist_shm" if backend == "easydist_shm" else None, timeout=limit)
    heard = Heard(pipe[1], 1)  # which ends the body of the others
    logging.getLogger("easydist").addHandler(heard)
    group = None if is_first else state.process_group
    communicators().monitor.timeout = LIMIT
    other = dist.new_group(timeout=timedelta(seconds=DEADLINE)) if scenario == "calls" else group
    slow = {"second": size - 1, "stops": size - 1, "local": 1, "local_killed": 1}.get(scenario, 0)
    first = state.local_main_process_first if scenario.startswith("local") else state.main_process_first
    row: dict[str, object] = {"case": case, "rank": rank, "type": None, "text": "", "ran": False}
    try:
        with first(timeout=0.7 if scenario == "timeout" else None):
            row["ran"] = True
            if rank == slow:
                body(scenario, pipe, other)
    except (EasydistError, ValueError) as error:
        row |= {"type": type(error).__name__, "text": str(error)}
    if scenario == "timeout":
        os.write(pipe[1], b"!")
    row["warnings"] = heard.texts
    if scenario in ("first", "local", "long", "second", "raises", "timeout"):
        row["next"] = easydist.gather(rank).tolist()
    os.write(1, (json.dumps(row) + "\n").encode())


def launch(case: str) -> None:
    size, _, scenario = case.split("/")
    pipe = os.pipe()
    pids = forked(int(size), lambda rank: work(case, rank, int(size), pipe))
    ended = statuses(pids[:-1])
    if scenario == "stops":
        os.kill(pids[-1], signal.SIGKILL)
    os.write(1, (json.dumps({"case": case, "statuses": ended + statuses(pids[-1:])}) + "\n").encode())


if __name__ == "__main__":
    side_by_side(6, sys.argv[1:], launch)
