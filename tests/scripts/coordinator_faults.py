"""A rank that is killed, stopped or absent while others wait in a method of a coordinator; or they are interrupted.

python tests/scripts/coordinator_faults.py shm/kill/all_reduce gloo/interrupt/recv_tensor_dict …

A case is the backend (shm, gloo), the fault, and the method. Of three ranks the last misbehaves: once rank 0 waits for
it, it ends, stops, or lets its parent interrupt rank 0 and joins the call afterwards. Rank 1 does nothing in methods
between two ranks. Each rank prints its outcome, as JSON, and that of the next call.
"""

import json
import os
import signal
import sys
import time

import torch
from forking import forked, side_by_side, statuses
from launching import within

from easydist import EasydistError
from easydist.parallel import GroupCoordinator, init_distributed_environment

SIZE, LAST = 3, 2
DEADLINE = within(15)
LARGE = {"x": torch.zeros(1 << 20)}
SMALL = {"x": torch.zeros(10)}


def waited(group):
    """Receive with handles."""
    _, handles, after = group.irecv_tensor_dict(LAST)
    for step in [handle.wait for handle in handles] + after:
        step()


def collectives(group, queued):
    """Return the methods of all ranks. The last rank is the source if there is one."""
    x, large = torch.ones(3, 4), torch.ones(3, 100_000)
    return {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce_large": lambda: group.all_reduce(large),
        "all_gatherv": lambda: group.all_gatherv(x),
        "reduce_scatter": lambda: group.reduce_scatter(large, 0),
        "gather": lambda: group.gather(x, 0),
        "broadcast": lambda: group.broadcast(x, LAST),
        "barrier": group.barrier,
        "broadcast_object": lambda: group.broadcast_object("x", LAST),
        "broadcast_tensor_dict": lambda: group.broadcast_tensor_dict(LARGE, LAST),
        "dispatch": lambda: group.dispatch(x, x),
        "combine": lambda: group.combine(torch.ones(9, 4)),
        "queue": lambda: queued.broadcast_object("x", LAST),
        "create_mq_broadcaster": lambda: group.create_mq_broadcaster(1).close(),
    }


def pairs(group):
    """Return the methods between rank 0, which waits, and the last rank: the calls of both."""
    size, dtype = LARGE["x"].shape, torch.float32
    return {
        "send": (lambda: group.send(LARGE["x"], LAST), lambda: group.recv(size, dtype, 0)),
        "recv": (lambda: group.recv(size, dtype, LAST), lambda: group.send(LARGE["x"], 0)),
        "send_object": (lambda: group.send_object("x", LAST), lambda: group.recv_object(0)),
        "recv_object": (lambda: group.recv_object(LAST), lambda: group.send_object("x", 0)),
        "send_tensor_dict": (lambda: group.send_tensor_dict(LARGE, LAST), lambda: group.recv_tensor_dict(0)),
        "send_small": (lambda: group.send_tensor_dict(SMALL, LAST), lambda: group.recv_tensor_dict(0)),
        "recv_tensor_dict": (lambda: group.recv_tensor_dict(LAST), lambda: group.send_tensor_dict(SMALL, 0)),
        "isend": (lambda: group.isend_tensor_dict(LARGE, LAST)[0].wait(), lambda: group.recv_tensor_dict(0)),
        "irecv": (lambda: waited(group), lambda: group.isend_tensor_dict(LARGE, 0)[0].wait()),
    }


def call_of(method, group, queued, rank):
    """Return this rank's call; None if it has none."""
    if method in (both := pairs(group)):
        return {0: both[method][0], LAST: both[method][1]}.get(rank)
    return collectives(group, queued)[method]


def others_wait(group, name):
    """Return when the ranks that wait for this one have begun."""
    deadline = time.monotonic() + DEADLINE
    while not group.communicators.monitor.peers[0].place().startswith(f"{name},"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)  # they have begun the call; let them block in it


def misbehave(act, group, method):
    """Misbehave on the last rank, before it joins the call, if it does."""
    if method in ("queue", "create_mq_broadcaster"):  # waiting in a queue is not visible
        group.recv_object(0)
        time.sleep(0.3)
    else:
        prefix = {"isend": "isend_tensor_dict", "irecv": "irecv_tensor_dict", "send_small": "send_tensor_dict"}
        prefix |= {"all_reduce_large": "all_reduce"}
        prefix |= {"broadcast_object": "broadcast_object_list"}
        others_wait(group, prefix.get(method, method))
    if act == "interrupt":
        os.kill(os.getppid(), signal.SIGUSR1)  # the parent interrupts rank 0
        if method == "queue":  # concerns only the reader, which must report it
            group.recv_object(0)
            return
        deadline = time.monotonic() + DEADLINE
        while group.communicators.monitor.peers[0].report() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)


def met(call):
    """Return the type and the text of a call's error."""
    try:
        call()
    except (EasydistError, KeyboardInterrupt, EOFError) as error:
        return type(error).__name__, str(error)
    return None, ""


def work(case, rank):
    _, act, method = case.split("/")
    init_distributed_environment(timeout=within(1.5) if act == "stop" else DEADLINE)
    group = GroupCoordinator([[*range(SIZE)]], rank, "gloo", False)
    queued = GroupCoordinator([[*range(SIZE)]], rank, "gloo", False, True)
    group.dispatch(torch.ones(3, 4), torch.ones(3, 4))
    queued.broadcast_object("first", LAST)
    if act == "leave":  # no rank receives the message that rank 0 sends and drops
        if rank == 0:
            group.isend_tensor_dict(LARGE, LAST)
        os.write(1, (json.dumps({"case": case, "rank": rank}) + "\n").encode())
        return
    call = call_of(method, group, queued, rank)
    silent = method in ("queue", "create_mq_broadcaster") and rank == 0
    if rank == LAST:
        misbehave(act, group, method)
    if silent:
        group.send_object("about to wait", LAST)
    kind, text = met(call) if call else (None, "")
    if silent and act == "interrupt":
        group.send_object("interrupted", LAST)
    row = {"case": case, "rank": rank, "type": kind, "text": text, "has_part": call is not None}
    if act == "interrupt":
        row["next"] = group.all_gather(torch.tensor([rank])).tolist()
        row["pair"] = taken(queued, rank) if method == "queue" else pair(group, rank)
    else:
        row["next"] = met(lambda: group.all_gather(torch.tensor([rank])))[0]
    os.write(1, (json.dumps(row) + "\n").encode())


def taken(queued, rank):
    """Return the values that a rank takes from the queue after the fault; rank 0 takes the interrupted one, too."""
    return [queued.broadcast_object("next", LAST) for _ in range(2 if rank == 0 else 1)]


def pair(group, rank):
    """Exchange a message after the fault, and return what rank 0 receives."""
    if rank == LAST:
        group.send_tensor_dict({"from": rank, **SMALL}, 0)
    return group.recv_tensor_dict(LAST)["from"] if rank == 0 else None


def launch(case):
    """Fork the ranks and wait for them."""
    backend, act, _ = case.split("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    def live(rank):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        work(case, rank)

    whole = None if act == "leave" else () if backend == "shm" else (0,)
    pids = forked(SIZE, live, whole=whole, EASYDIST_SHM=int(backend != "gloo"))
    if act == "interrupt" and signal.sigtimedwait([signal.SIGUSR1], DEADLINE):
        os.kill(pids[0], signal.SIGINT)
    ended = statuses(pids[:-1])
    if act == "stop":
        os.kill(pids[-1], signal.SIGKILL)
    ended += statuses(pids[-1:])
    os.write(1, (json.dumps({"case": case, "statuses": ended}) + "\n").encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    side_by_side(2, sys.argv[1:], launch)
