"""Communicators whose ranks call different operations, or one with arguments that do not match."""

import itertools
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from differing import DTYPES, EQUAL, OPERATIONS, OPS, REDUCING, ROOTED, begin, demand_one_error, play
from launching import IS_STRESS, examples, sampled, within

from easydist.comms import CommDisagreement, ReduceOp, new_comm
from easydist.comms.statuses import Statuses
from easydist.testing import distributed
from easydist.transport.backends.c10d import Gloo

SIZES = sampled([2, 3, 4])
SEEDS = int(os.environ["EASYDIST_SEEDS"]) if "EASYDIST_SEEDS" in os.environ else None


def made(name="main", backend="shm", hints=None):
    return new_comm(backend, torch.device("cpu"), name, timeout=timedelta(seconds=within(20)), hints=hints)


def differing(comm, name, mine, other):
    """All ranks but the last one begin an operation with some arguments, the last one with others, or another one."""
    is_last = comm.get_rank() == comm.get_size() - 1
    begin(comm, **({"name": name} | (other if is_last else mine)))
    comm.barrier(False)


@pytest.mark.slow
@distributed(world_size=SIZES)
def test_the_error_names_the_call_of_each_rank(rank, world_size):
    comm = made()
    text = demand_one_error(lambda: differing(comm, "all_reduce", {}, {"numel": 8, "op": ReduceOp.MAX}), comm)
    same = "".join(f"  rank {r}: all_reduce(4 elements of float32, SUM)\n" for r in range(world_size - 1))
    assert text == (
        f"all_reduce: the ranks made different calls\n{same}"
        f"  rank {world_size - 1}: all_reduce(8 elements of float32, MAX)\n"
        "Every rank has to make the same calls in the same order, with the same dtypes and sizes.\n"
        "The communicator 'main' has dropped what was under way, and goes on with the next call."
    )
    with pytest.raises(CommDisagreement) as caught:
        differing(comm, "barrier", {}, {"name": "all_reduce"})
    assert isinstance(caught.value, RuntimeError)
    assert not comm.is_broken


def some(values, name):
    """Return some of the values, other ones for each operation, or all of them in a stress test."""
    return values if IS_STRESS else values[OPERATIONS.index(name) % 4 :: 4]


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("name", OPERATIONS)
@distributed(world_size=SIZES, timeout=within(60))
def test_an_operation_against_others(name, rank, world_size):
    comm = made()
    for other in some(OPERATIONS, name):
        if other != name:
            text = demand_one_error(lambda other=other: differing(comm, name, {}, {"name": other}), comm)
            assert f"{name}(" in text
            assert f"{other}(" in text


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "barrier"])
@distributed(world_size=SIZES, timeout=within(60))
def test_an_operation_with_other_arguments(name, rank, world_size):
    comm, others = made(), [{"numel": n} for n in (0, 5, 300_000)] + [{"dtype": dtype} for dtype in DTYPES[1:]]
    others += [{"numel": 300_000, "dtype": torch.int32}]
    others += [{"root": 1}] * (name in ROOTED) + [{"op": op} for op in OPS[1:] if name in REDUCING]
    for other in some(others, name):
        demand_one_error(lambda other=other: differing(comm, name, {}, other), comm)
        demand_one_error(lambda other=other: differing(comm, name, {"numel": 200_000}, other | {"numel": 1}), comm)


@pytest.mark.slow
@distributed(world_size=SIZES)
def test_messages_that_differ(rank, world_size):
    comm = made()

    def exchange(sent, awaited):
        if rank < 2:
            begin(comm, "send", **sent) if rank == 0 else begin(comm, "recv", **awaited)
        comm.barrier(False)

    text = demand_one_error(lambda: exchange({"numel": 4}, {"numel": 5}), comm)
    assert text == (
        "send and recv: rank 0 sends 4 elements of float32, but rank 1 expects 5 elements of float32\n"
        "Pass tensors of the same dtype and size to both.\n"
        "The communicator 'main' has dropped what was under way, and goes on with the next call."
    )
    text = demand_one_error(lambda: exchange({}, {"dtype": torch.int32}), comm)
    assert "rank 0 sends 4 elements of float32, but rank 1 expects 4 elements of int32" in text
    demand_one_error(lambda: exchange({"numel": 4_000_000}, {}), comm)
    demand_one_error(lambda: exchange({}, {"numel": 4_000_000}), comm)
    demand_one_error(lambda: begin(comm, "ring", numel=4 + rank).wait() or comm.barrier(False), comm)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_rank_that_waits_for_nobody_hears_of_a_disagreement_in_its_next_operation(rank):
    comm = made()
    if rank < 2:
        with pytest.raises(CommDisagreement):
            begin(comm, "all_reduce", numel=4 + rank)
    dist.barrier()
    if rank == 2:
        with pytest.raises(CommDisagreement):
            comm.send(torch.ones(4), 0, async_op=True)
    comm.barrier(False)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_rank_that_computes_hears_of_two_disagreements_between_the_others(rank):
    comm = made()
    for number in range(2):
        if rank < 2:
            begun = begin(comm, ("send", "recv")[rank], numel=4 + number + rank, async_op=True)
            with pytest.raises(CommDisagreement):  # a sender hears of it in its next operation
                begun.wait() if rank else comm.recv(torch.ones(1), 1, async_op=False)
    dist.barrier()
    if rank == 2:
        with pytest.raises(CommDisagreement, match="rank 0 sends 5 elements of float32, but rank 1 expects 6"):
            comm.barrier(False)
    comm.barrier(False)


@pytest.mark.slow
@distributed(world_size=SIZES)
def test_windows_and_works_that_differ(rank, world_size):
    comm = made()
    run = lambda: comm.window_allocate(64) if rank else comm.barrier(False)  # noqa: E731
    assert "window" in demand_one_error(run, comm)

    def works():
        begun = [begin(comm, "all_reduce", numel=4 + (rank == 1 and i == 2), async_op=True) for i in range(5)]
        for work in reversed(begun):
            work.wait()

    demand_one_error(works, comm)
    dropped = begin(comm, "all_reduce", numel=4 + rank, async_op=True)
    demand_one_error(lambda: comm.barrier(False), comm)
    with pytest.raises(CommDisagreement):
        dropped.wait()
    demand_one_error(lambda: begin(comm, "all_gather_v", numel=3 + (rank == 0)) and comm.barrier(False), comm)


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=SIZES, timeout=within(120))
def test_drawn_programs_in_which_one_operation_differs(rank, world_size):
    """``EASYDIST_SEEDS=7`` plays only the seed 7."""
    comm = made()
    for seed in range(examples(60)) if SEEDS is None else [SEEDS]:
        demand_one_error(lambda seed=seed: play(comm, seed), comm)


GLOO = {
    "size": ("all_reduce", {}, {"numel": 8}),
    "dtype": ("all_gather", {}, {"dtype": torch.int32}),
    "op": ("all_reduce", {"numel": 100_000}, {"numel": 100_000, "op": ReduceOp.MAX}),
    "root": ("broadcast", {}, {"root": 1}),
    "operation": ("gather", {}, {"name": "all_to_all"}),
    "empty": ("all_gather_v", {"numel": 0}, {"numel": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", GLOO)
@distributed(world_size=SIZES, timeout=within(60))
def test_waits_over_gloo_end_before_the_limit(what, rank, world_size):
    comm, (name, mine, other) = made(backend="gloo"), GLOO[what]
    text = demand_one_error(lambda: differing(comm, name, mine, other), comm, goes_on=False)
    assert text.endswith("The communicator 'main' is broken. recover() makes a new one of the ranks that are left.")
    assert f"  rank 0: {name}(" in text
    with pytest.raises(RuntimeError, match="is broken"):
        comm.barrier(False)


def all_to_all(comm):
    got = torch.zeros(comm.get_size(), 2).unbind()
    comm.all_to_all([*got], [torch.full((2,), float(comm.get_rank()))] * comm.get_size(), False)
    assert [part.tolist() for part in got] == [[r, r] for r in range(comm.get_size())]


def broadcast_parts(comm):
    got = [torch.full((n,), float(comm.get_rank() == 0)) for n in (3, 4)]
    comm.broadcast_parts(got, 0, async_op=False)
    assert [part.tolist() for part in got] == [[1] * 3, [1] * 4]


def batch(comm):
    rank, size = comm.get_rank(), comm.get_size()
    got, messages = torch.zeros(2), comm.batch_op_create()
    messages.send(torch.full((2,), float(rank)), (rank + 1) % size)
    messages.recv(got, (rank - 1) % size)
    messages.issue(async_op=False)
    assert got.tolist() == [(rank - 1) % size] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "slow"), [(all_to_all, [0]), (broadcast_parts, [0]), (batch, range(4))])
@distributed(world_size=[2, 4], timeout=within(60))
def test_a_status_tells_of_messages_that_are_not_posted_yet(operation, slow, rank):
    """Ranks are so slow after the beginning of an operation that all of them compare their statuses meanwhile."""
    comm, looks, has_looked = made(backend="gloo"), itertools.count(1), threading.Event()
    comm.barrier(False)

    def looking(statuses, look=Statuses._has_difference):
        found = look(statuses)
        if next(looks) == 4:
            has_looked.set()
        return found

    def slowly(*args, post=Gloo._post):
        assert has_looked.wait(within(20))
        return post(*args)

    with pytest.MonkeyPatch.context() as patch:
        if rank in slow:
            patch.setattr(Statuses, "_has_difference", looking)
            patch.setattr(Gloo, "_post", slowly)
        operation(comm)


@pytest.mark.slow
@distributed(world_size=SIZES, timeout=within(60))
def test_messages_over_gloo_that_differ(rank, world_size):
    comm = made(backend="gloo")

    def exchange():
        if rank < 2:
            begin(comm, "send", numel=4) if rank == 0 else begin(comm, "recv", numel=5)
        comm.barrier(False)

    text = demand_one_error(exchange, comm, goes_on=False)
    assert text.startswith("send and recv: rank 0 sends 4 elements of float32, but rank 1 expects 5 elements")


@pytest.mark.slow
@distributed(world_size=SIZES, timeout=within(60))
def test_headers_before_operations_over_gloo(rank, world_size):
    comm = made(backend="gloo", hints={"check": "1"})
    for name in OPERATIONS:
        for other in ({"numel": 5}, {"dtype": torch.int32}, {"name": "barrier"}):
            if name != "barrier" and (other.get("numel") is None or name in EQUAL):
                demand_one_error(lambda name=name, other=other: differing(comm, name, {}, other), comm)
    one, two = (made(f"hint {i}", "gloo") for i in range(2))
    asked = {"check": "1"}
    demand_one_error(lambda: one.all_reduce(torch.ones(4 + rank), ReduceOp.SUM, False, hints=asked), one)
    if rank < 2:
        send = lambda: two.send(torch.ones(4), 1, False, hints=asked)  # noqa: E731
        recv = lambda: two.recv(torch.ones(5), 0, False, hints=asked)  # noqa: E731
        with pytest.raises(CommDisagreement, match=r"rank 0: send\(4 elements of float32, dst=1\)"):
            recv() if rank else send()
    begin(two, "all_reduce")
