"""Random sequences of operations on overlapping communicators, against what one process works out."""

import functools
from datetime import timedelta

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from launching import examples, within

from easydist.comms import ReduceOp, new_comm
from easydist.testing import default_pool

WORLD = 4
GROUPS = [(0, 1, 2, 3), (0, 1), (2, 1), (3, 0, 2), (2, 3), (1,)]
"""Members of the communicators, in the order of their ranks; all but the first are splits of it."""

NAMES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "all_to_all", "ring", "barrier"]
OPS = {"SUM": torch.add, "MAX": torch.maximum, "BXOR": torch.bitwise_xor, "PRODUCT": torch.mul}


def values(seed, rank, numel):
    return torch.randint(0, 5, (numel,), generator=torch.Generator().manual_seed(100 * seed + rank))


def begin(comm, step, members, me):
    """Begin one operation; returns the work, what it fills, and what that must be then."""
    name, _, numel, root, op, seed = step
    size = len(members)
    every = [values(seed, r, numel) for r in range(size)]
    mine, root = every[me].clone(), root % size
    folded = functools.reduce(OPS[op], every)
    if name == "all_reduce":
        return comm.all_reduce(mine, getattr(ReduceOp, op), True), mine, folded
    if name == "reduce":
        return comm.reduce(mine, root, getattr(ReduceOp, op), True), mine, folded if me == root else every[me]
    if name == "broadcast":
        return comm.broadcast(mine, root, True), mine, every[root]
    if name == "all_gather":
        output = torch.empty(size * numel, dtype=torch.int64)
        return comm.all_gather_single(output, mine, True), output, torch.cat(every)
    if name == "gather":
        output = torch.zeros(size * numel, dtype=torch.int64)
        work = comm.gather_single(output, mine, root, True)
        return work, output, torch.cat(every) if me == root else torch.zeros_like(output)
    if name == "all_to_all":
        whole = [values(seed, r, numel * size) for r in range(size)]
        output = torch.empty(size * numel, dtype=torch.int64)
        work = comm.all_to_all_single(output, whole[me], True)
        return work, output, torch.cat([part[numel * me : numel * (me + 1)] for part in whole])
    if name == "ring":
        output = torch.zeros(numel, dtype=torch.int64)
        batch = comm.batch_op_create()
        if size > 1:
            batch.send(mine, (me + 1) % size)
            batch.recv(output, (me - 1) % size)
            return batch.issue(True), output, every[(me - 1) % size]
    return comm.barrier(True), mine, every[me]


def play(rank, backend, steps):
    """Each rank takes part in its own groups' steps; it waits for every few of them in an order of its own."""
    world = new_comm(backend, torch.device("cpu"), "world", timeout=timedelta(seconds=within(30)))
    comms = [world] + [world.split(group, str(group)) if rank in group else None for group in GROUPS[1:]]
    under_way = []
    for step in steps:
        group = step[1]
        if comms[group] is not None:
            under_way.append((step, *begin(comms[group], step, GROUPS[group], GROUPS[group].index(rank))))
    for step, work, got, want in under_way if rank % 2 else reversed(under_way):
        work.wait()
        assert torch.equal(got, want), (step, got, want)
    for comm in comms:
        if comm is not None:
            comm.finalize()


class Operations(RuleBasedStateMachine):
    """Collects a sequence; its end plays it."""

    backend = "gloo"

    def __init__(self):
        super().__init__()
        self.steps = []

    @rule(
        name=st.sampled_from(
            ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "all_to_all", "ring", "barrier"]
        ),
        group=st.integers(0, len(GROUPS) - 1),
        numel=st.sampled_from([0, 1, 3, 1000]),
        root=st.integers(0, WORLD - 1),
        op=st.sampled_from(sorted(OPS)),
    )
    def operate(self, name, group, numel, root, op):
        self.steps.append((name, group, numel, root, op, len(self.steps)))

    @invariant()
    def it_has_an_order(self):
        assert [step[-1] for step in self.steps] == list(range(len(self.steps)))

    def teardown(self):
        default_pool().run(play, WORLD, self.backend, self.steps)


class OverMemory(Operations):
    """The same in shared memory."""

    backend = "shm"


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("machine", [Operations, OverMemory])
def test_overlapping_communicators_do_what_one_process_would(machine):
    limits = settings(max_examples=examples(10), stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=limits)
