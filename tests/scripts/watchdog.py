"""Two ranks over gloo, of which rank 0 waits for rank 1 while its process or the store is in a bad state.

python tests/scripts/watchdog.py many/late none/late …

A case is the state and the event that has to end the wait. The ranks are forked, so that torch is loaded once. Rank 1
stays away until rank 0 has given up. Each prints its outcome as JSON.
"""

import json
import os
import resource
import select
import signal
import sys
import threading
import time

from forking import forked, side_by_side, statuses
from launching import within

import easydist
from easydist import ProcessState
from easydist.groups.communicators import Communicators

DEADLINE = within(15)
POISON = {"seen": "{", "log": '[1, 2, "x"]'}


def take_descriptors(count: int) -> None:
    """Open this many files; -1 for as many as the process may."""
    try:
        while count:
            os.open(os.devnull, os.O_RDONLY)
            count -= 1
    except OSError:
        assert count < 0


def take_all_descriptors() -> None:
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    take_descriptors(-1)


def poison(comms: Communicators, kind: str) -> None:
    """Spoil what rank 1 has written to the store."""
    store, deadline = comms._store, time.monotonic() + DEADLINE
    while not store.check(["seen/1"]):  # by its watchdog
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store.set("seen/1" if kind == "seen" else f"reports/log/{store.add('reports/log', 1)}", POISON[kind])


def interrupt_the_wait(comms: Communicators) -> None:
    def interrupt() -> None:
        while not comms.monitor.waits % 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def wait(state: str, end: str) -> dict[str, object]:
    """Wait in vain, and return the error."""
    comms = ProcessState().communicators()
    if state == "none":
        take_all_descriptors()
    elif state != "many":
        poison(comms, state)
    if end == "interrupt":
        interrupt_the_wait(comms)
    try:
        easydist.gather(0, timeout=1.5 if end == "late" else None)
    except (easydist.EasydistError, KeyboardInterrupt) as error:
        return {"type": type(error).__name__, "text": str(error)}
    except Exception as error:  # none of ours
        return {"type": repr(error), "text": ""}
    return {"type": None, "text": ""}


def work(case: str, rank: int, gathered: tuple[int, int], ended: tuple[int, int]) -> None:
    state, end = case.split("/")
    if state == "many":
        take_descriptors(1100)
    easydist.gather(rank)
    row: dict[str, object] = {"case": case, "rank": rank}
    if rank == 0:
        os.read(gathered[0], 1)  # a slow rank 1 would still read what is spoilt here
        row |= wait(state, end)
        os.write(ended[1], b"!")
    else:
        os.write(gathered[1], b"!")
        row["released"] = _is_readable(ended[0])
    os.write(1, (json.dumps(row) + "\n").encode())
    os._exit(0)  # the group's end needs descriptors


def _is_readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(DEADLINE * 1000))


def launch(case: str) -> None:
    pipes = os.pipe(), os.pipe()
    hosts = {} if case.split("/")[0] in ("many", "none") else {"apart": 1}

    def work_as(rank: int) -> None:
        if hosts:
            os.environ["EASYDIST_HOST_ID"] = f"host {rank}"
        work(case, rank, *pipes)

    ended = statuses(forked(2, work_as, whole=None, EASYDIST_SHM=0))
    os.write(1, (json.dumps({"case": case, "statuses": ended}) + "\n").encode())


if __name__ == "__main__":
    side_by_side(3, sys.argv[1:], launch)
