"""The reductions of the conformance test: each operation × dtype × size, compared with a fold in one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from easydist.testing.cases import BITWISE, OPS, REDUCED, SIZES, expect, small, uneven
from easydist.transport.comm import Collectives
from easydist.transport.reduce_op import ReduceOp

_ORACLE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _oracle(op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if op.type.name != "AVG":
        return functools.reduce(_ORACLE[op.type.name], parts)
    mean = torch.stack([part.double() for part in parts]).sum(0) / len(parts)
    return mean.to(parts[0].dtype)  # the conversion truncates toward zero


def _reductions() -> Iterator[tuple[torch.dtype, int, ReduceOp]]:
    """Yield every dtype with every operation, and every size."""
    yield from itertools.product(REDUCED, SIZES[:-1], OPS)
    whole = [dtype for dtype in REDUCED if not dtype.is_floating_point]
    yield from itertools.product([*whole, torch.bool], SIZES[2:3], BITWISE)
    yield torch.float32, SIZES[-1], ReduceOp.SUM
    yield torch.float16, SIZES[-1], ReduceOp.AVG


def all_reduce(comm: Collectives) -> None:
    """Check ``all_reduce``."""
    for dtype, numel, op in _reductions():
        tensor = small(comm.get_rank(), numel, dtype)
        comm.all_reduce(tensor, op, async_op=False)
        every = [small(r, numel, dtype) for r in range(comm.get_size())]
        expect(tensor, _oracle(op, every), "all_reduce", op, dtype, numel)


def all_reduce_from(comm: Collectives) -> None:
    """Check ``all_reduce_from``."""
    for dtype, numel, op in _reductions():
        every = [small(r, numel, dtype) for r in range(comm.get_size())]
        mine = every[comm.get_rank()].clone()
        output = torch.empty_like(mine)
        comm.all_reduce_from(output, mine, op, async_op=False)
        expect(output, _oracle(op, every), "all_reduce_from", op, dtype, numel)
        expect(mine, every[comm.get_rank()], "all_reduce_from, the input", op, dtype, numel)


def all_reduce_parts(comm: Collectives) -> None:
    """Check ``all_reduce_parts``."""
    for dtype, numel, op in _reductions():
        sizes = [numel, 0, 1, 2 * numel + 3]
        every = [[small(r + i, n, dtype) for r in range(comm.get_size())] for i, n in enumerate(sizes)]
        mine = [row[comm.get_rank()].clone() for row in every]
        outputs = [torch.empty_like(one) for one in mine]
        comm.all_reduce_parts(outputs, mine, op, async_op=False)
        for i, row in enumerate(every):
            expect(outputs[i], _oracle(op, row), "all_reduce_parts", op, dtype, sizes[i])
            expect(mine[i], row[comm.get_rank()], "all_reduce_parts, the input", op, dtype, sizes[i])


def reduce(comm: Collectives) -> None:
    """Check ``reduce``."""
    for dtype, numel, op in _reductions():
        every = [small(r, numel, dtype) for r in range(comm.get_size())]
        root = numel % comm.get_size()
        tensor = every[comm.get_rank()].clone()
        comm.reduce(tensor, root, op, async_op=False)
        want = _oracle(op, every) if comm.get_rank() == root else every[comm.get_rank()]
        expect(tensor, want, "reduce", op, dtype, numel, "root", root)


def reduce_scatter(comm: Collectives) -> None:
    """Check ``reduce_scatter``."""
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel, op in _reductions():
        inputs = [[small(100 * s + r, uneven(r, numel), dtype) for r in range(size)] for s in range(size)]
        output = torch.empty(uneven(rank, numel), dtype=dtype)
        comm.reduce_scatter(output, inputs[rank], op, async_op=False)
        want = _oracle(op, [row[rank] for row in inputs])
        expect(output, want, "reduce_scatter", op, dtype, numel)
        even = torch.empty(numel, dtype=dtype)
        comm.reduce_scatter_single(even, small(rank, numel * size, dtype), op, async_op=False)
        parts = [small(s, numel * size, dtype)[numel * rank : numel * (rank + 1)] for s in range(size)]
        expect(even, _oracle(op, parts), "reduce_scatter_single", op, dtype, numel)


def premultiplied(comm: Collectives) -> None:
    """Check ``PREMUL_SUM``, whose factors may differ between ranks, and which does not change its inputs."""
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, factor in (
        (torch.float32, 0.5),
        (torch.int64, 3),
        (torch.float64, torch.tensor([2.0, 4.0, 8.0]).double()),
    ):
        op = ReduceOp.PREMUL_SUM(factor * (rank + 1))
        every = [small(r, 3 * size, dtype) for r in range(size)]
        totals = [
            sum(part[3 * r : 3 * r + 3] * (factor * (s + 1)) for s, part in enumerate(every)) for r in range(size)
        ]
        mine, output = every[rank].clone(), torch.empty(3, dtype=dtype)
        if not isinstance(factor, torch.Tensor):
            comm.reduce_scatter_single(output, mine, op, async_op=False)
            expect(output, torch.as_tensor(totals[rank]), "reduce_scatter_single", op)
        comm.reduce_scatter(output, mine.split(3), op, async_op=False)
        expect(output, torch.as_tensor(totals[rank]), "reduce_scatter", op)
        first = mine[:3].clone()
        comm.reduce(first, 0, op, async_op=False)
        expect(first, torch.as_tensor(totals[0]) if rank == 0 else mine[:3], "reduce", op)
        first = mine[:3].clone()
        comm.all_reduce(first, op, async_op=False)
        expect(first, torch.as_tensor(totals[0]), "all_reduce", op)
        expect(mine, every[rank], "the input of", op)
