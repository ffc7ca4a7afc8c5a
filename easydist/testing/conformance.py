"""The conformance test for communicators: each operation × dtype × size × root, compared with one process's result."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from easydist.testing import reductions, variants
from easydist.testing.cases import MOVED, SIZES, cases, drawing, expect, sample, uneven, wanted
from easydist.testing.pool import default_pool
from easydist.transport.comm import Collectives
from easydist.transport.reduce_op import ReduceOp

_LATE = 0.02
"""Seconds after which one rank comes to a barrier."""

__all__ = ["MOVED", "check_comm", "default_group", "run_battery", "sample", "solo"]


def check_comm(make: Callable[[int, int], Collectives], world_sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Test the communicators created by ``make``.

    Args:
        make: A function of (rank, world size), called on each rank inside a fresh gloo default group, that returns the
            communicator to check. Other processes must be able to import it.
        world_sizes: The numbers of ranks with which to check all operations.

    Raises:
        ExceptionGroup: The errors of the ranks; an ``AssertionError`` names operation, dtype, size and root.

    Example:
        >>> from easydist.testing import check_comm
        >>> check_comm(solo, world_sizes=[1])
    """
    for world_size in world_sizes:
        default_pool().run(run_battery, world_size, make)


def solo(rank: int, world_size: int) -> Collectives:
    """Create the communicator of a world of one, for ``check_comm``."""
    from easydist.transport.backends.solo import Solo

    return Collectives(Solo(), "solo")


def default_group(rank: int, world_size: int) -> Collectives:
    """Create the communicator over the default process group, for ``check_comm``."""
    from easydist.state import communicators

    return communicators().met().control


def run_battery(make: Callable[[int, int], Collectives], rank: int, world_size: int) -> None:
    """Run all checks on one rank."""
    comm = make(rank, world_size)
    assert (comm.get_rank(), comm.get_size()) == (rank, world_size)
    for check in (
        _all_gather,
        _all_gather_upto,
        _all_gather_v,
        _all_gather_parts,
        reductions.all_reduce,
        reductions.all_reduce_from,
        reductions.all_reduce_parts,
        reductions.reduce,
        reductions.reduce_scatter,
        reductions.premultiplied,
        _all_to_all,
        _broadcast,
        _broadcast_parts,
        _multicast,
        _gather,
        _scatter,
        _send,
        variants.singles,
        variants.lists,
        variants.batches,
        variants.strides,
    ):
        check(comm)
    with drawing(torch.int16, torch.float32):
        variants.in_background(comm)
    _sends_in_flight(comm)
    _barrier(comm)
    _asynchronous(comm)
    _misuse(comm)
    comm.finalize()


def _all_gather(comm: Collectives) -> None:
    for dtype, numel in cases():
        output = torch.empty(comm.get_size() * numel, dtype=dtype)
        comm.all_gather_single(output, sample(comm.get_rank(), numel, dtype), async_op=False)
        want = torch.cat([wanted(r, numel, dtype).view(torch.uint8) for r in range(comm.get_size())]).view(dtype)
        expect(output, want, "all_gather_single", dtype, numel)


def _all_gather_v(comm: Collectives) -> None:
    for dtype, numel in cases():
        outputs = [torch.empty(uneven(r, numel), dtype=dtype) for r in range(comm.get_size())]
        comm.all_gather_v(outputs, sample(comm.get_rank(), uneven(comm.get_rank(), numel), dtype), async_op=False)
        for r, output in enumerate(outputs):
            expect(output, wanted(r, uneven(r, numel), dtype), "all_gather_v", dtype, numel, "from", r)


def _all_gather_parts(comm: Collectives) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel in cases():
        sizes = [[uneven(r, numel) for r in range(size)], None, [uneven(r + 1, numel) for r in range(size)]]
        counts = [[numel] * size if each is None else each for each in sizes]
        outputs = [torch.empty(sum(each), dtype=dtype) for each in counts]
        mine = [sample(rank + i, counts[i][rank], dtype) for i in range(3)]
        comm.all_gather_parts(outputs, mine, sizes, async_op=False)
        for i, output in enumerate(outputs):
            for r, part in enumerate(output.split(counts[i])):
                expect(part, wanted(r + i, counts[i][r], dtype), "all_gather_parts", dtype, numel, "from", r, i)


def _all_gather_upto(comm: Collectives) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for numel in SIZES:
        rows = torch.zeros((size, numel + size), dtype=torch.uint8)
        mine = sample(rank, uneven(rank, numel), torch.uint8)
        rows[rank, : len(mine)] = mine
        comm.all_gather_upto(rows, len(mine), async_op=False)
        for r in range(size):
            want = wanted(r, uneven(r, numel), torch.uint8)
            expect(rows[r, : len(want)], want, "all_gather_upto", numel, "from", r)


def _all_to_all(comm: Collectives) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel in cases():
        inputs = [sample(100 * rank + r, uneven(rank + r, numel), dtype) for r in range(size)]
        outputs = [torch.empty(uneven(r + rank, numel), dtype=dtype) for r in range(size)]
        comm.all_to_all(outputs, inputs, async_op=False)
        for r, output in enumerate(outputs):
            expect(
                output, wanted(100 * r + rank, uneven(r + rank, numel), dtype), "all_to_all", dtype, numel, "from", r
            )


def _broadcast(comm: Collectives) -> None:
    for (dtype, numel), root in itertools.product(cases(), range(comm.get_size())):
        tensor = sample(comm.get_rank(), numel, dtype)
        comm.broadcast(tensor, root, async_op=False)
        expect(tensor, wanted(root, numel, dtype), "broadcast", dtype, numel, "root", root)


def _broadcast_parts(comm: Collectives) -> None:
    for (dtype, numel), root in itertools.product(cases(), range(comm.get_size())):
        tensors = [sample(comm.get_rank() + i, n, dtype) for i, n in enumerate((numel, 0, 3, numel))]
        comm.broadcast_parts(tensors, root, async_op=False)
        for i, tensor in enumerate(tensors):
            expect(tensor, wanted(root + i, len(tensor), dtype), "broadcast_parts", dtype, numel, "root", root, i)


def _multicast(comm: Collectives) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for (dtype, numel), root in itertools.product(cases(), range(size)):
        for count in range(3):
            ranks = [(root + 1 + k) % size for k in range(count)]
            tensor = sample(rank, numel, dtype)
            comm.multicast(tensor, root, ranks, async_op=False)
            if rank in (root, *ranks):
                expect(tensor, wanted(root, numel, dtype), "multicast", dtype, numel, "root", root, "ranks", ranks)


def _gather(comm: Collectives) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for (dtype, numel), root in itertools.product(cases(), range(size)):
        outputs = [torch.empty(uneven(r, numel), dtype=dtype) for r in range(size)] if rank == root else []
        comm.gather(outputs, sample(rank, uneven(rank, numel), dtype), root, async_op=False)
        for r, output in enumerate(outputs):
            expect(output, wanted(r, uneven(r, numel), dtype), "gather", dtype, numel, "root", root, "from", r)


def _scatter(comm: Collectives) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for (dtype, numel), root in itertools.product(cases(), range(size)):
        inputs = [sample(100 * root + r, uneven(r, numel), dtype) for r in range(size)] if rank == root else []
        output = torch.empty(uneven(rank, numel), dtype=dtype)
        comm.scatter(output, inputs, root, async_op=False)
        expect(output, wanted(100 * root + rank, uneven(rank, numel), dtype), "scatter", dtype, numel, "root", root)


def _send(comm: Collectives) -> None:
    """Check sends around a ring. Even ranks send first, so a send may block until it is received."""
    rank, size = comm.get_rank(), comm.get_size()
    last, next_ = (rank - 1) % size, (rank + 1) % size
    for dtype, numel in cases() if size > 1 else ():
        output = torch.empty(uneven(last, numel), dtype=dtype)
        send = functools.partial(comm.send, sample(rank, uneven(rank, numel), dtype), next_, async_op=False)
        recv = functools.partial(comm.recv, output, last, async_op=False)
        for step in (send, recv) if rank % 2 == 0 else (recv, send):
            step()
        expect(output, wanted(last, uneven(last, numel), dtype), "send", dtype, numel, "from", last)


def _sends_in_flight(comm: Collectives) -> None:
    """Check that messages from rank 0 arrive in order, around a collective, whatever the order of the waits."""
    rank, size = comm.get_rank(), comm.get_size()
    outputs = [torch.empty(5, dtype=torch.int64) for _ in range(4)]
    works = [
        comm.send(torch.full((5,), 10 * i + r), r, async_op=True) if rank == 0 else comm.recv(output, 0, async_op=True)
        for r in (range(1, size) if rank == 0 else [rank])
        for i, output in enumerate(outputs)
    ]
    total = torch.ones(1)
    comm.all_reduce(total, ReduceOp.SUM, async_op=False)
    for work in reversed(works):
        work.wait()
    assert total.item() == size, f"a collective while messages are under way: got {total}"
    for i, output in enumerate(outputs if rank else []):
        assert output.tolist() == [10 * i + rank] * 5, f"message {i} under way: got {output}"


def _barrier(comm: Collectives) -> None:
    """Check that no rank leaves before the last one has come. The ranks of a host have one clock."""
    size = comm.get_size()
    for late in range(size):
        if comm.get_rank() == late:
            time.sleep(_LATE)
        came = time.monotonic()
        comm.barrier(async_op=False)
        times = torch.empty(2 * size, dtype=torch.float64)
        comm.all_gather_single(times, torch.tensor([came, time.monotonic()], dtype=torch.float64), async_op=False)
        assert times[::2].max() <= times[1::2].min(), f"barrier: a rank left before rank {late} had come"


def _asynchronous(comm: Collectives) -> None:
    """Check several operations under way that are waited for in reverse order."""
    rank, size = comm.get_rank(), comm.get_size()
    outputs = [torch.empty(size * 5, dtype=torch.int64) for _ in range(4)]
    works = [
        comm.all_gather_single(output, torch.full((5,), 10 * i + rank), async_op=True)
        for i, output in enumerate(outputs)
    ]
    for i, (work, output) in reversed(list(enumerate(zip(works, outputs, strict=True)))):
        work.wait()
        work.wait()
        assert work.is_completed()
        assert output.tolist() == [10 * i + r for r in range(size) for _ in range(5)], f"asynchronous {i}: got {output}"


def _misuse(comm: Collectives) -> None:
    """Check that wrong arguments raise on their rank before anything is sent, and the communicator still works."""
    size = comm.get_size()
    one, wrong = torch.zeros(1), torch.zeros(size + 1)  # several elements of grid share memory
    grid = torch.zeros(1).expand(3)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_gather_single(wrong, one, async_op=False),
        lambda: comm.all_gather_single(torch.zeros(size, dtype=torch.int32), one, async_op=False),
        lambda: comm.all_gather_v([one] * (size + 1), one, async_op=False),
        lambda: comm.all_reduce(grid, ReduceOp.SUM, async_op=False),
        lambda: comm.all_to_all([one] * (size + 1), [one] * size, async_op=False),
        lambda: comm.broadcast(one, size, async_op=False),
        lambda: comm.broadcast(grid, 0, async_op=False),
        lambda: comm.gather([one] * (size + 1), one, comm.get_rank(), async_op=False),
        lambda: comm.scatter(one, [one] * (size + 1), comm.get_rank(), async_op=False),
        lambda: comm.send(one, size, async_op=False),
        lambda: comm.send(one, comm.get_rank(), async_op=False),
        lambda: comm.send(torch.zeros(1, device="meta"), (comm.get_rank() + 1) % size, async_op=False),
        lambda: comm.recv(one, -1, async_op=False),
        lambda: comm.recv(one, comm.get_rank(), async_op=False),
        lambda: comm.recv(grid, (comm.get_rank() + 1) % size, async_op=False),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError:
            continue
        raise AssertionError(f"misuse {number} was not refused")
    total = torch.ones(1)
    comm.all_reduce(total, ReduceOp.SUM, async_op=False)
    assert total.item() == size, "the communicator does not work after a refusal"
