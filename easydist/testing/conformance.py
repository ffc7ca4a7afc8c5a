"""What every communicator has to do: each operation × dtype × size × root, against what one process would compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from easydist.testing.pool import default_pool
from easydist.transport.comm import TorchComm
from easydist.transport.reduce_op import ReduceOp

MOVED = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
)
"""Dtypes that every communicator moves, bit for bit."""

REDUCED = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Dtypes that every communicator reduces."""

SIZES = (0, 1, 7, 40_001)
"""Numbers of elements: none, one, odd, large and odd."""

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


def check_comm(make: Callable[[int, int], TorchComm], world_sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Run the battery over communicators made by ``make``.

    Args:
        make: Takes (rank, world size), called on each rank inside a fresh gloo default group; returns the communicator
            to check. Has to be importable by other processes.
        world_sizes: For each of them all operations are checked.

    Raises:
        ExceptionGroup: What the ranks raised; an ``AssertionError`` names operation, dtype, size and root.

    Example:
        >>> from easydist.testing import check_comm
        >>> check_comm(solo, world_sizes=[1])
    """
    for world_size in world_sizes:
        default_pool().run(run_battery, world_size, make)


def solo(rank: int, world_size: int) -> TorchComm:
    """The communicator of a world of one, for ``check_comm``."""
    from easydist.transport.backends.solo import Solo

    return TorchComm(Solo(), "solo")


def default_group(rank: int, world_size: int) -> TorchComm:
    """The communicator over the default process group, for ``check_comm``."""
    from easydist.state import communicators

    return communicators().met().control


def run_battery(make: Callable[[int, int], TorchComm], rank: int, world_size: int) -> None:
    """All checks, on one rank."""
    comm = make(rank, world_size)
    assert (comm.get_rank(), comm.get_size()) == (rank, world_size)
    for check in (
        _all_gather,
        _all_gather_upto,
        _all_gather_v,
        _all_gather_parts,
        _all_reduce,
        _all_reduce_from,
        _reduce,
        _reduce_scatter,
        _all_to_all,
        _broadcast,
        _broadcast_parts,
        _gather,
        _scatter,
        _send,
    ):
        check(comm)
    _sends_in_flight(comm)
    _barrier(comm)
    _asynchronous(comm)
    _misuse(comm)
    comm.finalize()


def sample(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different values on every rank, in every dtype: random bits where data moves, with NaN payloads and -0.0."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype)


def _small(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sums and products every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(1, 4, (numel,), generator=generator).to(dtype)


def _expect(got: torch.Tensor, want: torch.Tensor, *what: object) -> None:
    same = got.dtype == want.dtype and got.shape == want.shape
    same = same and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert same, f"{' '.join(map(str, what))}: got {got}, want {want}"


def _cases() -> Iterator[tuple[torch.dtype, int]]:
    return itertools.product(MOVED, SIZES)


def _all_gather(comm: TorchComm) -> None:
    for dtype, numel in _cases():
        output = torch.empty(comm.get_size() * numel, dtype=dtype)
        comm.all_gather_single(output, sample(comm.get_rank(), numel, dtype), async_op=False)
        want = torch.cat([sample(r, numel, dtype).view(torch.uint8) for r in range(comm.get_size())]).view(dtype)
        _expect(output, want, "all_gather_single", dtype, numel)


def _uneven(rank: int, numel: int) -> int:
    """Sizes that differ between ranks; rank 1 has nothing."""
    return 0 if rank == 1 else numel + rank


def _all_gather_v(comm: TorchComm) -> None:
    for dtype, numel in _cases():
        outputs = [torch.empty(_uneven(r, numel), dtype=dtype) for r in range(comm.get_size())]
        comm.all_gather_v(outputs, sample(comm.get_rank(), _uneven(comm.get_rank(), numel), dtype), async_op=False)
        for r, output in enumerate(outputs):
            _expect(output, sample(r, _uneven(r, numel), dtype), "all_gather_v", dtype, numel, "from", r)


def _all_gather_parts(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel in _cases():
        lengths = [[_uneven(r, numel), 3, _uneven(r + 1, numel)] for r in range(size)]
        outputs = [[torch.empty(lengths[r][i], dtype=dtype) for r in range(size)] for i in range(3)]
        comm.all_gather_parts(outputs, [sample(rank + i, lengths[rank][i], dtype) for i in range(3)], async_op=False)
        for i, r in itertools.product(range(3), range(size)):
            _expect(outputs[i][r], sample(r + i, lengths[r][i], dtype), "all_gather_parts", dtype, numel, "from", r, i)


_ORACLE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _all_reduce(comm: TorchComm) -> None:
    for dtype, numel, op in itertools.product(REDUCED, SIZES, OPS):
        tensor = _small(comm.get_rank(), numel, dtype)
        comm.all_reduce(tensor, op, async_op=False)
        every = [_small(r, numel, dtype) for r in range(comm.get_size())]
        _expect(tensor, functools.reduce(_ORACLE[op.type.name], every), "all_reduce", op, dtype, numel)


def _all_reduce_from(comm: TorchComm) -> None:
    for dtype, numel, op in _reductions():
        every = [_small(r, numel, dtype) for r in range(comm.get_size())]
        mine = every[comm.get_rank()].clone()
        output = torch.empty_like(mine)
        comm.all_reduce_from(output, mine, op, async_op=False)
        _expect(output, functools.reduce(_ORACLE[op.type.name], every), "all_reduce_from", op, dtype, numel)
        _expect(mine, every[comm.get_rank()], "all_reduce_from, the input", op, dtype, numel)


def _reductions() -> Iterator[tuple[torch.dtype, int, ReduceOp]]:
    """Every dtype with every operation, and every size."""
    yield from itertools.product(REDUCED, SIZES[:-1], OPS)
    yield torch.float32, SIZES[-1], ReduceOp.SUM


def _reduce(comm: TorchComm) -> None:
    for dtype, numel, op in _reductions():
        every = [_small(r, numel, dtype) for r in range(comm.get_size())]
        root = numel % comm.get_size()
        tensor = every[comm.get_rank()].clone()
        comm.reduce(tensor, root, op, async_op=False)
        want = functools.reduce(_ORACLE[op.type.name], every) if comm.get_rank() == root else every[comm.get_rank()]
        _expect(tensor, want, "reduce", op, dtype, numel, "root", root)


def _reduce_scatter(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel, op in _reductions():
        inputs = [[_small(100 * s + r, _uneven(r, numel), dtype) for r in range(size)] for s in range(size)]
        output = torch.empty(_uneven(rank, numel), dtype=dtype)
        comm.reduce_scatter(output, inputs[rank], op, async_op=False)
        want = functools.reduce(_ORACLE[op.type.name], [row[rank] for row in inputs])
        _expect(output, want, "reduce_scatter", op, dtype, numel)
        even = torch.empty(numel, dtype=dtype)
        comm.reduce_scatter_single(even, _small(rank, numel * size, dtype), op, async_op=False)
        parts = [_small(s, numel * size, dtype)[numel * rank : numel * (rank + 1)] for s in range(size)]
        _expect(even, functools.reduce(_ORACLE[op.type.name], parts), "reduce_scatter_single", op, dtype, numel)


def _all_gather_upto(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for numel in SIZES:
        rows = torch.zeros((size, numel + size), dtype=torch.uint8)
        mine = sample(rank, _uneven(rank, numel), torch.uint8)
        rows[rank, : len(mine)] = mine
        comm.all_gather_upto(rows, len(mine), async_op=False)
        for r in range(size):
            want = sample(r, _uneven(r, numel), torch.uint8)
            _expect(rows[r, : len(want)], want, "all_gather_upto", numel, "from", r)


def _all_to_all(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel in _cases():
        inputs = [sample(100 * rank + r, _uneven(rank + r, numel), dtype) for r in range(size)]
        outputs = [torch.empty(_uneven(r + rank, numel), dtype=dtype) for r in range(size)]
        comm.all_to_all(outputs, inputs, async_op=False)
        for r, output in enumerate(outputs):
            _expect(
                output, sample(100 * r + rank, _uneven(r + rank, numel), dtype), "all_to_all", dtype, numel, "from", r
            )


def _broadcast(comm: TorchComm) -> None:
    for (dtype, numel), root in itertools.product(_cases(), range(comm.get_size())):
        tensor = sample(comm.get_rank(), numel, dtype)
        comm.broadcast(tensor, root, async_op=False)
        _expect(tensor, sample(root, numel, dtype), "broadcast", dtype, numel, "root", root)


def _broadcast_parts(comm: TorchComm) -> None:
    for (dtype, numel), root in itertools.product(_cases(), range(comm.get_size())):
        tensors = [sample(comm.get_rank() + i, n, dtype) for i, n in enumerate((numel, 0, 3, numel))]
        comm.broadcast_parts(tensors, root, async_op=False)
        for i, tensor in enumerate(tensors):
            _expect(tensor, sample(root + i, len(tensor), dtype), "broadcast_parts", dtype, numel, "root", root, i)


def _gather(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for (dtype, numel), root in itertools.product(_cases(), range(size)):
        outputs = [torch.empty(_uneven(r, numel), dtype=dtype) for r in range(size)] if rank == root else []
        comm.gather(outputs, sample(rank, _uneven(rank, numel), dtype), root, async_op=False)
        for r, output in enumerate(outputs):
            _expect(output, sample(r, _uneven(r, numel), dtype), "gather", dtype, numel, "root", root, "from", r)


def _scatter(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for (dtype, numel), root in itertools.product(_cases(), range(size)):
        inputs = [sample(100 * root + r, _uneven(r, numel), dtype) for r in range(size)] if rank == root else []
        output = torch.empty(_uneven(rank, numel), dtype=dtype)
        comm.scatter(output, inputs, root, async_op=False)
        _expect(output, sample(100 * root + rank, _uneven(rank, numel), dtype), "scatter", dtype, numel, "root", root)


def _send(comm: TorchComm) -> None:
    """Round a ring; even ranks send first, so that no send has to return before it has been received."""
    rank, size = comm.get_rank(), comm.get_size()
    last, next_ = (rank - 1) % size, (rank + 1) % size
    for dtype, numel in _cases() if size > 1 else ():
        output = torch.empty(_uneven(last, numel), dtype=dtype)
        send = functools.partial(comm.send, sample(rank, _uneven(rank, numel), dtype), next_, async_op=False)
        recv = functools.partial(comm.recv, output, last, async_op=False)
        for step in (send, recv) if rank % 2 == 0 else (recv, send):
            step()
        _expect(output, sample(last, _uneven(last, numel), dtype), "send", dtype, numel, "from", last)


def _sends_in_flight(comm: TorchComm) -> None:
    """Messages from rank 0 to each other arrive in order, around a collective, and however they are waited for."""
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


def _barrier(comm: TorchComm) -> None:
    for _ in range(3):
        comm.barrier(async_op=False)


def _asynchronous(comm: TorchComm) -> None:
    """Several operations under way, waited for in the opposite order."""
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


def _misuse(comm: TorchComm) -> None:
    """Wrong arguments are refused on the rank that gives them, before anything is sent; the communicator works on."""
    size = comm.get_size()
    one, wrong = torch.zeros(1), torch.zeros(size + 1)
    grid = torch.zeros(3, 2).t()
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
        lambda: comm.send(grid, (comm.get_rank() + 1) % size, async_op=False),
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
