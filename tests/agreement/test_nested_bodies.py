"""Bodies of ``together`` in one another: all ranks raise, or none does, whatever raises and whoever catches it."""

import contextlib
import random

import launching
import pytest
import torch

import easydist
from easydist import DisagreementError, EasydistError, MetricCollector, RemoteError
from easydist.testing import distributed


class Own(Exception):
    """The exception that a body raises."""


FAILED = (Own, EasydistError, ValueError)


def in_inner_body(rank):
    with easydist.together():
        if rank == 1:
            raise Own


def in_what_comes_first(rank):
    with easydist.ProcessState().main_process_first():
        if rank == 0:
            raise Own


def in_a_collector(rank):
    collector = MetricCollector(2)
    collector.update([rank % 2], x=torch.ones(1))
    collector.compute(dst=7 if rank == 1 else 0)


def in_a_call_that_one_rank_tolerates(rank):
    try:
        easydist.gather(torch.ones(1, 1 + rank))
    except EasydistError:
        if rank == 0:
            raise


def in_a_body_whose_error_others_catch(rank):
    if rank == 1:
        raise Own
    with contextlib.suppress(EasydistError):
        easydist.gather(torch.ones(1))
    easydist.gather(torch.ones(2))  # not with what rank 1 calls next


def while_another_waits_for_its_message(rank):
    if rank == 1:
        raise Own
    if rank == 0:
        easydist.recv_tensor_dict(1)


@pytest.mark.parametrize(
    "body",
    [
        while_another_waits_for_its_message,
        in_inner_body,
        in_what_comes_first,
        in_a_collector,
        in_a_call_that_one_rank_tolerates,
        in_a_body_whose_error_others_catch,
    ],
)
@distributed(world_size=3)
def test_ranks_stay_in_step(rank, body):
    for step in range(3):
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(FAILED) if step == 1 else easydist.together())
            with easydist.together():
                if step == 1:
                    body(rank)
        assert easydist.gather(torch.tensor([step])).tolist() == [step] * 3


def drawn(draw, depth=0):
    """Draw a program: its steps, each with the ranks that raise before it and those that catch what it raises."""
    steps = []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["body", "body", "gather", "message"] if depth < 3 else ["gather", "message"])
        raising = {rank for rank in range(3) if draw.random() < 0.12}
        catching = {rank for rank in range(3) if draw.random() < 0.2}
        inner = drawn(draw, depth + 1) if kind == "body" else draw.sample(range(3), 2)
        steps.append((kind, raising, catching, inner))
    return steps


def run(rank, steps):
    for kind, raising, catching, inner in steps:
        try:
            if rank in raising:
                raise Own
            if kind == "body":
                with easydist.together():
                    run(rank, inner)
            elif kind == "gather":
                easydist.gather(torch.ones(1))
            elif rank == inner[0]:
                easydist.send_object(rank, inner[1])
            elif rank == inner[1]:
                assert easydist.recv_object(inner[0]) == inner[0]
        except (Own, EasydistError):
            # An exception of its own that a rank catches leaves it out of a call that the others make.
            if rank not in catching or rank in raising:
                raise


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=3, timeout=launching.within(30 + launching.examples(60)))
def test_random_bodies(rank):
    """Seed n alone: ``run(rank, drawn(random.Random(n)))`` in ``together``, on three ranks."""
    for seed in range(launching.examples(60)):
        program, raised = drawn(random.Random(seed)), 0
        try:
            with easydist.together():
                run(rank, program)
        except (Own, EasydistError):
            raised = 1
        assert easydist.gather(torch.tensor([seed])).tolist() == [seed] * 3, seed
        assert len(set(easydist.gather(torch.tensor([raised])).tolist())) == 1, seed


@distributed(world_size=2)
def test_a_rank_that_caught_the_others_error_raises_it_at_the_end_of_the_body(rank):
    def body():
        with easydist.together():
            if rank:
                raise Own
            with contextlib.suppress(RemoteError):
                easydist.gather(torch.ones(1))

    with pytest.raises(Own if rank else RemoteError):
        body()
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.parametrize("raising", [None, 0, 1], ids=str)
@distributed(world_size=3)
def test_ranks_stay_in_step_after_a_body_in_one_that_others_wait_for(rank, raising):
    def body():
        with easydist.ProcessState().main_process_first(), easydist.together():
            if rank == raising:
                raise Own

    for step in range(2):
        with pytest.raises(FAILED):
            body()
        assert easydist.gather(torch.tensor([step])).tolist() == [step] * 3


@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("is_at_end", [False, True], ids=["in the body", "at its end"])
@distributed(world_size=[2, 3])
def test_ranks_stay_in_step_if_one_is_in_a_body_and_the_others_are_not(rank, world_size, is_at_end, is_caught):
    def call():
        if not is_at_end:
            with contextlib.suppress(DisagreementError) if is_caught else contextlib.nullcontext():
                easydist.gather_object([rank])

    def body():
        with easydist.together():
            call()

    for step in range(2):
        with pytest.raises(DisagreementError, match="ranks made different calls"):
            body() if rank == 0 else easydist.gather(torch.ones(1))
        assert easydist.gather(torch.tensor([step])).tolist() == [step] * world_size
