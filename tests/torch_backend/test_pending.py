"""Operations of ``easydist_shm`` that nobody waits for move on, so that a program that runs on gloo runs on it, too."""

import functools
import os
import random
import re
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import launching
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import easydist
from easydist.comms import ReduceOp, new_comm
from easydist.errors import CollectiveTimeout
from easydist.process_group import NAME
from easydist.shm import progress
from easydist.testing import distributed

SCRIPT = Path(__file__).parent.parent / "scripts" / "pending.py"
LIMIT = timedelta(seconds=launching.within(10))


def group(**options):
    return dist.new_group(backend=NAME, timeout=LIMIT, **options)


def store():
    return dist.distributed_c10d._get_default_store()


def busy(key):
    """Compute until another rank sets ``key``: this process is in no call of easydist."""
    until = time.monotonic() + LIMIT.total_seconds()
    while not store().check([key]):
        assert time.monotonic() < until, f"nobody set {key!r}"
        torch.ones(100, 100).mm(torch.ones(100, 100))


def ones(numel, count=1):
    return [torch.full((numel,), float(number)) for number in range(count)]


def all_reduce(made, tensors, rank):
    """Begin to reduce the tensors, on rank 1 before the others begin."""
    if rank != 1:
        store().wait(["begun"], LIMIT)
    works = [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]
    if rank == 1:
        store().set("begun", "1")
    return works


def wait(works, tensors, world_size):
    for work in works:
        work.wait()
    for number, tensor in enumerate(tensors):
        assert (tensor == number * world_size).all()


@pytest.mark.slow
@pytest.mark.parametrize(("numel", "count"), [(4, 5), (200_000, 1), (4_000_000, 2)], ids=["small", "0.8MB", "16MB"])
@distributed(world_size=launching.sampled([2, 3, 4]))
def test_a_rank_that_computes_holds_nobody_up(numel, count, rank, world_size):
    made, tensors = group(), ones(numel, count)
    works = all_reduce(made, tensors, rank)
    if rank == 1:
        busy("done")
    wait(works, tensors, world_size)
    if rank == 0:
        store().set("done", "1")
    dist.barrier()


@pytest.mark.slow
@distributed(world_size=launching.sampled([3, 2]))
def test_a_verb_before_the_waits(rank, world_size):
    made, tensors = group(), ones(4, 5)
    works = all_reduce(made, tensors, rank)
    if rank == 1:
        assert easydist.gather(torch.tensor([rank]), group=made).tolist() == list(range(world_size))
    wait(works, tensors, world_size)
    if rank != 1:
        assert easydist.gather(torch.tensor([rank]), group=made).tolist() == list(range(world_size))


@distributed(world_size=2)
def test_a_future_does_not_wait(rank):
    made, mine, theirs = group(), torch.ones(3), torch.zeros(3)
    if rank == 0:
        done = dist.all_reduce(mine, group=made, async_op=True).get_future()
        dist.send(torch.full((3,), 5.0), 1, group=made)
        assert done.then(lambda future: future.value()[0]).wait() is mine
    else:
        dist.recv(theirs, 0, group=made)
        dist.all_reduce(mine, group=made)
        assert theirs.tolist() == [5, 5, 5]
    assert mine.tolist() == [2, 2, 2]


@distributed(world_size=3)
def test_futures_whose_callbacks_wait_for_others(rank):
    made, tensors = group(), ones(50_000, 3)

    def reduce_next(number, future):
        if number < 3:
            begun = dist.all_reduce(tensors[number], group=made, async_op=True).get_future()
            return begun.then(lambda future: reduce_next(number + 1, future)).wait()
        return future.value()[0]

    assert reduce_next(0, None) is tensors[2]
    assert [tensor[0].item() for tensor in tensors] == [0, 3, 6]


@distributed(world_size=3)
def test_a_message_to_a_rank_that_computes_arrives(rank):
    made, tensors = group(), ones(2_000_000, 3)
    if rank == 0:
        works = [dist.irecv(tensors[peer], peer, group=made) for peer in (1, 2)]
        busy("sent/1")
        busy("sent/2")
        for work in works:
            work.wait()
        assert [tensor[-1].item() for tensor in tensors] == [0, 5, 6]
    else:
        dist.send(torch.full((2_000_000,), rank + 4.0), 0, group=made)
        store().set(f"sent/{rank}", "1")


@distributed(world_size=3)
def test_two_groups_in_opposite_orders(rank):
    one, other = group(), group()
    tensors, halves = ones(200_000, 8), [range(0, 8, 2), range(1, 8, 2)]
    begun = {}
    for number in [*halves[rank == 1], *halves[rank != 1]]:
        begun[number] = dist.all_reduce(tensors[number], group=(one, other)[number % 2], async_op=True)
    if rank == 2:
        busy("done")
    for number in range(8) if rank else reversed(range(8)):
        begun[number].wait()
    assert [tensor[-1].item() for tensor in tensors] == [3 * number for number in range(8)]
    if rank == 0:
        store().set("done", "1")


@pytest.mark.slow
@distributed(world_size=launching.sampled([3, 2]))
def test_many_threads(rank, world_size):
    """Each has a group of its own; every rank waits in another order, and lets some works end by themselves."""
    groups, failures = [group() for _ in range(4)], []

    def use(made, seed):
        draw = random.Random(seed + 100 * rank)
        try:
            tensors = ones(30_000, 30)
            works = [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]
            draw.shuffle(works)
            for work in works[:20]:
                work.wait()
            dist.barrier(group=made)
            assert all((tensor == world_size * number).all() for number, tensor in enumerate(tensors))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(made, seed)) for seed, made in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow
@distributed(world_size=2)
def test_several_threads_wait_for_one_operation(rank):
    made = group()
    for number in range(20):
        output, met = strided(torch.zeros(50_000)), []
        if rank == 1:
            store().wait([f"waiting/{number}"], LIMIT)
        work = dist.reduce_scatter(output, [torch.ones(50_000), torch.ones(50_000)], group=made, async_op=True)

        def wait_for(work=work, met=met, output=output):
            work.wait()
            met.append(output.sum().item())

        threads = [threading.Thread(target=wait_for) for _ in range(4)]
        for thread in threads:
            thread.start()
        store().set(f"waiting/{number}", "1")
        for thread in threads:
            thread.join()
        assert met == [100_000] * 4


def strided(tensor):
    return torch.zeros(2 * len(tensor))[::2].copy_(tensor)


@pytest.mark.slow
@distributed(world_size=3)
def test_join_with_inputs_as_uneven_as_can_be(rank):
    """``join`` begins an all_reduce that it never waits for."""
    model = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group())
    steps = [1, 6, 3][rank]
    with model.join():
        for _ in range(steps):
            model(torch.ones(1, 300)).sum().backward()
            model.zero_grad()
    seen = easydist.gather(torch.tensor([steps]))
    assert seen.tolist() == [1, 6, 3]


def names():
    return [thread.name for thread in threading.enumerate()]


@distributed(world_size=2)
def test_the_thread_ends_before_a_fork_and_is_back_after_it(rank):
    made, tensor = group(), torch.ones(500_000)
    if rank == 0:
        work = dist.all_reduce(tensor, group=made, async_op=True)
        before = progress.helper._thread
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gloo has threads
            child = os.fork()
        if not child:
            os._exit(len(progress.running) + ("easydist-progress" in names()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not before.is_alive()
        assert "easydist-progress" in names()
        store().set("forked", "1")
        busy("done")
        work.wait()
    else:
        store().wait(["forked"], LIMIT)
        dist.all_reduce(tensor, group=made)
        store().set("done", "1")
    assert tensor[-1].item() == 2


@pytest.mark.slow
@pytest.mark.parametrize("numel", [4, 4_000_000])
@distributed(world_size=launching.sampled([3, 2]))
def test_destroying_a_group_waits_for_its_collectives(numel, rank, world_size):
    made, tensors = group(), ones(numel, 4)
    if rank == 1:
        works = [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]
        store().set("begun", "1")
        dist.destroy_process_group(made)
    else:
        store().wait(["begun"], LIMIT)
        torch.ones(2000, 2000).mm(torch.ones(2000, 2000))
        works = [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]
    wait(works, tensors, world_size)


CASES = ["workers", "exit", "ctrl_c", "dead", "orphaned"]


@functools.cache
def pending():
    return launching.launched(SCRIPT, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_happens_while_operations_are_pending(case):
    rows, statuses = pending()[0][case]
    if case == "dead":
        assert [rows[rank]["errors"] for rank in (0, 2)] == [[["PeerLostError", 1]] * 4] * 2
        assert statuses == [0, -signal.SIGKILL, 0]
        return
    if case == "orphaned":
        # Its process and its store end at once: whichever is noticed first.
        lost = r"rank 0 is lost|the store through which the ranks"
        assert re.match(rf"PeerLostError: init_process_group: ({lost})", rows[1]["error"])
        return
    assert statuses == [0, 0], pending()[1]
    assert all(row["got"] == [2, 2, 2] for row in rows.values())
    assert all(not row["running"] for row in rows.values())
    if case == "workers":
        assert rows[1]["seen"] == [*range(8)] * 2


@pytest.mark.slow
@distributed(world_size=3)
def test_a_timeout_tells_a_rank_that_has_begun_from_one_that_has_not(rank):
    made, tensor = group(), torch.ones(500_000)
    made.set_timeout(timedelta(seconds=1))
    works = [dist.all_reduce(tensor, group=made, async_op=True) for _ in range(2 if rank < 2 else 0)]
    if rank == 0:
        store().wait(["begun"], LIMIT)
        with pytest.raises(
            CollectiveTimeout, match=r"1 of 3 ranks did not(?s:.*)rank 1: has begun it, but waits for"
        ) as info:
            works[0].wait()
        assert info.value.missing == (2,)
        store().set("done", "1")
    elif rank == 1:
        store().set("begun", "1")
        busy("done")
    dist.barrier()


@pytest.mark.slow
@distributed(world_size=launching.sampled([3, 2]))
def test_a_communicators_rank_that_computes_holds_nobody_up(rank, world_size):
    comm, tensors = new_comm("shm", torch.device("cpu"), "main", timeout=LIMIT), ones(200_000, 6)
    if rank != 1:
        store().wait(["begun"], LIMIT)
    works = [comm.all_reduce(tensor, ReduceOp.SUM, True) for tensor in tensors]
    if rank == 1:
        store().set("begun", "1")
        busy("done")
    wait(works, tensors, world_size)
    if rank == 0:
        store().set("done", "1")
    dist.barrier()
    comm.finalize()
