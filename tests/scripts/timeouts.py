"""Ranks that read their environment before they import easydist, or that are killed during a large transfer.

python tests/scripts/timeouts.py warn/shm kill_source/gloo …

A case is the scenario and the backend. The ranks are forked, so that torch is loaded once. Each prints its outcome as
JSON. Events end all waits: a byte in a pipe, or the first byte of the data in its place.
"""

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import time

import torch
from forking import end, forked, settle, side_by_side, statuses
from hearing import Heard
from launching import within

DEADLINE = within(20)
NUMEL = 1 << 24  # of float32: 64 MB
VARIABLES = {name: {"EASYDIST_WARN_AFTER": "0.2"} for name in ("warn", "one_warns")}
VARIABLES |= {"quiet": {"EASYDIST_WARN_AFTER": "60"}, "check": {"EASYDIST_CHECK": "0"}}
CHECKED = ("gather", "broadcast", "reduce", "all_to_all", "pad_across_processes")


def wait_late(rank: int, late: int, pipe: tuple[int, int], timeout: float | None) -> dict:
    """Let one rank come after another one has warned twice, or has given up."""
    import easydist

    heard = Heard(pipe[1], 2)  # which lets the other rank come
    easydist.gather(rank)
    logging.getLogger("easydist").addHandler(heard)
    if rank == late:
        assert select.select([pipe[0]], [], [], DEADLINE)[0]
    error = None
    try:
        easydist.gather(rank, timeout=timeout)
    except easydist.CollectiveTimeout as caught:
        error = type(caught).__name__
        os.write(pipe[1], b"!")
    return {"error": error, "gathered": easydist.gather(rank).tolist(), "warnings": heard.texts}


def call_unchecked(rank: int) -> dict:
    """Pass trees whose keys differ, which is allowed without comparison, and return the outcome of each verb."""
    import easydist

    found = {}
    for name in CHECKED:
        for check in (None, True):
            try:
                got = getattr(easydist, name)({"ab"[rank]: torch.tensor([rank, 5])}, check=check)["ab"[rank]].tolist()
            except easydist.DisagreementError as error:
                got = str(error).splitlines()[0]
            found[f"{name} {check}"] = got
    return {"found": found, "gathered": easydist.gather(rank).tolist()}


def kill_at_first_byte(data: torch.Tensor, pid: int) -> None:
    """Kill a process as soon as something has arrived in ``data``, which is zero until then."""
    first = data.view(-1)[:1].numpy()

    def monitor() -> None:
        while not first[0]:
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=monitor, daemon=True).start()


def move(scenario: str, rank: int, pids: list[int]) -> None:
    """Kill rank 2 while 64 MB go from it, or to it. A rank that does not notice in this call does so in the next."""
    import easydist
    from easydist import memory

    if scenario == "kill_sender":  # of a gather to rank 0, which sees the data arrive
        inner = memory.empty

        def empty(*args: object) -> torch.Tensor:
            result = inner(*args)
            kill_at_first_byte(result[2 * (NUMEL // 3) :], pids[2])
            return result

        memory.empty = empty if rank == 0 else inner
        easydist.gather(torch.ones(NUMEL // 3), dst=0)
    else:
        source = 2 if scenario == "kill_source" else 0
        data = torch.full((NUMEL,), 1.0) if rank == source else torch.zeros(NUMEL)
        if rank == (1 if source == 2 else 2):
            kill_at_first_byte(data, pids[2])
        easydist.broadcast(data, source)
    easydist.gather(rank)


def lose(scenario: str, rank: int) -> dict:
    import easydist

    pids = easydist.gather(os.getpid()).tolist()
    start, kinds, lost = time.monotonic(), [], None
    for attempt in (lambda: move(scenario, rank, pids), lambda: easydist.gather(rank)):
        with contextlib.suppress(easydist.EasydistError):
            try:
                attempt()
            except easydist.EasydistError as error:
                kinds.append(type(error).__name__)
                lost = getattr(error, "rank", None)
                raise
    return {"kinds": kinds, "lost": lost, "seconds": time.monotonic() - start}


def work(scenario: str, rank: int, pipe: tuple[int, int]) -> dict:
    if scenario in ("warn", "quiet", "one_warns"):
        late = 0 if scenario == "one_warns" else 1
        return wait_late(rank, late, pipe, timeout=0.3 if scenario == "quiet" else None)
    return call_unchecked(rank) if scenario == "check" else lose(scenario, rank)


def launch(case: str) -> None:
    """Fork a process that loads easydist in the environment of this case, and wait for it."""
    if (pid := os.fork()) == 0:
        scenario, backend = case.split("/")
        os.environ |= {"EASYDIST_SHM": str(int(backend == "shm")), **VARIABLES.get(scenario, {})}
        launch_ranks(scenario, backend)
        end()
    statuses([pid])


def launch_ranks(scenario: str, backend: str) -> None:
    """Fork the ranks and wait for them."""
    import easydist  # noqa: F401 - once for all ranks

    settle()
    case, pipe = f"{scenario}/{backend}", os.pipe()

    def live(rank: int) -> None:
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        row = {"case": case, "rank": rank, **work(scenario, rank, pipe)}
        os.write(1, (json.dumps(row) + "\n").encode())

    size, shares = 2 if scenario in ("warn", "quiet", "check") else 3, backend == "shm"
    ended = statuses(forked(size, live, whole=() if shares else (0,)))
    os.write(1, (json.dumps({"case": case, "statuses": ended}) + "\n").encode())


if __name__ == "__main__":
    side_by_side(2, sys.argv[1:], launch)
