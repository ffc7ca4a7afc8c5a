"""Ranks that end in various ways. The output, JSON, names their shared files, and the processes that still have them.

python tests/scripts/leaks.py FOLDER gloo/kill queue/exit …

A case is the object that the ranks create (a gloo group, over which easydist shares memory; an easydist_shm group; a
queue over a gloo group), and the way they end. The ranks are forked, so that torch is loaded once. They meet in files
in FOLDER.
"""

import collections
import contextlib
import gc
import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forking import side_by_side, statuses
from launching import IS_STRESS, within

import easydist
import easydist.process_group
from easydist import EasydistError, ProcessState
from easydist.queue import MessageQueue

DEADLINE = within(15)
ROUNDS, EVERY = 200 if IS_STRESS else 60, 20
LARGE, SMALL = 1 << 18, 10
SHARED = re.compile(r"/dev/shm/|/memfd:easydist")


def opened(pid="self"):
    """Return the target of each descriptor of a process, by its path in ``/proc``."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them, or closed since
            found[path] = os.readlink(path)
    return found


def mapped(pid="self"):
    """Return device, inode and name of each mapping of shared memory in a process."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [(line[3], line[4], line[5]) for line in lines if len(line) == 6 and SHARED.match(line[5])]


def identity(path):
    """Return device and inode in the format of the list of mappings."""
    status = os.stat(path)
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"


def shared_files(pid="self"):
    """Return the files in shared memory that a process has open or mapped."""
    found = {f"{device} {inode}" for device, inode, _ in mapped(pid)}
    for path, name in opened(pid).items():
        if SHARED.match(name):
            with contextlib.suppress(OSError):
                found.add(identity(path))
    return found


def holders(files):
    """Return the processes that have any of these files, and the names of these files."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            found += [pid] * bool(files & shared_files(pid))
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            found += [str(path)] * (identity(path) in files)
    return found


def holdings():
    """Return the numbers of this process's descriptors by kind, and of its mappings of shared memory."""
    gc.collect()
    kinds = [re.sub(r"\d+", "", name) for name in opened().values()]
    return collections.Counter([*kinds, *(f"mapped {SHARED.match(name)[0]}" for _, _, name in mapped())])


def once(look):
    """Repeat ``look`` until it finds nothing or the time is over, and return what it finds."""
    deadline = time.monotonic() + DEADLINE
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def more_than(before):
    """Return what this process has now but had not before. gloo closes its sockets in a thread."""
    return dict(once(lambda: holdings() - before))


class Rank:
    """One rank of a case.

    Args:
        case: The object to create, and the way to end.
        folder: The folder where the ranks meet.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, case, folder, rank, size):
        self.case, self.rank, self.size = case, rank, size
        self.kind, self.how = case.split("/")
        self.store = dist.FileStore(str(folder / case.replace("/", "-")), size)
        self.queue = None

    def say(self, **found):
        os.write(1, (json.dumps({"rank": self.rank, **found}) + "\n").encode())

    def say_files(self):
        self.say(files=sorted(shared_files()))

    def begin(self, number, numel, ranks=None):
        """Create a group of these ranks, and perhaps a queue over it, and use all of their memory."""
        ranks = ranks or range(self.size)
        dist.init_process_group(
            "gloo" if self.kind == "queue" else self.kind,
            store=dist.PrefixStore(str(number), self.store),
            rank=ranks.index(self.rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=DEADLINE),
        )
        assert easydist.gather(torch.full((numel,), self.rank)).unique().tolist() == list(ranks)
        if self.kind == "queue":
            queue = self.queue = MessageQueue.create_from_process_group(None, 1 << 16, 10)
            assert queue.broadcast_object("x" * numel if queue.is_writer else None) == "x" * numel

    def end(self):
        if self.queue is not None:
            self.queue.close()
            self.queue = None
        dist.destroy_process_group()

    def leave(self):
        """Leave without any cleanup, perhaps after a forked child has done so."""
        self.begin(0, LARGE)
        self.say_files()
        if self.how != "exit" and self.rank:
            assert forked(os._exit if self.how == "fork" else sys.exit) == 0
        self.say(gathered=easydist.gather(self.rank).tolist())

    def survive(self):
        """Play one round for comparison, one with a fault, and one of the survivors."""
        self.begin(0, SMALL)
        self.end()
        before = holdings()
        self.begin(1, LARGE)
        self.say_files()
        ranks = list(range(1, self.size) if self.how == "kill_first" else range(self.size - 1))
        pids, child = self.introduce(ranks)
        if self.rank not in ranks:
            misbehave(self.how, pids)
        met = self.wait()
        self.end()
        self.begin(2, SMALL, ranks)
        self.end()
        self.say(met=met, more=more_than(before))
        if child and self.rank == 0:
            os.kill(child, signal.SIGKILL)

    def introduce(self, ranks):
        """Return the processes of all ranks and a child of the last one. The rank not among ``ranks`` returns last."""
        child = orphan() if self.how == "orphan" and self.rank == self.size - 1 else 0
        pids, children = zip(*easydist.gather_object((os.getpid(), child)), strict=True)
        if self.rank in ranks:
            self.store.set(f"known/{self.rank}", "")
        else:
            self.store.wait([f"known/{rank}" for rank in ranks])
        return pids, children[-1]

    def wait(self):
        """Wait until it is known that a rank will not come."""
        try:
            while self.queue is None:
                easydist.gather(self.rank)
            while self.queue.is_writer:
                self.queue.enqueue(0, DEADLINE)
            while True:
                self.queue.dequeue(DEADLINE)
        except (EasydistError, EOFError, BrokenPipeError) as error:
            return type(error).__name__

    def again(self):
        """Create groups one after another. The two compared ones have little memory, so that no leak is missed."""
        slots = set()
        for number in range(ROUNDS):
            self.begin(number, SMALL if number % EVERY else LARGE)
            slots.add(ProcessState().communicators().monitor.entry)
            if number == 0:
                self.say_files()
            self.end()
            if number == EVERY - 1:
                before = holdings()
        self.say(more=more_than(before), slots=sorted(slots))


def forked(leave):
    """Return the exit status of a child that ends by calling ``leave``."""
    if (child := os.fork()) == 0:
        leave(0)
    return statuses([child])[0]


def orphan():
    """Fork a child that stays."""
    child = os.fork()
    while child == 0:
        signal.pause()
    return child


def misbehave(how, pids):
    if how == "raise":
        raise ValueError("bad batch")
    if how == "kill_all":
        for pid in pids:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def work(case, folder, rank, size):
    one = Rank(case, folder, rank, size)
    ways = {"again": one.again, "exit": one.leave, "fork": one.leave, "fork_exit": one.leave}
    ways.get(one.how, one.survive)()


def launch(case, folder):
    """Fork the ranks, read their output until they have ended, and look for leftovers."""
    size = 2 if case.endswith("again") else 3
    known, (reading, writing) = shared_files(), os.pipe()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.dup2(writing, 1)
            os.close(reading)
            os.close(writing)
            work(case, folder, rank, size)
            sys.exit()
        pids.append(pid)
    os.close(writing)
    with open(reading) as lines:  # ends with the last of them, including their children
        rows = [json.loads(line) for line in lines]
    ended = statuses(pids)
    files = {file for row in rows for file in row.pop("files", [])} - known
    found = {"ranks": [row for row in rows if len(row) > 1], "statuses": ended, "files": len(files)}
    os.write(1, (json.dumps({"case": case, **found, "left": once(lambda: holders(files))}) + "\n").encode())


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    side_by_side(3, cases, lambda case: launch(case, Path(folder)))
