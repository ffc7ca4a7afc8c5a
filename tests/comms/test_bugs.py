"""The faults of torchcomms' own gloo backend, and the semantics that its page leaves out."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import in_a_child, within

import easydist
from easydist.comms import CommTimeout, RedOpType, ReduceOp, new_comm, objcol
from easydist.testing import distributed

CPU = torch.device("cpu")
BACKENDS = ["gloo", "shm"]
LIMIT = timedelta(seconds=60)
on_both = pytest.mark.parametrize("backend", BACKENDS)


def made(backend, name="main", **options):
    return new_comm(backend, CPU, name, timeout=timedelta(seconds=within(30)), **options)


def until(condition):
    """Wait for something that happens by itself."""
    deadline = time.monotonic() + within(20)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def total(comm):
    tensor = torch.ones(1)
    comm.all_reduce(tensor, ReduceOp.SUM, False)
    return tensor.item()


@pytest.mark.slow
@on_both
@distributed(world_size=3)
def test_what_the_original_gets_wrong(rank, backend):
    comm = made(backend)

    # reduce_scatter_single overwrites the caller's input
    data, part = torch.arange(6.0) + rank, torch.empty(2)
    comm.reduce_scatter_single(part, data, ReduceOp.SUM, False)
    assert torch.equal(data, torch.arange(6.0) + rank)
    assert part.tolist() == [6 * rank + 3.0, 6 * rank + 6.0]

    # reduce leaves partial sums on the other ranks
    data = torch.arange(1000.0) + rank
    comm.reduce(data, 1, ReduceOp.SUM, False)
    assert torch.equal(data, torch.arange(1000.0) * 3 + 3 if rank == 1 else torch.arange(1000.0) + rank)

    # PREMUL_SUM multiplies the caller's tensor
    data = torch.arange(3.0)
    comm.reduce(data, 0, ReduceOp.PREMUL_SUM(2.0), False)
    assert torch.equal(data, torch.arange(3.0) * 6 if rank == 0 else torch.arange(3.0))

    # split([]) of some ranks breaks the next split; whether they call or not
    for others_call in (True, False):
        if rank < 2 or others_call:
            part_of = comm.split([0, 1] if rank < 2 else [], "two")
            assert (part_of is None) == (rank == 2)
            assert part_of is None or total(part_of) == 2
        everybody = comm.split([2, 0, 1], "all")
        assert everybody.get_rank() == [1, 2, 0][rank]
        assert total(everybody) == 3

    # a batch between some ranks breaks every later collective
    if rank < 2:
        batch, output = comm.batch_op_create(), torch.empty(1)
        batch.send(torch.tensor([float(rank)]), 1 - rank)
        batch.recv(output, 1 - rank)
        for _ in range(2):
            batch.issue(async_op=False)
            assert output.item() == 1 - rank
    assert total(comm) == 3

    # a second communicator of the same name, or on the same store, hangs
    store = dist.group.WORLD.get_group_store()
    same = [made(backend), made(backend, store=store), made(backend, store=store)]
    assert [total(each) for each in same] == [3, 3, 3]

    # a wrong output dtype is reinterpreted
    with pytest.raises(RuntimeError, match="all tensors must have one dtype"):
        comm.all_gather_single(torch.empty(3), torch.ones(1, dtype=torch.int32), False)

    # all_to_all_single in place is silently wrong
    with pytest.raises(RuntimeError, match="must not share memory"):
        comm.all_to_all_single(data, data, False)
    for each in same:
        each.finalize()
    assert total(comm) == 3  # names were the same, communicators are not


@pytest.mark.slow
@on_both
@distributed(world_size=2)
def test_operations_end_by_themselves(rank, backend):
    comm, data = made(backend), torch.arange(4.0)
    output = torch.empty(4)
    # is_completed() of a send or recv stays False until wait()
    work = comm.send(data, 1, True) if rank == 0 else comm.recv(output, 0, True)
    until(work.is_completed)
    assert rank == 0 or torch.equal(output, data)

    # also behind one that does not end for a long time
    late, sent = torch.empty(1), torch.empty(4)
    works = [comm.recv(late, 1 - rank, True) for _ in range(8)]
    other = comm.all_reduce(total_of := torch.ones(3), ReduceOp.SUM, True)
    until(other.is_completed)
    assert total_of.tolist() == [2, 2, 2]
    for number in range(8):
        comm.send(torch.full((1,), float(number)), 1 - rank, True)
    for each in reversed(works):
        each.wait()
        each.wait_blocking()
    assert all(each.is_completed() for each in works)

    # works handed to c10d need get_future
    future = comm.all_reduce(sent.fill_(1), ReduceOp.SUM, True).get_future()
    assert future.wait()[0] is sent
    assert sent.tolist() == [2] * 4
    assert comm.barrier(False).get_future().wait() == []
    for output in (torch.zeros(6), torch.zeros(2, 3).t()):  # also after messages that were waited for
        if rank == 0:
            assert comm.send(torch.arange(6.0), 1, False).get_future().wait() == []
        else:
            work = comm.recv(output, 0, False)
            assert work.get_future().wait()[0] is output
            assert output.flatten().tolist() == [*range(6)]
            assert work.is_completed()
            work.wait_blocking()

    # a work that is dropped blocks its process
    if rank == 0:
        work = comm.all_reduce(torch.ones(5), ReduceOp.SUM, True)
        del work
        gc.collect()
        dist.barrier()
    else:
        dist.barrier()  # comes only if rank 0 is not blocked
        comm.all_reduce(torch.ones(5), ReduceOp.SUM, False)

    # isend and irecv to each other deadlock
    big, got = torch.ones(1 << 20), torch.empty(1 << 20)
    pair = [comm.send(big, 1 - rank, True), comm.recv(got, 1 - rank, True)]
    for each in pair:
        each.wait()
    assert torch.equal(got, big)
    comm.finalize()


@pytest.mark.slow
@on_both
@distributed(world_size=2)
def test_steps_of_several_operations_do_not_mix(rank, backend):
    """Each rank waits in another order; gloo's later steps were posted in that order once."""
    comm = made(backend)
    tensors = [torch.full((n,), float(n)) for n in (3, 4, 1000, 5)]
    works = [comm.all_reduce(tensor, ReduceOp.SUM, True) for tensor in tensors]
    for work in works if rank == 0 else works[::-1]:
        work.wait()
    assert [set(tensor.tolist()) for tensor in tensors] == [{6.0}, {8.0}, {2000.0}, {10.0}]


@pytest.mark.slow
@on_both
@distributed(world_size=2)
def test_a_timeout_says_who_and_is_raised_every_time(rank, backend):
    comm = made(backend)
    comm.barrier(False)
    other = comm.split([0, 1], "other")
    failures = []
    comm.register_abort_hook(lambda error: error.no_such_name)
    comm.register_abort_hook(lambda: failures.append(None))  # torchcomms' hooks take nothing
    comm.register_abort_hook(failures.append)
    if rank == 0:
        work = comm.recv(torch.empty(1), 1, True, timeout=timedelta(milliseconds=100))
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"(?s)^recv in .*'main'.* timed out; .*rank.* 1.* within 0.1 s"
            ) as error:
                work.wait()
        assert isinstance(error.value, TimeoutError)
        assert work.is_completed()
        with pytest.raises(CommTimeout, match=r"^barrier: the communicator 'main' is broken: recv") as later:
            comm.barrier(False)
        assert later.value.missing == error.value.missing == (1,)
        assert comm.is_broken
        assert [type(failure) for failure in failures] == [type(None), type(error.value)]
        assert (comm.get_rank(), comm.get_size(), comm.get_name()) == (0, 2, "main")
    dist.barrier()
    assert total(other) == 2  # others are not disturbed, and a broken one can be split
    child = comm.split([0, 1], "again")
    assert total(child) == 2
    comm.finalize()


@on_both
@distributed(world_size=2)
def test_the_longest_time_limit_is_not_over_at_once(rank, backend):
    comm, tensor = made(backend), torch.ones(1)
    comm.all_reduce(tensor, ReduceOp.SUM, False, timeout=timedelta.max)
    assert tensor.item() == 2


TYPES = [torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.slow
@on_both
@distributed(world_size=3)
def test_reductions_are_right_where_they_are_defined(rank, backend):
    comm = made(backend)
    for dtype in TYPES:
        negative = torch.tensor([-7 if rank == 0 else 0, 100, rank], dtype=dtype)
        comm.all_reduce(negative, ReduceOp.AVG, False)
        whole = not dtype.is_floating_point
        assert negative.tolist() == ([-2, 100, 1] if whole else torch.tensor([-7 / 3, 100, 1]).to(dtype).tolist())
    large = torch.tensor([60000.0], dtype=torch.float16)  # three of them are no float16
    comm.all_reduce(large, ReduceOp.AVG, False)
    assert large.item() == 60000
    for op, want in ((ReduceOp.BAND, 0), (ReduceOp.BOR, 7), (ReduceOp.BXOR, 7)):
        for dtype in (torch.uint8, torch.int64, torch.uint64):
            flags = torch.tensor([1 << rank], dtype=torch.uint8).to(dtype)
            comm.all_reduce(flags, op, False)
            assert flags.to(torch.int64).item() == want
        with pytest.raises(RuntimeError, match=f"Cannot use {op} with non-integral dtype".replace(".", r"\.")):
            comm.all_reduce(torch.ones(1), op, False)
    one = torch.tensor([rank == 0])
    comm.all_reduce(one, ReduceOp.BOR, False)
    assert one.item()
    for tensor, op, text in (
        (torch.ones(1, dtype=torch.bool), ReduceOp.AVG, r"Cannot use ReduceOp\.AVG with torch\.bool"),
        (torch.ones(1, dtype=torch.int32), ReduceOp.PREMUL_SUM(0.5), "times this factor is torch.float32"),
        (torch.ones(3), ReduceOp.PREMUL_SUM(torch.ones(2, 3)), "factor's shape"),
        (torch.ones(1, dtype=torch.complex64), ReduceOp.MAX, "complex"),
    ):
        with pytest.raises(RuntimeError, match=text):
            comm.all_reduce(tensor, op, False)
    leaf = torch.ones(1, requires_grad=True)
    comm.all_reduce(leaf, ReduceOp.AVG, False)
    for wrong in (RedOpType.SUM, "sum", None):
        with pytest.raises(TypeError, match=r"op must be an easydist\.comms\.ReduceOp"):
            comm.all_reduce(one, wrong, False)
    assert total(comm) == 3


@pytest.mark.slow
@on_both
@distributed(world_size=2)
def test_two_threads_work_on_two_communicators_and_not_on_one(rank, backend):
    first, second = made(backend, "first"), made(backend, "second")
    if rank == 0:
        inside = threading.Thread(target=first.barrier, args=[False], name="the other")
        inside.start()
        until(lambda: first._operations.busy)
        with pytest.raises(
            RuntimeError, match=r"(?s)^all_reduce: another call .*the other: barrier.*MainThread: all_red"
        ):
            total(first)
        assert total(second) == 2
    else:
        assert total(second) == 2  # rank 0 has met its error before
        first.barrier(False)
    if rank == 0:
        inside.join()
    sums = {}
    comms = {"first": first, "second": second}
    threads = [
        threading.Thread(target=lambda n=n, c=c: sums.update({n: [total(c) for _ in range(50)]}))
        for n, c in comms.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {"first": [2] * 50, "second": [2] * 50}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distributed(world_size=2)
def test_finalize_completes_the_collectives_under_way(backend, rank):
    """A rank drops its work and finalizes; the other one still gets the result."""
    comm, store = made(backend), dist.distributed_c10d._get_default_store()
    large = torch.ones(1 << 22)
    if rank == 0:
        comm.all_reduce(large, ReduceOp.SUM, True)
        store.set("finalizes", "")
    else:
        store.wait(["finalizes"])
        comm.all_reduce(large, ReduceOp.SUM, False)
        assert large.unique().tolist() == [2.0]
    comm.finalize()


@pytest.mark.slow
@on_both
@distributed(world_size=2)
def test_a_forked_child_does_not_end_the_communicator_of_its_parent(rank, backend):
    comm = made(backend)
    assert total(comm) == 2
    if rank == 0:
        work = comm.all_reduce(part := torch.ones(1 << 20), ReduceOp.SUM, True)
        calls = [
            lambda: work.wait() if work.is_completed() else None,
            work.get_future,
            lambda: total(comm),
            lambda: comm.send(torch.ones(1), 1, False),
            lambda: objcol.all_gather_object(comm, [None, None], rank),
            lambda: comm.window_allocate(8),
            lambda: easydist.gather(1, group=comm),
            comm.recover,
            lambda: comm.split([0, 1], "both", timeout=timedelta(seconds=0.1)),
        ]
        for call in calls:
            told = in_a_child(call)
            assert told.startswith("this process is a child of a rank of the group"), (calls.index(call), told)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        comm.all_reduce(part := torch.ones(1 << 20), ReduceOp.SUM, False)
    assert part.unique().tolist() == [2]
    assert total(comm) == 2


@pytest.mark.slow
@distributed(world_size=2)
def test_a_forked_child_does_not_collect_the_groups_of_its_parent():
    """A group in a cycle that the parent has not collected: its destructor would join threads that the child lacks."""
    gc.disable()
    try:
        cycle = [dist.new_group([0, 1])]
        dist.barrier(cycle[0])
        dist.destroy_process_group(cycle[0])
        cycle.append(cycle)
        del cycle
        assert in_a_child(lambda: (gc.collect(), exit_with("collected"))) == "collected"
    finally:
        gc.enable()


def exit_with(text):
    raise SystemExit(text)
