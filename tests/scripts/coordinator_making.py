"""A rank that dies before a world is recovered, or while a coordinator is being made.

python tests/scripts/coordinator_making.py shm/lost/0 gloo/dies/2 …

A case is the backend (shm, gloo), the time of the death, and the rank of three that is killed. After "lost" the
survivors recover and make coordinators of their new world; in "dies" the rank is killed as torch connects the ranks.
"""

import json
import multiprocessing
import os
import signal
import sys

import torch
import torch.distributed as dist
from forking import forked, side_by_side, statuses
from launching import within

import easydist
from easydist import EasydistError
from easydist.parallel import GroupCoordinator

SIZE = 3
LIMIT = within(60)


def kill_me(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def refusal():
    """Return the text of the error for a rank that does not exist."""
    try:
        easydist.send_object(1, 9)
    except ValueError as error:
        return str(error)


def lost(rank, victim):
    """Return the survivors' results in two coordinators."""
    if rank == victim:
        kill_me()
    try:
        easydist.gather(rank)
    except EasydistError:
        easydist.recover()
    state = easydist.ProcessState()
    both = GroupCoordinator([[0, 1]], state.local_process_index, "gloo", False)
    alone = GroupCoordinator([[0], [1]], state.local_process_index, "gloo", False)
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=both.cpu_group)
    return {
        "ranks": both.all_gather(torch.tensor([rank])).tolist(),
        "sum": tensor.item(),
        "alone": [alone.ranks, alone.all_gather(torch.tensor([rank])).tolist()],
        "index": state.process_index,
    }


def dies(rank, victim):
    """Return the error of making a coordinator."""
    if rank == victim:
        dist.distributed_c10d.ProcessGroupGloo = kill_me
    try:
        GroupCoordinator([[*range(SIZE)]], rank, "gloo", False)
    except EasydistError as error:
        return {"type": type(error).__name__, "text": str(error)}


def work(case, rank, met):
    easydist.ProcessState(timeout=LIMIT)
    easydist.gather(rank)
    met.wait()  # else a slow rank could hear of the death in the gather
    _, act, victim = case.split("/")
    row = {"case": case, "rank": rank, "refusal": refusal()}
    row |= {"lost": lost, "dies": dies}[act](rank, int(victim))
    os.write(1, (json.dumps(row) + "\n").encode())


def launch(case):
    """Fork the ranks and wait for them."""
    is_shared = case.startswith("shm")
    met = multiprocessing.get_context("fork").Barrier(SIZE)
    pids = forked(SIZE, lambda rank: work(case, rank, met), whole=(), EASYDIST_SHM=int(is_shared))
    os.write(1, (json.dumps({"case": case, "statuses": statuses(pids)}) + "\n").encode())


if __name__ == "__main__":
    side_by_side(2, sys.argv[1:], launch)
