"""Random sequences of operations on overlapping communicators, against what one process works out."""

from datetime import timedelta

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from launching import examples, sampled, within
from operations import NAMES, OPS, begin

from easydist.comms import new_comm
from easydist.testing import default_pool

WORLD = 4
GROUPS = [(0, 1, 2, 3), (0, 1), (2, 1), (3, 0, 2), (2, 3), (1,)]
"""Members of the communicators, in the order of their ranks; all but the first are splits of it."""


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
        name=st.sampled_from(NAMES),
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
    limits = settings(max_examples=len(sampled(range(examples(10)))), stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=limits)
