"""Ranks that come late to the first call of a job, or never, or make the same mistake in it. Each prints its outcome.

python tests/scripts/first_call.py 3/late 3/server …

A case is the world size and the scenario.
"""

import json
import os
import resource
import signal
import sys
import time

import torch.distributed as dist
from forking import forked, side_by_side, statuses, store_of_an_agent
from launching import within

import easydist
from easydist import EasydistError, ProcessState
from easydist.state import communicators, groups

SHORT, LONG = within(0.7), within(20)


def call(timeout=None):
    try:
        return {"got": easydist.gather(int(os.environ["RANK"]), timeout=timeout).tolist()}
    except EasydistError as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "missing": getattr(error, "missing", None),
            "seconds": time.monotonic() - began,
        }


began = time.monotonic()


def late(rank, others_are_done):
    """Rank 1 comes after the time of the others is over; then all call again."""
    if rank == 1:
        os.read(others_are_done[0], 1)
    first = call(SHORT)
    os.write(others_are_done[1], b".")
    return {"first": first, "second": call(LONG)}


def never(rank, others_are_done):
    """Rank 1 raises before its first call; the others have the limit of the group."""
    ProcessState(timeout=SHORT)
    if rank == 1:
        sys.excepthook = lambda *_: None
        raise ValueError("bad configuration")
    return {"first": call()}


def server(rank, others_are_done):
    """Rank 0, which serves the store, does not come in time."""
    if rank == 0:
        os.read(others_are_done[0], 1)
        os.read(others_are_done[0], 1)
    first = call(LONG if rank == 0 else SHORT)
    os.write(others_are_done[1], b".")
    return {"first": first, "second": call(LONG)}


def early(rank, others_are_done):
    """One rank needs the group before its first call, the others make theirs."""
    group = ProcessState().process_group if rank == 0 else None
    found = call(LONG)
    return {"first": found, "second": call(LONG), "size": ProcessState().process_group.size(), "had": group is not None}


def same(rank, others_are_done):
    """All ranks make the same mistake, and end with it."""
    if rank == 1:
        time.sleep(0.2)  # it comes late, so that it looks for reports
    sys.excepthook = lambda kind, *_: os.write(1, json.dumps(row(rank, kind)).encode() + b"\n")
    easydist.gather(["a", "b"])


def row(rank, kind):
    return {"case": CASE[0], "rank": rank, "kind": kind.__name__}


def damaged(rank, others_are_done):
    """A key of the store has a value that easydist did not write."""
    os.environ["EASYDIST_HOST_ID"] = str(rank)
    call(LONG)
    store = communicators()._store
    if rank == 0:
        os.write(others_are_done[1], b".")
    else:
        os.read(others_are_done[0], 1)  # rank 0 has left the first call, in which it might read the log
        store.set(f"reports/log/{store.add('reports/log', 1)}", '{"kind": "late"')
        os.read(others_are_done[0], 1)
    first = call(LONG)
    os.write(others_are_done[1], b".")
    return {"first": first, "second": call(LONG)}


def destroyed(rank, others_are_done):
    """Rank 1 destroys the group that the first call has made, and lives on."""
    call(LONG)
    if rank == 1:
        dist.destroy_process_group()
        os.read(others_are_done[0], 1)
        return {}
    first = call(LONG)
    os.write(others_are_done[1], b".")
    return {"first": first}


def connecting(rank, others_are_done):
    """The last rank dies when all have come, but are not connected."""
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return {"first": call(within(600)), **recovered(LONG)}


def recovered(limit):
    """Continue with the surviving ranks, as torch knows them, too."""
    group = easydist.recover(timeout=limit)
    dist.barrier(group)
    state, others = ProcessState(), call(LONG)
    return {"second": others, "place": [state.process_index, state.num_processes, group.rank(), group.size()]}


def full(rank, others_are_done):
    """Rank 1 has no descriptor for another connection to the store; torch tries again, until its limit is over."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = groups.own_connection

    def connection(store):
        highest = max(map(int, os.listdir("/proc/self/fd")))
        holes = [os.dup(0) for _ in range(highest - len(os.listdir("/proc/self/fd")) + 2)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *holes) + 1, limits[1]))
        try:
            return own(store)
        finally:
            for one in holes:
                os.close(one)

    if rank == 1:
        groups.own_connection = connection
    first = call(SHORT)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    groups.own_connection = own
    return {"first": first, "second": call(LONG)}


def half(rank, others_are_done):
    """The last rank dies when some ranks have made the group and rank 1 has not; it dies in the survivors' group."""
    size, make = int(os.environ["WORLD_SIZE"]), dist.init_process_group

    def fail(*args, **options):
        make(*args, **options)
        dist.destroy_process_group()
        os.read(others_are_done[0], 1)  # the last rank is about to end
        raise RuntimeError("connectFullMesh failed")

    if rank == 1:
        dist.init_process_group = fail
    group = ProcessState().process_group if rank not in (1, size - 1) else None
    if rank == size - 1:
        assert ProcessState().process_group is not None
        os.write(others_are_done[1], b".")
        os.kill(os.getpid(), signal.SIGKILL)
    first = call(LONG)
    found = recovered(LONG)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    second = call(LONG)
    return {"first": first, "had": group is not None, "then": second, "once": found, **recovered(LONG)}


def gone(rank, others_are_done):
    """The last rank ends before it has done anything."""
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        os._exit(3)
    return {"first": call(SHORT), **recovered(SHORT)}


def absent(rank, others_are_done):
    """The last rank makes its first call when the others have left it out."""
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        os.read(others_are_done[0], 1)
        first = call(LONG)
        try:
            easydist.recover(timeout=LONG)
        except EasydistError as error:
            return {"first": first, "second": {"type": type(error).__name__}, "third": call(LONG)}
    first = call(SHORT)
    found = recovered(SHORT)
    os.write(others_are_done[1], b".")
    return {"first": first, **found, "third": call(LONG)}


CASE = [""]


def launch(case):
    size, scenario = case.split("/")
    CASE[0] = case
    pipe = os.pipe()

    def live(rank):
        outcome = globals()[scenario](rank, pipe)
        os.write(1, (json.dumps({"case": case, "rank": rank, **outcome}) + "\n").encode())

    with store_of_an_agent(scenario != "server") as variables:
        pids = forked(int(size), live, **variables)
        row = {"case": case, "statuses": statuses(pids)}
    os.write(1, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    side_by_side(3, sys.argv[1:], launch)
