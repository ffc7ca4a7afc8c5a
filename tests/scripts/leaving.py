"""A rank that leaves its group while its process lives on: the others wait for it, or take what it had sent before.

python tests/scripts/leaving.py 3/shm/wait/all_reduce 2/gloo/take/isend_large …

A case is the number of ranks, the group, what the others do, and the method. The last rank leaves. In ``wait`` the
others call the method, and wait for a rank that never will. In ``take`` they call it after the last rank has sent its
part and left. In ``end`` all ranks call it, and end as they come. In ``recover`` the others call it in vain, then
recover and gather. Each rank prints its outcome as JSON.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from forking import forked, side_by_side, statuses
from launching import within

import easydist
from easydist import EasydistError
from easydist.comms import ReduceOp, TorchComm, new_comm
from easydist.parallel import GroupCoordinator, init_distributed_environment
from easydist.weights.group import Participant, PrivateGroup

LIMIT = within(15)
LARGE = torch.arange(1 << 20, dtype=torch.float32)
SMALL = torch.arange(3, dtype=torch.float32)


class Coordinator:
    """A coordinator, with queues or without them."""

    def __init__(self, rank: int, size: int, queues: bool = False) -> None:
        init_distributed_environment(timeout=LIMIT)
        self.group = GroupCoordinator([[*range(size)]], rank, "gloo", False, queues)
        self.last, self.rank = size - 1, rank
        if queues:
            self.group.broadcast_object("first", self.last)

    def leave(self) -> None:
        self.group.destroy()

    def all_reduce(self) -> None:
        self.group.all_reduce(SMALL)

    def barrier(self) -> None:
        self.group.barrier()

    def broadcast_object(self) -> None:
        assert self.group.broadcast_object("x" if self.rank == self.last else None, self.last) == "x"

    def send(self) -> None:
        self.group.send(SMALL, self.last)

    def recv(self) -> None:
        self.group.recv(SMALL.shape, SMALL.dtype, self.last)

    def recv_object(self) -> None:
        self.group.recv_object(self.last)

    def isend(self, tensor: torch.Tensor = SMALL) -> None:
        """Send to all from the last rank without waiting; receive on the others."""
        if self.rank == self.last:
            for rank in range(self.last):
                self.group.isend_tensor_dict({"x": tensor}, rank)
            return
        found, handles, after = self.group.irecv_tensor_dict(self.last)
        for step in [handle.wait for handle in handles] + after:
            step()
        assert torch.equal(found["x"], tensor)

    def isend_large(self) -> None:
        self.isend(LARGE)


class Hosts(Coordinator):
    """A coordinator of ranks on hosts of two."""

    def __init__(self, rank: int, size: int) -> None:
        os.environ["EASYDIST_HOST_ID"] = f"host {rank // 2}"
        super().__init__(rank, size)


class Verbs:
    """The verbs over a group of torch, which torch destroys."""

    def __init__(self, rank: int, size: int) -> None:
        init_distributed_environment(timeout=LIMIT)
        self.group, self.last, self.rank = dist.new_group(timeout=timedelta(seconds=LIMIT)), size - 1, rank
        easydist.gather(rank, group=self.group)

    def leave(self) -> None:
        dist.destroy_process_group(self.group)

    def recover(self) -> dist.ProcessGroup:
        return easydist.recover(group=self.group, timeout=LIMIT)

    def gather(self) -> None:
        easydist.gather(SMALL, group=self.group)

    def recv(self) -> None:
        easydist.recv_object(group_src=self.last, group=self.group)


class Private(Verbs):
    """The verbs over a group as those of Ray actors."""

    def __init__(self, rank: int, size: int) -> None:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=LIMIT), wait_for_workers=False)
        endpoint, until = Participant(rank, size, "127.0.0.1"), time.monotonic() + LIMIT
        self.made = PrivateGroup("actors", store, endpoint, until, LIMIT, lambda: time.sleep(0.01))
        self.group, self.last, self.rank = self.made.comm, size - 1, rank
        easydist.gather(rank, group=self.group)

    def leave(self) -> None:
        self.made.close()


class SharedMemoryGroup:
    """A group of the backend ``easydist_shm``."""

    def __init__(self, rank: int, size: int) -> None:
        import easydist.process_group

        dist.init_process_group(easydist.process_group.NAME, timeout=timedelta(seconds=LIMIT))
        self.group, self.last, self.rank = dist.new_group(timeout=timedelta(seconds=LIMIT)), size - 1, rank
        dist.barrier(self.group)

    def leave(self) -> None:
        dist.destroy_process_group(self.group)

    def all_reduce(self) -> None:
        dist.all_reduce(SMALL, group=self.group)

    def polled(self) -> None:
        work = dist.all_reduce(SMALL, group=self.group, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        if error := work.exception():
            raise error

    def barrier(self) -> None:
        dist.barrier(self.group)

    def gather(self) -> None:
        """Make the verbs' first call in the group."""
        easydist.gather(SMALL, group=self.group)

    def send(self) -> None:
        dist.send(LARGE, self.last, self.group)

    def recv(self) -> None:
        if self.rank == self.last:
            for rank in range(self.last):
                dist.send(SMALL, rank, self.group)
            return
        dist.recv(got := torch.empty_like(SMALL), self.last, self.group)
        assert torch.equal(got, SMALL)

    def broadcast(self) -> None:
        got = LARGE[:1000] if self.rank == self.last else torch.empty(1000)
        dist.broadcast(got, self.last, self.group)
        assert torch.equal(got, LARGE[:1000])


class Communicator:
    """A communicator, over shared memory or gloo."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        self.comm = new_comm(kind, torch.device("cpu"), "main", timeout=timedelta(seconds=LIMIT))
        self.last, self.rank = size - 1, rank
        self.window = self.comm.new_window(torch.zeros(1)) if kind == "shm" else None
        self.comm.barrier(False)

    def leave(self) -> None:
        self.comm.finalize()

    def recover(self) -> TorchComm:
        return self.comm.recover(timedelta(seconds=LIMIT))

    def all_reduce(self) -> None:
        self.comm.all_reduce(SMALL.clone(), ReduceOp.SUM, async_op=False)

    def asynchronous(self) -> None:
        self.comm.all_reduce(SMALL.clone(), ReduceOp.SUM, async_op=True).wait()

    def polled(self) -> None:
        work = self.comm.all_reduce(SMALL.clone(), ReduceOp.SUM, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()

    def barrier(self) -> None:
        self.comm.barrier(False)

    def wait_signal(self) -> None:
        if self.rank == self.last:
            for rank in range(self.last):
                self.window.signal(rank, False)
            return
        self.window.wait_signal(self.last, False)

    def gather(self) -> None:
        easydist.gather(SMALL, group=self.comm)

    def recv(self) -> None:
        if self.rank == self.last:
            for rank in range(self.last):
                self.comm.send(SMALL, rank, False)
            return
        self.comm.recv(got := torch.empty_like(SMALL), self.last, False)
        assert torch.equal(got, SMALL)

    def broadcast(self) -> None:
        got = LARGE[:1000] if self.rank == self.last else torch.empty(1000)
        self.comm.broadcast(got, self.last, False)
        assert torch.equal(got, LARGE[:1000])


KINDS = {
    "shm": Coordinator,
    "gloo": Coordinator,
    "hosts": Hosts,
    "queue": lambda rank, size: Coordinator(rank, size, True),
    "verbs_shm": Verbs,
    "verbs_gloo": Verbs,
    "private_shm": Private,
    "private_gloo": Private,
    "torch_shm": SharedMemoryGroup,
    "comm_shm": lambda rank, size: Communicator(rank, size, "shm"),
    "comm_gloo": lambda rank, size: Communicator(rank, size, "gloo"),
}


def outcome(call) -> dict:
    """Return the error of a call."""
    began = time.monotonic()
    try:
        call()
    except (EasydistError, RuntimeError, EOFError) as error:
        row = {"type": type(error).__name__, "text": str(error), "rank of error": getattr(error, "rank", None)}
        return row | {"seconds": time.monotonic() - began, "is_lost": isinstance(error, easydist.PeerLostError)}
    return {"type": None, "text": "", "seconds": time.monotonic() - began}


def work(case: str, rank: int, has_left: tuple[int, int], have_ended: tuple[int, int]) -> None:
    size, kind, act, method = case.split("/")
    last = int(size) - 1
    group = KINDS[kind](rank, last + 1)
    call = getattr(group, method)
    row = {"type": None, "text": ""}
    if rank == last:
        os.close(have_ended[1])
        if act in ("take", "end"):
            row = outcome(call)
        group.leave()
        os.write(has_left[1], bytes(last))
        if act != "end":
            os.read(have_ended[0], 1)  # live until the others have ended
    else:
        if act == "take":
            os.read(has_left[0], 1)
        row = outcome(call) if act != "recover" else recovered(group, call)
        row["next"] = outcome(call)["type"] if row["type"] else None
        if act != "recover":
            group.leave()
    os.write(1, (json.dumps({"case": case, "rank": rank, "limit": LIMIT, **row}) + "\n").encode())


def recovered(group, call) -> dict:
    """Return the outcome of a call, and the old ranks of those that recover after it."""
    row, began = outcome(call), time.monotonic()
    new = group.recover()
    members = easydist.gather(group.rank, group=new).tolist()
    return row | {"members": members, "seconds": time.monotonic() - began}


def launch(case: str) -> None:
    """Fork the ranks and wait for them."""
    size, kind, *_ = case.split("/")
    pipes = os.pipe(), os.pipe()
    over_gloo = kind.endswith("gloo") or kind == "hosts"
    variables = {"EASYDIST_SHM": int(not kind.endswith("gloo"))}
    pids = forked(int(size), lambda rank: work(case, rank, *pipes), whole=(0,) if over_gloo else (), **variables)
    os.close(pipes[1][1])
    os.write(1, (json.dumps({"case": case, "statuses": statuses(pids)}) + "\n").encode())
    for descriptor in (*pipes[0], pipes[1][0]):
        os.close(descriptor)


if __name__ == "__main__":
    side_by_side(2, sys.argv[1:], launch)
