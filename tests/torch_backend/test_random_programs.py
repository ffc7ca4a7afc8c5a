"""Random programs that cannot deadlock over gloo give the same results over ``easydist_shm``.

A program is a list of operations of two groups, which follows from a seed. Each rank begins them in an order of its
own (in order within a group), computes, calls verbs, and waits for them in any order, for an operation only once it
has begun all that come before it in the program. So some order of all operations serves every rank. Ranks that wait
compare their calls every few milliseconds, as with a rank that comes late. Replay a seed with
``EASYDIST_SEEDS=7 python -m pytest tests/torch_backend/test_random_programs.py``.
"""

import os
import random
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from launching import examples, within

import easydist
from easydist.process_group import NAME
from easydist.testing import distributed

SEEDS = [int(seed) for seed in os.environ["EASYDIST_SEEDS"].split(",")] if "EASYDIST_SEEDS" in os.environ else None
LIMIT = timedelta(seconds=within(20))
KINDS = ["all_reduce", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_uneven"]
KINDS += ["message", "barrier", "verb", "elsewhere"]
SIZES = [0, 1, 7, 1000, 20_000, 300_000]
"""The numbers of elements: nothing, one step, two, several slots."""


class Op(NamedTuple):
    number: int
    group: int
    kind: str
    numel: int
    root: int
    peer: int
    is_strided: bool

    def values(self, rank, part=0):
        """Small integers, exact in float32, that differ between operations, ranks and parts."""
        return ((torch.arange(self.numel) + 7 * self.number + 3 * rank + part) % 11).to(torch.float32)

    def laid(self, tensor):
        return torch.zeros(2 * len(tensor))[::2].copy_(tensor) if self.is_strided else tensor

    def begin(self, group, rank, size, is_async=True):
        """Begin the operation; return its work, if this rank takes part, and the tensors to compare."""
        mine, how = self.values(rank), {"group": group, "async_op": is_async}
        outputs = [torch.zeros(self.numel) for _ in range(size)]
        is_root = rank == self.root
        if self.kind == "all_reduce":
            mine = self.laid(mine) if is_async else mine
            return dist.all_reduce(mine, **how), [mine]
        if self.kind == "all_gather":
            return dist.all_gather(outputs, mine, **how), outputs
        if self.kind == "broadcast":
            return dist.broadcast(mine, group_src=self.root, **how), [mine]
        if self.kind == "reduce":
            work = dist.reduce(mine, group_dst=self.root, **how)
            return work, [mine] if is_root else []
        if self.kind == "gather":
            work = dist.gather(mine, outputs if is_root else None, group_dst=self.root, **how)
            return work, outputs if is_root else []
        if self.kind == "scatter":
            parts = [self.values(rank, part) for part in range(size)] if is_root else None
            return dist.scatter(outputs[0], parts, group_src=self.root, **how), outputs[:1]
        if self.kind == "all_to_all":
            whole, output = torch.cat([self.values(rank, part) for part in range(size)]), torch.cat(outputs)
            return dist.all_to_all_single(output, whole, **how), [output]
        if self.kind == "all_to_all_uneven":  # all parts differ in size, also those of the ranks for themselves
            given, taken = [[self.numel + a * rank + b * one for one in range(size)] for a, b in ((1, 2), (2, 1))]
            whole, output = torch.arange(sum(given)) % 11 + rank, torch.zeros(sum(taken), dtype=torch.int64)
            return dist.all_to_all_single(output, whole, taken, given, **how), [output]
        if self.kind == "message" and is_root:
            return dist.isend(mine, group=group, group_dst=self.peer), []
        if self.kind == "message" and rank == self.peer:
            return dist.irecv(outputs[0], group=group, group_src=self.root), outputs[:1]
        if self.kind == "elsewhere":  # a wait in C++, of which easydist knows nothing
            dist.barrier()
            return None, []
        if self.kind == "verb":
            return None, [easydist.gather(mine, group=group)]
        return dist.barrier(**how) if self.kind == "barrier" else None, []


def program(seed, size, count=24):
    draw = random.Random(seed)
    ops = []
    for number in range(count):
        root = draw.randrange(size)
        peer = (root + draw.randrange(1, size)) % size
        kind, numel = draw.choice(KINDS), draw.choice(SIZES)
        ops.append(Op(number, draw.randrange(2), kind, numel, root, peer, draw.random() < 0.2))
    return ops


class Run:
    """One rank's run of a program.

    Args:
        seed: The seed, from which this rank's own choices follow, too.
        groups: The groups.
        rank: The rank.
        size: The number of ranks.
    """

    def __init__(self, seed, groups, rank, size):
        self.ops, self.groups, self.rank, self.size = program(seed, size), groups, rank, size
        self.draw = random.Random(1000 * seed + rank)
        self.begun, self.pending = {}, []

    def play(self):
        while len(self.begun) < len(self.ops):
            self.begin_next()
            while self.pending and self.draw.random() < 0.4:
                self.wait(self.draw.choice(self.pending))
            if self.draw.random() < 0.2:
                torch.ones(200, 200).mm(torch.ones(200, 200))
        while self.pending:
            self.wait(self.draw.choice(self.pending))
        return [self.begun[op.number][1] for op in self.ops]

    def begin_next(self):
        """Begin the next operation of one of the groups; both begin theirs in the order of the program."""
        heads = [next((op for op in self.ops if op.group == g and op.number not in self.begun), None) for g in (0, 1)]
        self.begin(self.draw.choice([op for op in heads if op is not None]))

    def begin(self, op):
        if op.kind in ("verb", "elsewhere"):  # it waits, so all before it have to begin
            self.begin_all_before(op)
        self.begun[op.number] = op.begin(self.groups[op.group], self.rank, self.size)
        self.pending.append(op)

    def begin_all_before(self, op):
        for earlier in self.ops[: op.number]:
            if earlier.number not in self.begun:
                self.begin(earlier)

    def wait(self, op):
        self.begin_all_before(op)
        work, _ = self.begun[op.number]
        self.pending.remove(op)
        if work is None:
            return
        if self.draw.random() < 0.2:
            work.get_future().wait()
        work.wait()


def over_gloo(seed, group, rank, size):
    found = []
    for op in program(seed, size):
        work, tensors = op.begin(group, rank, size, is_async=False)
        if op.kind == "message" and work is not None:
            work.wait()
        found.append(tensors)
    return found


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=[2, 3, 4], timeout=within(30 + examples(3)))
def test_random_programs(rank, world_size):
    groups = [dist.new_group(backend=NAME, timeout=LIMIT) for _ in range(2)]
    gloo = dist.new_group(backend="gloo")
    for seed in SEEDS or range(examples(3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("easydist.shm.streams._GUARD_EVERY", 0.002)
            got = Run(seed, groups, rank, world_size).play()
        assert easydist.gather(torch.tensor([seed]), group=groups[seed % 2]).tolist() == [seed] * world_size
        for number, (ours, theirs) in enumerate(zip(got, over_gloo(seed, gloo, rank, world_size), strict=True)):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one, other), f"seed {seed}, operation {program(seed, world_size)[number]}"
