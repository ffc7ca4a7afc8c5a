"""The buffers for every rank's part of the leaves, and the joining of the parts into results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from easydist import memory
from easydist.agreement.frames import Agreement
from easydist.data import packing
from easydist.data.leaves import Leaves
from easydist.transport.comm import Collectives
from easydist.verbs.buckets import Shapes, packed_like, packed_nbytes, resized


def from_payloads(
    agreement: Agreement, leaves: Leaves, shapes: Sequence[Shapes], dims: Sequence[int]
) -> list[torch.Tensor]:
    """Return the leaves that came with the headers, concatenated over ranks."""
    if agreement.uniform and not any(dims):
        return agreement.packed().joined()
    return join([agreement.payload(rank) for rank in range(len(shapes))], leaves.layout.dtypes, shapes, dims)


class Receiving(NamedTuple):
    """The buffers for the parts of one bucket, and the function that turns the parts into results."""

    buffers: Sequence[torch.Tensor]
    """One buffer per rank."""

    results: Callable[[], list[torch.Tensor]]
    """The function that returns the results, to be called when all parts have arrived."""


def receiving(
    comm: Collectives, tensors: Sequence[torch.Tensor], shapes: Sequence[Shapes], dims: Sequence[int]
) -> Receiving:
    """Return memory for every rank's part of the leaves of one bucket.

    A single leaf along dim 0 arrives directly in the result. Leaves along dim 0 with the same shapes on all ranks
    arrive in rows of equal length, and are copied once. All others are concatenated from one packed buffer per rank.
    """
    dtypes = [tensor.dtype for tensor in tensors]
    if not any(dims) and len(tensors) == 1:
        return _in_place(comm, dtypes[0], [shape for (shape,) in shapes])
    if not any(dims) and all(row == shapes[0] for row in shapes):
        return _in_rows(comm, dtypes, shapes[0])
    buffers = [packed_like(comm, dtypes, row) for row in shapes]
    return Receiving(buffers, lambda: join(buffers, dtypes, shapes, dims))


def _in_place(comm: Collectives, dtype: torch.dtype, shapes: Shapes) -> Receiving:
    rows = [shape[0] for shape in shapes]
    whole = memory.empty(resized(shapes[0], 0, sum(rows)), dtype, comm.get_device())
    return Receiving([packing.as_bytes(part) for part in whole.split(rows)], lambda: [whole])


def _in_rows(comm: Collectives, dtypes: Sequence[torch.dtype], shapes: Shapes) -> Receiving:
    nbytes = packed_nbytes(dtypes, shapes)
    width = (nbytes // 16 + 1) * 16  # 16 is a multiple of every item size
    rows = memory.empty((comm.get_size(), width), torch.uint8, comm.get_device())
    return Receiving(rows[:, :nbytes].unbind(), lambda: packing.unpack_rows(rows, dtypes, shapes))


def join(
    buffers: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Shapes],
    dims: Sequence[int],
) -> list[torch.Tensor]:
    """Concatenate the parts of all ranks, leaf by leaf.

    Args:
        buffers: One packed buffer per rank.
        dtypes: The dtypes of the leaves.
        shapes: ``[r][i]``, the shape of leaf i in buffer r.
        dims: The dimension along which each leaf is concatenated.

    Cost: one copy per leaf.
    """
    parts = [packing.unpack(buffer, dtypes, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    return [_cat(column, dim) for column, dim in zip(zip(*parts, strict=True), dims, strict=True)]


def _cat(column: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    dtype = column[0].dtype
    if packing.is_copyable(dtype):
        return torch.cat(column, dim)
    return torch.cat([part.view(packing.BITS[dtype.itemsize]) for part in column], dim).view(dtype)


def at_home(leaves: Leaves, comm: Collectives, results: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the results by index, moved to the devices of their leaves if the communicator uses another device."""
    device = comm.get_device()
    if (leaves.is_cpu and device.type == "cpu") or all(leaves.tensors[i].device == device for i in results):
        return results
    return {i: result.to(leaves.tensors[i].device) for i, result in results.items()}
