"""Operations begun with ``async_op=True`` go on and end while the caller computes."""

import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from easydist.comms import ReduceOp, new_comm
from easydist.testing import distributed

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "shm"])
OPERATIONS = {
    "all_reduce": lambda comm, data: comm.all_reduce(data, ReduceOp.SUM, True),
    "broadcast": lambda comm, data: comm.broadcast(data, 1, True),
    "recv": lambda comm, data: comm.recv(data, 1, True) if comm.get_rank() == 0 else comm.send(data, 0, True),
}


@BACKENDS
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("numel", [3, 1 << 19])
@distributed(world_size=2)
def test_an_operation_ends_while_its_rank_computes(rank, backend, operation, numel):
    comm, store = new_comm(backend, CPU, "main"), dist.distributed_c10d._get_default_store()
    key = f"{operation}/{backend}/{numel}"
    if rank == 1:
        store.wait([key])  # rank 0 computes by now
        OPERATIONS[operation](comm, torch.full((numel,), 2.0)).wait()
    else:
        work = OPERATIONS[operation](comm, data := torch.ones(numel))
        assert not work.is_completed()
        store.set(key, "")
        matrix = torch.eye(50)
        while not work.is_completed():
            matrix = matrix @ matrix
        assert data.unique().tolist() == [3.0 if operation == "all_reduce" else 2.0]
        work.wait()
    comm.barrier(False)
    comm.finalize()


@pytest.mark.parametrize(("backend", "hints"), [("shm", None), ("gloo", None), ("gloo", {"check": "1"})])
@distributed(world_size=3)
def test_ranks_may_wait_for_large_reductions_in_any_order(rank, backend, hints):
    """Over gloo they take two rounds."""
    comm = new_comm(backend, CPU, "main", hints=hints)
    every = [torch.full((300_000,), 10.0**i) for i in range(4)]
    works = [comm.all_reduce(data, ReduceOp.SUM, True) for data in every]
    for i in range(4):
        works[(i + rank) % 4].wait()
    assert [data.unique().tolist() for data in every] == [[3 * 10.0**i] for i in range(4)]
    comm.finalize()


@BACKENDS
@distributed(world_size=2)
def test_works_that_are_dropped_end_and_keep_nothing(rank, backend):
    comm = new_comm(backend, CPU, "main")
    released = threading.Semaphore(0)
    for _ in range(100):
        weakref.finalize(data := torch.ones(1000), released.release)
        comm.all_reduce(data, ReduceOp.SUM, True)
        del data
    comm.all_reduce(last := torch.ones(1), ReduceOp.SUM, False)
    assert last.item() == 2
    for _ in range(100):
        assert released.acquire(timeout=60)
    comm.finalize()
