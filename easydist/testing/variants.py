"""Further checks of the conformance test: more methods, tensors of any strides, and operations in the background."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from easydist.testing import reductions
from easydist.testing.cases import cases, expect, sample, small, wanted
from easydist.transport.comm import Collectives
from easydist.transport.reduce_op import ReduceOp
from easydist.transport.work import TorchWork


def _flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def singles(comm: Collectives) -> None:
    """Check the methods that pass one tensor for all ranks."""
    rank, size = comm.get_rank(), comm.get_size()
    for (dtype, numel), root in itertools.product(cases(), range(size)):
        output, mine = torch.empty(size * numel, dtype=dtype), sample(rank, numel, dtype)
        comm.gather_single(output, mine, root, async_op=False)
        if rank == root:
            expect(output, _flat([wanted(r, numel, dtype) for r in range(size)]), "gather_single", dtype, numel)
    for dtype, numel in cases():
        inputs = [[sample(100 * s + r, numel, dtype) for r in range(size)] for s in range(size)]
        output, want = torch.empty(size * numel, dtype=dtype), _flat([row[rank] for row in inputs])
        comm.all_to_all_single(output, _flat(inputs[rank]), async_op=False)
        expect(output, want, "all_to_all_single", dtype, numel)
        _uneven_rows(comm, dtype, numel)


def _uneven_rows(comm: Collectives, dtype: torch.dtype, numel: int) -> None:
    """Check rows of different numbers: rank s sends r + s to rank r, and all tensors have a spare row."""
    rank, size, width = comm.get_rank(), comm.get_size(), min(numel, 5)
    parts = [[sample(100 * s + r, (r + s) * width, dtype) for r in range(size)] for s in range(size)]
    counts = [r + rank for r in range(size)]
    spare = sample(9, width, dtype)
    output = _flat([torch.empty(sum(counts) * width, dtype=dtype), spare]).view(-1, max(1, width))
    mine = _flat([*parts[rank], spare]).view(-1, max(1, width))
    if width:
        comm.all_to_all_v_single(output, mine, counts, counts, async_op=False)
        want = _flat([*(row[rank] for row in parts), spare]).view(-1, width)
        expect(output, want, "all_to_all_v_single", dtype, width)


def lists(comm: Collectives) -> None:
    """Check ``all_gather`` and ``reduce_scatter_v``."""
    rank, size = comm.get_rank(), comm.get_size()
    for dtype, numel in cases():
        outputs = [torch.empty(numel, dtype=dtype) for _ in range(size)]
        comm.all_gather(outputs, sample(rank, numel, dtype), async_op=False)
        for r, output in enumerate(outputs):
            expect(output, wanted(r, numel, dtype), "all_gather", dtype, numel, "from", r)
    lengths = [(r + 1) % 3 for r in range(size)]
    output = torch.empty(lengths[rank])
    comm.reduce_scatter_v(output, [torch.full((n,), 1.0 + rank) for n in lengths], ReduceOp.SUM, async_op=False)
    expect(output, torch.full((lengths[rank],), size * (size + 1) / 2), "reduce_scatter_v")


def batches(comm: Any) -> None:
    """Check batches: each rank sends two messages to each other one, and the batch is issued twice."""
    rank, size = comm.get_rank(), comm.get_size()
    if not hasattr(comm, "batch_op_create") or size == 1:
        return
    for dtype, numel in cases():
        batch = comm.batch_op_create()
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        for i, r in itertools.product(range(2), (r for r in range(size) if r != rank)):
            batch.send(sample(100 * rank + 10 * r + i, numel, dtype), r)
            batch.recv(outputs.setdefault((i, r), torch.empty(numel, dtype=dtype)), r)
        for async_op in (False, True):
            batch.issue(async_op).wait()
            for (i, r), output in outputs.items():
                expect(output, wanted(100 * r + 10 * rank + i, numel, dtype), "batch", dtype, numel, "from", r)
                output.zero_()


def _grid(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a three by two tensor, stored column by column."""
    return small(rank, 6, dtype).view(2, 3).t()


def strides(comm: Collectives) -> None:
    """Check that inputs and outputs can have any strides."""
    rank, size = comm.get_rank(), comm.get_size()
    for dtype in (torch.float32, torch.int16, torch.complex64):
        mine, every = _grid(rank, dtype), [_grid(r, dtype) for r in range(size)]
        outputs = [torch.zeros(2, 3, dtype=dtype).t() for _ in range(size)]
        comm.all_gather(outputs, mine, async_op=False)
        _same(outputs, every, "all_gather", dtype)
        total = mine.clone(memory_format=torch.preserve_format)
        comm.all_reduce(total, ReduceOp.SUM, async_op=False)
        _same([total], [torch.stack(every).sum(0).to(dtype)], "all_reduce", dtype)
        from_last = mine.clone(memory_format=torch.preserve_format)
        comm.broadcast(from_last, size - 1, async_op=False)
        _same([from_last], [every[-1]], "broadcast", dtype)
        swapped = [torch.zeros(2, 3, dtype=dtype).t() for _ in range(size)]
        comm.all_to_all(swapped, [mine + r for r in range(size)], async_op=False)
        _same(swapped, [tensor + rank for tensor in every], "all_to_all", dtype)
        gathered = torch.zeros(2, 3 * size, dtype=dtype).t()
        comm.all_gather_single(gathered, mine, async_op=False)
        _same([gathered], [torch.cat(every)], "all_gather_single", dtype)
        part = torch.zeros(2, 3, dtype=dtype).t()
        comm.reduce_scatter_single(part, torch.cat([mine] * size), ReduceOp.SUM, async_op=False)
        _same([part], [total], "reduce_scatter_single", dtype)


def _same(got: list[torch.Tensor], want: list[torch.Tensor], *what: object) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other), f"{what} of tensors that are not contiguous: got {one}, want {other}"


class _Asynchronous:
    """A communicator that begins every operation with ``async_op=True``, and then waits for it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        return self._begun(method) if not name.startswith("get_") and name != "batch_op_create" else method

    def _begun(self, method: Callable[..., TorchWork]) -> Callable[..., TorchWork]:
        def call(*args: Any, **kwargs: Any) -> TorchWork:
            work = method(*args, **(kwargs | {"async_op": True}))
            work.wait()
            assert work.is_completed()
            return work

        return call


def in_background(comm: Collectives) -> None:
    """Check the same operations with ``async_op=True``."""
    other: Any = _Asynchronous(comm)
    for check in (singles, lists, strides, reductions.reduce, reductions.premultiplied):
        check(other)
