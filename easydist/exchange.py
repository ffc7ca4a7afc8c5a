"""What the tensor verbs share: calls over trees, sizes, and which communicator carries which leaf."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from easydist import wire
from easydist.agree import Agreement, Call
from easydist.comms import Communicators, TorchComm
from easydist.leaves import Leaves

LARGE = 1 << 18
"""Bytes from which a leaf travels alone: by then copying it into a packed buffer costs more than a message."""


def dims_of(leaves: Leaves, dim: int, operation: str, scalars: bool = False) -> list[int]:
    """``dim`` as a non-negative index into each leaf's shape.

    Args:
        leaves: The tree.
        dim: Counted from the end where negative.
        operation: For the error.
        scalars: Make leaves without dimensions into vectors of one element first.

    Raises:
        ValueError: A leaf has no such dimension.
    """
    if scalars:
        leaves.tensors = [t.reshape(1) if t.ndim == 0 else t for t in leaves.tensors]
    for path, tensor in zip(leaves.paths, leaves.tensors, strict=True):
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"{operation}: {path or 'the tensor'} of shape {tuple(tensor.shape)} has no dim {dim}")
    return [dim % tensor.ndim for tensor in leaves.tensors]


def sizes_along(comms: Communicators, tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> list[list[int]]:
    """``[r][i]``: the size of rank r's tensor i along its dimension.

    Cost: one all-gather of 8 bytes per tensor.
    """
    mine = torch.tensor([tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)], dtype=torch.int64)
    output = torch.empty((comms.size, len(mine)), dtype=torch.int64)
    comms.control.all_gather_single(output, mine, async_op=False)
    return output.tolist()


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """``shape`` with another size along ``dim``.

    Example:
        >>> resized((2, 3, 4), 1, 9)
        [2, 9, 4]
    """
    return [*shape[:dim], size, *shape[dim + 1 :]]


def every_shape(comms: Communicators, call: Call, agreement: Agreement) -> list[list[list[int]]]:
    """``[r][i]``: the shape of rank r's leaf i; the sizes are asked for only where they are known to differ."""
    if agreement.uniform:
        return [[list(tensor.shape) for tensor in call.tensors]] * comms.size
    dims = call.free or ()
    sizes = sizes_along(comms, call.tensors, dims)
    return [[resized(t.shape, d, n) for t, d, n in zip(call.tensors, dims, row, strict=True)] for row in sizes]


def by_comm(
    comms: Communicators, tensors: Sequence[torch.Tensor], indices: Sequence[int]
) -> Iterator[tuple[TorchComm, list[int]]]:
    """The leaves that share a communicator."""
    groups: dict[int, tuple[TorchComm, list[int]]] = {}
    for i in indices:
        comm = comms.data(tensors[i].device)
        groups.setdefault(id(comm), (comm, []))[1].append(i)
    return iter(groups.values())


def buckets(
    comms: Communicators, tensors: Sequence[torch.Tensor], indices: Sequence[int], nbytes: Sequence[int]
) -> Iterator[tuple[TorchComm, list[int]]]:
    """The leaves that travel as one message: large ones alone, so that they need not be packed; the others together.

    Args:
        comms: The group.
        tensors: The leaves.
        indices: Those of them that travel.
        nbytes: Of each leaf a size on which all ranks agree, so that they make the same buckets.
    """
    for comm, members in by_comm(comms, tensors, indices):
        small = [i for i in members if nbytes[i] < LARGE]
        yield from ((comm, [i]) for i in members if nbytes[i] >= LARGE)
        if small:
            yield comm, small


def packed_like(comm: TorchComm, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> torch.Tensor:
    """A buffer for tensors of these dtypes and shapes, where ``comm`` wants it."""
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))
    return torch.empty(nbytes, dtype=torch.uint8, device=comm.get_device())


def join(
    buffers: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[Sequence[int]]],
    dims: Sequence[int],
) -> list[torch.Tensor]:
    """Concatenate what came from every rank, leaf by leaf.

    Args:
        buffers: One packed buffer per rank.
        dtypes: Of the leaves.
        shapes: ``[r][i]``: the shape of leaf i in buffer r.
        dims: Along which dimension each leaf is concatenated.
    """
    parts = [wire.unpack(buffer, dtypes, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    return [_cat(column, dim) for column, dim in zip(zip(*parts, strict=True), dims, strict=True)]


def _cat(column: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    bits = wire.BITS[column[0].element_size()]
    return torch.cat([part.view(bits) for part in column], dim).view(column[0].dtype)
