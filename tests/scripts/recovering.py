"""Ranks that are killed at random moments, and survivors that continue. Each survivor prints its final state as JSON.

python tests/scripts/recovering.py 4/shm/0 4/comm_gloo/17 …

A case is the world size, the kind of group, and a seed. The seed selects the ranks to kill, the moments, and the
process that serves the store. Kinds: shm, gloo (easydist's verbs over a default group of gloo), torch_shm (over a
default group "easydist_shm"), comm_shm, comm_gloo (communicators).
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forking import forked, side_by_side, statuses, store_of_an_agent
from launching import within

import easydist
from easydist import EasydistError, PeerLostError, ProcessState
from easydist.comms import ReduceOp, TorchComm, new_comm
from easydist.groups.recovering import Recovery

LIMIT = within(30)


class Plan:
    """The choices of a seed: the victims, and the number of calls or recovery actions after which each of them dies."""

    def __init__(self, size: int, seed: int) -> None:
        draw = random.Random(seed)
        count = draw.choice([1, 2, size - 1] if size < 4 else [1, 2])
        self.victims = sorted(draw.sample(range(size), min(count, size - 1)))
        self.has_agent = draw.random() < 0.5
        first = draw.choice(self.victims)
        self.calls = dict.fromkeys(range(size), 1 << 30)
        self.actions = dict.fromkeys(range(size), 1 << 30)
        self.calls[first] = draw.choice([0, 1, 2, draw.randint(1, 200)])
        if not self.has_agent and 0 in self.victims:  # it serves the store, which is needed until all have met
            self.calls = {rank: max(calls, 1) for rank, calls in self.calls.items()}
        self.delay = draw.random() * 0.002
        for victim in self.victims:
            if victim != first and draw.random() < 0.7:
                self.actions[victim] = draw.randint(0, 30)
            elif victim != first:
                self.calls[victim] = draw.randint(0, 200)


def die_in_recovering(after: int) -> None:
    """Die in one of the next reads or writes of an agreement."""
    left = [after]

    def deadly(method):
        def step(*args):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)

        return step

    Recovery._write, Recovery._look = deadly(Recovery._write), deadly(Recovery._look)
    Recovery._connected = deadly(Recovery._connected)


class Verbs:
    """The verbs, over any kind of default group."""

    def __init__(self, kind: str) -> None:
        if kind == "torch_shm":
            import easydist.process_group

            assert easydist.process_group.NAME == "easydist_shm"
            dist.init_process_group("easydist_shm", timeout=timedelta(seconds=LIMIT))
            easydist.gather(0)  # in the verbs' first call in such a group, the end of a rank is not noticed

        assert ProcessState().process_group is not None  # deaths before that are those of first_call.py
        if kind != "torch_shm":
            dist.barrier()  # no rank dies while another one still connects

    def size(self) -> int:
        return ProcessState().num_processes

    def rank(self) -> int:
        return ProcessState().process_index

    def gather(self, number: int) -> list[int]:
        return easydist.gather(number).tolist()

    def recover(self) -> None:
        easydist.recover(timeout=LIMIT)

    def torch_sum(self) -> float:
        """Call torch's own all-reduce over the new group."""
        group, tensor = ProcessState().process_group, torch.ones(3)
        dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)
        assert dist.get_rank(group) == self.rank()
        self.name_the_last(group)
        return float(tensor[0])

    def name_the_last(self, group: dist.ProcessGroup) -> None:
        """Name the last survivor: by its new number, but torch's functions with this group take the old one."""
        last, old = self.size() - 1, dist.get_process_group_ranks(group)
        assert easydist.broadcast_object_list([self.rank()], last) == [last]
        assert easydist.broadcast_object_list([self.rank()], group=group, group_src=last) == [last]
        told = f"group_src={last} for rank {old[last]} of the world"
        with contextlib.nullcontext() if old[last] == last else pytest.raises(ValueError, match=told):
            assert easydist.broadcast_object_list([self.rank()], last, group) == [last]


class Communicator:
    """A communicator."""

    def __init__(self, kind: str) -> None:
        self.comm: TorchComm = new_comm(kind[5:], torch.device("cpu"), "main", timeout=timedelta(seconds=LIMIT))
        if kind == "comm_gloo":
            self.comm.barrier(False)

    def size(self) -> int:
        return self.comm.get_size()

    def rank(self) -> int:
        return self.comm.get_rank()

    def gather(self, number: int) -> list[int]:
        rows = torch.empty(self.size(), dtype=torch.int64)
        self.comm.all_gather_single(rows, torch.tensor([number]), async_op=False)
        return rows.tolist()

    def recover(self) -> None:
        self.comm = self.comm.recover(timedelta(seconds=LIMIT))

    def torch_sum(self) -> float:
        tensor = torch.ones(3)
        self.comm.all_reduce(tensor, ReduceOp.SUM, async_op=False)
        return float(tensor[0])


def work(case: str, rank: int, plan: Plan) -> None:
    size, kind, _ = case.split("/")
    group = Communicator(kind) if kind.startswith("comm") else Verbs(kind)
    if plan.actions[rank] < 1 << 30:
        die_in_recovering(plan.actions[rank])
    until, calls, recovered = int(size) - len(plan.victims), 0, 0
    lost: list[int | None] = []
    start = time.monotonic()
    while group.size() > until:
        if calls >= plan.calls[rank] or (rank in plan.victims and recovered and calls > 20):
            time.sleep(plan.delay)
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        try:
            group.gather(os.getpid())
        except EasydistError as error:
            lost += [error.pid] if isinstance(error, PeerLostError) else []
            group.recover()
            recovered += 1
    row = {"case": case, "rank": rank, "pid": os.getpid(), "pids": group.gather(os.getpid()), "recovered": recovered}
    row |= {"index": group.rank(), "sum": group.torch_sum(), "seconds": time.monotonic() - start}
    row |= {"lost": lost}
    row |= {"main": ProcessState().is_main_process, "local": ProcessState().local_process_index}
    if "/comm" not in case:
        row |= {"node": [getattr(ProcessState(), name) for name in ("node_rank", "num_nodes", "local_world_size")]}
    os.write(1, (json.dumps(row) + "\n").encode())


def launch(case: str) -> None:
    """Fork the ranks and wait for them."""
    size, kind, seed = case.split("/")
    plan, shares = Plan(int(size), int(seed)), kind not in ("gloo", "comm_gloo")
    with store_of_an_agent(plan.has_agent) as variables:
        pids = forked(
            int(size),
            lambda rank: work(case, rank, plan),
            whole=() if shares else (0,),
            EASYDIST_SHM=int(shares),
            **variables,
        )
        row = {"case": case, "pids": pids, "victims": plan.victims, "statuses": statuses(pids)}
    os.write(1, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    side_by_side(2, sys.argv[1:], launch)
