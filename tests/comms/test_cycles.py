"""Ranks that wait for one another in messages and collectives of one communicator, so that none can go on."""

import io
import multiprocessing
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import fsspec.asyn
import pytest
import torch
import torch.distributed as dist
from differing import begin, demand_one_error, error_of
from launching import examples, sampled, within
from tqdm import tqdm

from easydist.comms import CommDisagreement, ReduceOp, new_comm, wrap
from easydist.errors import DisagreementError
from easydist.testing import distributed

SIZES = sampled([2, 3, 4])
SEEDS = int(os.environ["EASYDIST_SEEDS"]) if "EASYDIST_SEEDS" in os.environ else None
LARGE = 4_000_000
"""Elements that no pipe holds: their sender waits for the receiver."""


def made(name="main", backend="shm"):
    return new_comm(backend, torch.device("cpu"), name, timeout=timedelta(seconds=within(60)))


def ring(comm, name, numel=4, is_async=False):
    """All ranks begin a message with the next rank, or the one before."""
    work = begin(comm, name, numel=numel, async_op=is_async)
    work.wait()


def one_apart(comm, name, numel=4, is_async=False):
    """Rank 0 begins a message with its neighbour, and the others a collective."""
    begin(comm, name if comm.get_rank() == 0 else "all_reduce", numel=numel, async_op=is_async).wait()


def batch(comm, name, numel=4, is_async=False):
    """Rank 0 begins a batch in which the others take no part."""
    begin(comm, "ring" if comm.get_rank() == 0 else "barrier", numel=numel, async_op=is_async).wait()


CASES = {
    "recv, recv": (ring, "recv", 4),
    "send, send": (ring, "send", LARGE),
    "recv, all_reduce": (one_apart, "recv", 4),
    "send, all_reduce": (one_apart, "send", LARGE),
    "batch, barrier": (batch, "recv", 4),
}
PAIRS = [(case, bool(number % 2) ^ is_async) for number, case in enumerate(CASES) for is_async in (False, True)]
"""The cases, and whether the works are asynchronous: every second pair has each case once."""


def text_of(comm, case, is_async, goes_on):
    """Return the error of all ranks in this case."""
    run, name, numel = CASES[case]
    text = demand_one_error(lambda: run(comm, name, numel, is_async), comm, goes_on)
    assert "ranks wait for one another forever\n" in text
    assert f"  rank 0: {name}({numel} elements of float32, {'dst=1' if name == 'send' else 'src='}" in text
    return text


@pytest.mark.slow
@distributed(world_size=SIZES, timeout=within(60))
def test_ranks_in_a_circle_raise_before_the_limit(rank, world_size):
    comm = made()
    for case, is_async in PAIRS:
        text = text_of(comm, case, is_async, goes_on=True)
        assert text.endswith("The communicator 'main' has dropped what was under way, and goes on with the next call.")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "is_async"), sampled(PAIRS))
@distributed(world_size=SIZES, timeout=within(60))
def test_over_gloo(case, is_async, rank, world_size):
    text = text_of(made(backend="gloo"), case, is_async, goes_on=False)
    assert text.endswith("The communicator 'main' is broken. recover() makes a new one of the ranks that are left.")


@pytest.mark.slow
@distributed(world_size=[2, 3], timeout=within(60))
def test_over_a_wrapped_group(rank, world_size):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=within(60)))
    for _ in range(2):  # the communicators of one group are told apart
        comm = wrap(group)
        begin(comm, "all_reduce")
    text = demand_one_error(lambda: one_apart(comm, "recv"), comm, goes_on=False)
    assert "recv and all_reduce: ranks wait for one another forever\n  rank 0: recv(4 elements" in text
    again = wrap(dist.new_group(backend="gloo", timeout=timedelta(seconds=within(60))))
    text = demand_one_error(lambda: begin(again, "all_reduce", numel=4 + rank), again, goes_on=False)
    assert "all_reduce: the ranks made different calls" in text


@pytest.mark.slow
@distributed(world_size=[3, 4], timeout=within(60))
def test_a_rank_outside_of_the_circle_is_told_in_its_next_operation(rank, world_size):
    comm = made()
    text = demand_one_error(lambda: comm.recv(torch.zeros(2), 1 - rank, False) if rank < 2 else hear(comm), comm)
    assert text == (
        "recv: ranks wait for one another forever\n"
        "  rank 0: recv(2 elements of float32, src=1)\n"
        "  rank 1: recv(2 elements of float32, src=0)\n"
        + "".join(f"  rank {other}: takes no part in it\n" for other in range(2, world_size))
        + "Every recv needs a send of the other rank, which must not wait for this one before; batches need no order.\n"
        "The communicator 'main' has dropped what was under way, and goes on with the next call."
    )


def hear(comm):
    comm.barrier(False)


def late(seconds=1.2):
    """Wait for longer than the others need to find a circle."""
    threading.Event().wait(seconds)


@pytest.mark.slow
@distributed(world_size=3, timeout=within(60))
def test_only_the_operation_counts_for_which_a_rank_waits(rank, world_size):
    """Rank 2 waits for rank 0, of which a barrier that it does not wait for needs rank 2; rank 1 is late."""
    comm, data = made(), torch.full((3,), float(rank))
    if rank == 0:
        work = comm.barrier(True)
        comm.recv(data, 1, False)
        comm.send(data, 2, False)
        work.wait()
    elif rank == 1:
        late()
        comm.send(data, 0, False)
        comm.barrier(False)
    else:
        comm.recv(data, 0, False)
        comm.barrier(False)
    assert data.tolist() == [1, 1, 1]


@pytest.mark.slow
@distributed(world_size=3, timeout=within(60))
def test_after_an_error_ranks_wait_for_one_that_has_not_heard_of_it(rank, world_size):
    """Ranks 0 and 1 have begun all that the other one needs, but nothing moves before rank 2 has raised the error."""
    comm = made()
    if rank == 2:
        late(3.0)
    assert error_of(lambda: comm.all_reduce(torch.ones(3 + rank), ReduceOp.SUM, False))
    outputs = list(torch.zeros(3, 2))
    comm.all_to_all(outputs, [torch.full((2,), float(rank))] * 3, False)
    assert torch.stack(outputs)[:, 0].tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distributed(world_size=3, timeout=within(60))
def test_ranks_that_wait_in_one_call_for_a_late_one(backend, rank, world_size):
    comm = made(backend=backend)
    if rank == 2:
        late(2.5)
    begin(comm, "all_reduce")
    begin(comm, "all_to_all")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distributed(world_size=2, timeout=within(60))
def test_threads_of_progress_bars_and_loaders_break_no_circle(backend, rank, world_size):
    """They begin no operations, unlike any other thread, as in the next test."""
    comm, queue = made(backend=backend), multiprocessing.Queue()
    bar = tqdm(total=1, disable=None, file=io.StringIO())
    queue.put("starts the thread that feeds the pipe")
    fsspec.asyn.get_loop()
    assert {"QueueFeederThread", "fsspecIO"} <= {thread.name for thread in threading.enumerate()}
    assert "TMonitor" in {type(thread).__name__ for thread in threading.enumerate()}
    text = demand_one_error(lambda: ring(comm, "recv", is_async=True), comm, goes_on=backend == "shm")
    assert "ranks wait for one another forever\n" in text
    bar.close()
    queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("receives_in", ["thread", "main thread"])
@distributed(world_size=2, timeout=within(60))
def test_a_thread_that_may_send_later_breaks_a_circle(receives_in, rank, world_size):
    """Both ranks receive, and send from another thread, more than a second later."""
    import easydist.process_group  # noqa: F401

    group = dist.new_group(backend="easydist_shm", timeout=timedelta(seconds=within(60)))
    got, failed = torch.zeros(3), threading.Event()

    def receive():
        try:
            dist.recv(got, 1 - rank, group=group)
        except BaseException:
            failed.set()
            raise

    def send():
        assert not failed.wait(1.2)
        dist.send(torch.full((3,), float(rank)), 1 - rank, group=group)

    one, other = (receive, send) if receives_in == "thread" else (send, receive)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(one)
        other()
        begun.result()
    assert got.tolist() == [1 - rank] * 3
    dist.destroy_process_group(group)


@pytest.mark.slow
@distributed(world_size=SIZES, timeout=within(60))
def test_a_message_that_another_one_precedes_is_no_circle(rank, world_size):
    """Waits that end: rank 0 has begun what the others need, or begins it once the others have come."""
    comm = made()
    data, total = torch.full((LARGE,), float(rank)), torch.ones(3)
    if rank == 0:
        sent = comm.send(data, 1, True)
        comm.all_reduce(total, ReduceOp.SUM, False)
        sent.wait()
    else:
        work = comm.all_reduce(total, ReduceOp.SUM, True)
        if rank == 1:
            comm.recv(data, 0, False)
            assert data.sum() == 0
        work.wait()
    assert total.tolist() == [world_size] * 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distributed(world_size=SIZES, timeout=within(60))
def test_splits_with_other_lists(backend, rank, world_size):
    """Ranks 0 and 1 are members of both lists; a third one waits for the first two, and hears of it even afterwards."""
    comm, everyone, store = made(backend=backend), [*range(world_size)], dist.distributed_c10d._get_default_store()
    for is_late, mine in enumerate(({0: [0, 1], 1: [1, 0]}, {0: everyone, 1: everyone[::-1]})):
        if rank > 1 and is_late:
            store.wait([f"{backend}: raised by {one}" for one in (0, 1)])
        with pytest.raises(CommDisagreement) as caught:
            comm.split(mine.get(rank, everyone), "part")
        assert str(caught.value) == (
            "split: ranks wait for one another forever, since their lists differ\n"
            f"  rank 0: split({mine[0]}, 'part')\n"
            f"  rank 1: split({mine[1]}, 'part')\n"
            "Every member has to pass the same list, in the same order.\n"
            "The communicator was not created."
        )
        if is_late:
            store.set(f"{backend}: raised by {rank}", "")
        begin(comm, "all_reduce")
    part = comm.split(everyone, "again")
    begin(part, "all_reduce")


@pytest.mark.slow
@distributed(world_size=[2, 3], timeout=within(60))
def test_a_process_group(rank, world_size):
    import easydist.process_group  # noqa: F401

    group = dist.new_group(backend="easydist_shm", timeout=timedelta(seconds=within(60)))
    total = torch.ones(3)
    with pytest.raises(DisagreementError, match="wait for one another") as caught:
        dist.recv(total, 1, group=group) if rank == 0 else dist.all_reduce(total, group=group)
    assert "  rank 0: recv(3 elements of float32, src=1)\n  rank 1: all_reduce(3 elements of float32, SUM)" in str(
        caught.value
    )
    dist.all_reduce(total.fill_(1), group=group)
    assert total.tolist() == [world_size] * 3
    dist.destroy_process_group(group)


def drawn(seed, size):
    """Draw a program: messages between two ranks, and collectives; each rank makes its steps in this order."""
    draw = random.Random(seed)
    return [
        (*draw.sample(range(size), 2), draw.choice([0, 3, 50_000, LARGE]))
        if draw.random() < 0.6
        else (None, draw.choice(["all_reduce", "barrier", "gather", "broadcast"]), draw.choice([1, 4000]))
        for _ in range(draw.randrange(4, 12))
    ]


def play(comm, program, seed):
    """Run this rank's part, some of it asynchronously, now and then late; return the messages that have come."""
    rank, draw, works, came = comm.get_rank(), random.Random(seed + comm.get_rank()), [], []
    late = threading.Event()
    for one, other, numel in program:
        if one is None:
            works.append(begin(comm, other, numel=numel, async_op=draw.random() < 0.3))
        elif rank == one:
            works.append(comm.send(torch.full((numel,), float(numel)), other, draw.random() < 0.3))
        elif rank == other:
            came.append(torch.zeros(numel))
            works.append(comm.recv(came[-1], one, draw.random() < 0.3))
        if draw.random() < 0.3:
            late.wait(draw.choice([0.01, 0.2, 0.6]))
    for work in works:
        work.wait()
    comm.barrier(False)
    return came


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=SIZES, timeout=within(300))
def test_drawn_programs_end_over_gloo(rank, world_size):
    comm = made(backend="gloo")
    for seed in sampled(range(examples(3))) if SEEDS is None else [SEEDS]:
        program = drawn(seed, world_size)
        assert all((tensor == tensor.numel()).all() for tensor in play(comm, program, seed)), seed


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=SIZES, timeout=within(300))
def test_drawn_programs_end_if_they_can(rank, world_size):
    """With two steps exchanged on one rank, a program ends on all ranks, or all raise the same error."""
    comm = made()
    for seed in sampled(range(examples(8))) if SEEDS is None else [SEEDS]:
        program = drawn(seed, world_size)
        assert all((tensor == tensor.numel()).all() for tensor in play(comm, program, seed)), seed
        if rank == seed % world_size:
            place = random.Random(seed).randrange(len(program) - 1)
            program[place : place + 2] = program[place : place + 2][::-1]
        texts = [None] * world_size
        dist.all_gather_object(texts, error_of(lambda program=program, seed=seed: play(comm, program, seed)))
        assert len({*texts}) == 1, (seed, texts)
