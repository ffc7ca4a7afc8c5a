"""Ranks with a job key, with another one, or without. Each prints its outcome.

python tests/scripts/job_key.py 2/first/wrong 3/gloo/missing 2/first/forged …

A case is the world size, the way in which the ranks meet (first: in the first call; gloo, easydist_shm: in a group of
that backend), and the scenario. Each rank of ``first`` and ``gloo`` counts as a host of its own, so that all of them
use the store.
"""

import importlib
import json
import os
import sys
import time

import torch.distributed as dist
from forking import forked, side_by_side, statuses, store_of_an_agent
from launching import within

import easydist
from easydist import EasydistError
from easydist.liveness.report import Report
from easydist.state import communicators

LIMIT = within(20)
KEYS = "a" * 40, "b" * 40
LAST = {"right": KEYS[0], "wrong": KEYS[1], "missing": "", "only": KEYS[0], "forged": KEYS[0]}
"""The key of the last rank by scenario."""


def outcome(call):
    began = time.monotonic()
    try:
        found = call()
        return {"got": found}
    except EasydistError as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}


def meet(way):
    if way == "first":
        return
    if way == "easydist_shm":
        importlib.import_module("easydist.process_group")
    dist.init_process_group(way)


def gathered(rank):
    return easydist.gather(rank, timeout=LIMIT).tolist()


def forge(rank, size, pipe):
    """Let another program write a report into the store, which says that rank 0 has failed."""
    if rank != 1:
        os.write(pipe[1], b".")
    else:
        for _ in range(size - 1):
            os.read(pipe[0], 1)  # another rank has left the first call, in which it might read the log
        monitor = communicators().monitor
        report = Report("remote", "forged", 0, 0, monitor.phase, monitor.number + 1.0, time.monotonic())
        store = communicators()._store
        store.set(f"reports/log/{store.add('reports/log', 1)}", report.to_json())
        os.read(pipe[0], 1)
    found = outcome(lambda: gathered(rank))
    os.write(pipe[1], b".")
    return found


def launch(case):
    size, way, scenario = case.split("/")
    pipe = os.pipe()

    def work(rank):
        first = "" if scenario == "only" else KEYS[0]
        key = LAST[scenario] if rank == int(size) - 1 else first
        os.environ.pop("EASYDIST_JOB_KEY", None)
        if key:
            os.environ["EASYDIST_JOB_KEY"] = key
        if way != "easydist_shm":
            os.environ["EASYDIST_HOST_ID"] = str(rank)
        row = {"case": case, "rank": rank, "first": outcome(lambda: meet(way) or gathered(rank))}
        if scenario == "forged":
            row["forged"] = forge(rank, int(size), pipe)
            row["next"] = outcome(lambda: gathered(rank))
        os.write(1, (json.dumps(row) + "\n").encode())

    with store_of_an_agent(True) as variables:
        row = {"case": case, "statuses": statuses(forked(int(size), work, **variables))}
    os.write(1, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    side_by_side(4, sys.argv[1:], launch)
