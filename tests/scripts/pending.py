"""Ranks of an ``easydist_shm`` group to which something happens while operations are pending for which nobody waits.

python tests/scripts/pending.py workers exit ctrl_c dead orphaned prints what the ranks of each case found, as JSON. The
ranks are forked, so that torch is loaded once.
"""

import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from forking import forked, side_by_side, statuses
from launching import within
from torch.utils.data import DataLoader

import easydist.process_group  # noqa: F401 - registers the backend
from easydist.shm import progress

LIMIT = timedelta(seconds=within(20))


def say(case, **found):
    os.write(1, (json.dumps({"case": case, **found}) + "\n").encode())


def store():
    return dist.distributed_c10d._get_default_store()


def begun(rank, size, count=3):
    """Begin to reduce large tensors of ones; on rank 1 once the others have begun."""
    tensors = [torch.ones(1_000_000) for _ in range(count)]
    if rank == 1:
        store().wait([f"begun/{other}" for other in range(size) if other != 1], LIMIT)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    store().set(f"begun/{rank}", "1")
    return works, tensors


def reduced(works, tensors):
    for work in works:
        work.wait()
    return [tensor[-1].item() for tensor in tensors]


def compute(until):
    """Compute until this rank is told to stop: it is in no call of easydist."""
    deadline = time.monotonic() + LIMIT.total_seconds()
    while not until():
        assert time.monotonic() < deadline
        torch.ones(100, 100).mm(torch.ones(100, 100))


def workers(rank, size):
    pending = begun(rank, size)
    if rank:
        seen = [batch for _ in range(2) for batch in DataLoader(range(8), 4, num_workers=2)]
        compute(lambda: store().check(["done"]))
        store().set(f"heard/{rank}", "1")
        return {"seen": torch.cat(seen).tolist(), "got": reduced(*pending)}
    got = reduced(*pending)
    store().set("done", "1")
    store().wait([f"heard/{other}" for other in range(1, size)], LIMIT)  # it ends with this process
    return {"got": got}


def exit(rank, size):
    """Rank 1 ends before rank 0 begins, with a message under way that never comes, too."""
    never = dist.new_group(backend="easydist_shm")
    if rank:
        dist.irecv(torch.ones(9), 0, group=never)
        for _ in range(3):
            dist.all_reduce(torch.ones(1_000_000), async_op=True)
        store().set("ends", "1")
        sys.exit()
    store().wait(["ends"], LIMIT)
    ended = time.monotonic() + 1  # a process that waits for nothing would end in this time
    compute(lambda: time.monotonic() > ended)
    store().set("begun/1", "1")
    return {"got": reduced(*begun(rank, size))}


def orphaned(rank, size):
    """Rank 0, which serves the store, ends while rank 1 makes a group."""
    if rank == 0:
        store().wait(["calls"], LIMIT)
        os._exit(0)
    store().set("calls", "1")
    try:
        dist.new_group(backend="easydist_shm")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def ctrl_c(rank, size):
    pending = begun(rank, size)
    if rank:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            store().set("computes", "1")
            compute(lambda: False)
        compute(lambda: store().check(["done"]))
        return {"got": reduced(*pending)}
    store().wait(["pid", "computes"], LIMIT)
    os.kill(int(store().get("pid")), signal.SIGINT)
    got = reduced(*pending)
    store().set("done", "1")
    return {"got": got}


def dead(rank, size):
    """Rank 1 is killed; the others wait only once that has happened, in a thread for futures and in this one."""
    if rank == 1:
        works, _ = begun(rank, size, 1)
        works[0].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    works, _ = begun(rank, size, 3)
    works[0].wait()
    future = works[1].get_future()
    found = []
    for wait in (future.wait, works[1].wait, works[2].wait, works[2].wait):
        try:
            wait()
        except Exception as error:
            found.append((type(error).__name__, getattr(error, "rank", None)))
    return {"errors": found}


def launch(case):
    size = 3 if case == "dead" else 2

    def work(rank):
        dist.init_process_group("easydist_shm", timeout=LIMIT)
        if rank == 1:
            store().set("pid", str(os.getpid()))
        found = globals()[case](rank, size)
        progress.helper.stop()  # it may be about to note that nothing is under way any more
        os.write(
            1, (json.dumps({"case": case, "rank": rank, "running": len(progress.running), **found}) + "\n").encode()
        )
        if case != "dead":
            sys.exit()
        os._exit(0)

    began = time.monotonic()
    ended = statuses(forked(size, work, whole=None))
    say(case, statuses=ended, seconds=time.monotonic() - began)


if __name__ == "__main__":
    side_by_side(2, sys.argv[1:], launch)
