"""Ranks that end, stop, come late or are interrupted while others wait. Each prints its outcome as JSON.

python tests/scripts/loss.py 3/shm/kill 4/0011/late …

A case is the world size, the backend (shm; gloo; or for each rank a digit that stands for its host), and the scenario.
The ranks are forked, so that torch is loaded once. A rank misbehaves once all others wait for it.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import termios
import threading
import time
from multiprocessing.synchronize import Barrier

import psutil
import torch
import torch.distributed as dist
from forking import forked, side_by_side, statuses
from launching import within

import easydist
from easydist import CollectiveTimeout, EasydistError, ProcessState
from easydist.base import gloo
from easydist.comms import new_comm
from easydist.transport.backends.c10d import Gloo
from easydist.transport.backends.shm import Shm

DEADLINE = within(15)
TIMEOUT = dict.fromkeys(("stop_inside", "late", "store_stops"), within(0.5)) | {"stop": within(1.5)}  # it waits first
TIMEOUT["kill_meeting"] = within(10)


def others_wait() -> None:
    """Return when every other rank is in the next call, and other hosts know this rank's position."""
    monitor = ProcessState().communicators().monitor
    deadline = time.monotonic() + DEADLINE
    while monitor._published[0] < monitor.number or not all(
        (monitor._number_of(peer) or 0) > monitor.number for peer in monitor.peers.values()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)  # they have begun the call; let them block in it


def others_gave_up() -> None:
    """Return when every other rank has left its call and reported the reason."""
    monitor = ProcessState().communicators().monitor
    deadline = time.monotonic() + DEADLINE
    while not all(monitor.judge(monitor.hear(peer, remote=True)) for peer in monitor.peers.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def misbehave(scenario: str) -> None:
    """Misbehave on one rank, which joins the call late or never."""
    others_wait()
    if scenario == "kill_ahead":  # as if it had come, and gone on: where an exception struck while it began a call
        monitor = ProcessState().communicators().monitor
        monitor._page.begin(monitor.entry, monitor._place, time.monotonic(), monitor.number + 2, None)
    if scenario in ("kill", "kill_ahead"):
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "exit":
        sys.exit(3)
    if scenario == "raise":
        raise ValueError("bad batch")
    if scenario in ("stop", "store_stops"):
        ProcessState().communicators().monitor.publish()  # where it was last, for other hosts: at the latest now
        os.kill(os.getpid(), signal.SIGSTOP)
    if scenario == "interrupt":
        try:
            os.kill(os.getppid(), signal.SIGUSR1)  # the parent interrupts all
            time.sleep(DEADLINE)
        finally:
            others_gave_up()
    if scenario == "late":
        others_gave_up()


def together(rank: int, world_size: int) -> None:
    with easydist.together():
        if rank == world_size - 1:
            raise ValueError("bad batch")
        easydist.gather(torch.ones(3))


def data_exchange(rank: int, world_size: int, scenario: str) -> None:
    """Let the last rank stop between the headers and the data."""
    comms = ProcessState().communicators()
    if rank == world_size - 1:
        act = signal.SIGKILL if scenario == "kill_inside" else signal.SIGSTOP
        comms.control.all_gather_parts = lambda *args, **kwargs: os.kill(os.getpid(), act)
    easydist.gather(torch.ones(100_000), timeout=TIMEOUT.get(scenario))


def come_to_reconnect(rank: int, world_size: int) -> None:
    """Let the last rank end once it has come to reconnect, while others wait there for rank 0, which hears of it."""
    monitor = ProcessState().communicators().monitor
    deadline = time.monotonic() + DEADLINE
    while rank == 0 and not ((report := monitor.peers[1].report()) and report.is_final):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with contextlib.suppress(CollectiveTimeout):
        easydist.gather(rank, timeout=0.2)
    if rank == world_size - 1:
        monitor.guard = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


def under_way() -> int:
    """Return the bytes that this process has sent on a connection and that the other side has not received."""
    found, room = 0, bytearray(4)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fcntl.ioctl(int(name), termios.TIOCOUTQ, room)
            found = max(found, int.from_bytes(room, sys.byteorder))
    return found


def kill_midway(pid: int) -> None:
    """Kill a stopped process once a part of a message to it has moved."""
    deadline = time.monotonic() + DEADLINE
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED or under_way() < 1 << 16:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


def midway(scenario: str, rank: int, world_size: int) -> None:
    """Let the last rank end in the middle of a large message to it."""
    pid = easydist.gather(os.getpid()).tolist()[-1]
    comm = new_comm("gloo", torch.device("cpu"), "main") if scenario == "comm_midway" else None
    data, begin = torch.ones(1 << 24), Gloo.broadcast
    if rank == 0:
        threading.Thread(target=kill_midway, args=(pid,), daemon=True).start()
    elif rank == world_size - 1:
        Gloo.broadcast = lambda *args: (begin(*args), os.kill(os.getpid(), signal.SIGSTOP))[0]
    easydist.broadcast(data) if comm is None else comm.broadcast(data, 0, False)


def message_midway(rank: int) -> None:
    """Let the last of two ranks end when it has accepted a large message, and before it takes its data."""
    if rank == 1:
        Shm.recv = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        easydist.recv_tensor_dict(0)
    else:
        easydist.send_tensor_dict({"x": torch.ones(1 << 20)}, 1)


def meet(scenario: str, rank: int, world_size: int) -> None:
    """Make the call that the last rank spoils, or the rank that serves the store."""
    if scenario == "together":
        return together(rank, world_size)
    if scenario == "message_midway":
        return message_midway(rank)
    if scenario.endswith("midway"):
        return midway(scenario, rank, world_size)
    if scenario.endswith("inside"):
        return data_exchange(rank, world_size, scenario)
    if scenario == "kill_first":
        dist.barrier(ProcessState().process_group)
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif scenario == "kill_meeting":
        come_to_reconnect(rank, world_size)
    elif rank == (0 if scenario == "store_stops" else world_size - 1):
        misbehave(scenario)
    easydist.gather({"x": torch.ones(3)}, timeout=TIMEOUT.get(scenario))
    return None


def wake_the_store(pid: int, rank: int, world_size: int, pipe: tuple[int, int]) -> None:
    """Let rank 1 wake rank 0, which serves the store, after the ranks of the other host have given up, too."""
    if rank > 1:
        os.write(pipe[1], b".")
    elif rank == 1:
        for _ in range(2, world_size):
            os.read(pipe[0], 1)
        os.kill(pid, signal.SIGCONT)


def work(case: str, rank: int, world_size: int, pipe: tuple[int, int], survivors: Barrier) -> None:
    scenario = case.split("/")[2]
    if scenario == "thread_midway":
        gloo._CLASSES = (*gloo._CLASSES, "a class that this torch does not have")
    pids = None if scenario == "kill_first" else easydist.gather(os.getpid()).tolist()
    row = {"case": case, "rank": rank, "pids": pids, "type": None, "text": ""}
    start = time.monotonic()
    try:
        meet(scenario, rank, world_size)
    except (EasydistError, KeyboardInterrupt) as error:
        fields = {name: value for name, value in vars(error).items() if name != "raised_in"}
        row |= {"type": type(error).__name__, "text": str(error), "fields": fields}
    except ValueError as error:
        if scenario != "together":
            raise
        row |= {"type": "ValueError", "text": str(error)}
    row["seconds"] = time.monotonic() - start
    if scenario == "store_stops":
        wake_the_store(pids[0], rank, world_size, pipe)
    if scenario in ("late", "together", "interrupt", "store_stops"):
        row["next"] = easydist.gather(rank).tolist()
    elif row["type"] is not None:
        survivors.wait(DEADLINE)  # the report of the next call replaces that of this one
        try:
            easydist.gather(rank, timeout=within(1))
        except (EasydistError, KeyboardInterrupt) as error:
            row["next"] = type(error).__name__
    os.write(1, (json.dumps(row) + "\n").encode())


def launch(case: str) -> None:
    """Fork the ranks and wait for them."""
    size, backend, scenario = case.split("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    world_size, pipe = int(size), os.pipe()
    survivors = multiprocessing.get_context("fork").Barrier(world_size - 1)

    def live(rank: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        if backend.isdigit():
            os.environ["EASYDIST_HOST_ID"] = backend[rank]
        work(case, rank, world_size, pipe, survivors)

    pids = forked(world_size, live, whole=() if backend == "shm" else (0,), EASYDIST_SHM=int(backend != "gloo"))
    if scenario == "interrupt" and signal.sigtimedwait([signal.SIGUSR1], DEADLINE):
        for pid in pids:
            os.kill(pid, signal.SIGINT)
    ended = statuses(pids[:-1])
    if scenario.startswith("stop"):
        os.kill(pids[-1], signal.SIGKILL)
    ended += statuses(pids[-1:])
    os.write(1, (json.dumps({"case": case, "statuses": ended}) + "\n").encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    side_by_side(4, sys.argv[1:], launch)
