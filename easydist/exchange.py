"""What the tensor verbs share: calls over trees, sizes, and which communicator carries which leaf."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from easydist import memory, wire
from easydist.agree import Agreement
from easydist.comms import Communicators, TorchComm
from easydist.leaves import Leaves

Shapes = Sequence[Sequence[int]]
"""Of the leaves in one buffer."""

LARGE = 1 << 18
"""Bytes from which a leaf travels alone: by then copying it into a packed buffer costs more than a message."""


def check_rank(comms: Communicators, name: str, rank: int | None) -> None:
    """Make sure that an argument is a rank of the group, or None.

    Raises:
        ValueError: It is not.
    """
    if rank is not None and not 0 <= rank < comms.size:
        raise ValueError(f"{name}={rank} is not a rank of the group: it has {comms.size}, counted from 0")


def dims_of(leaves: Leaves, dim: int, operation: str) -> list[int]:
    """``dim`` as a non-negative index into each leaf's shape.

    Args:
        leaves: The tree.
        dim: Counted from the end where negative.
        operation: For the error.

    Raises:
        ValueError: A leaf has no such dimension.
    """
    try:
        return leaves.layout.free(dim)[0]
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from None


def sizes_along(comms: Communicators, tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> list[list[int]]:
    """``[r][i]``: the size of rank r's tensor i along its dimension.

    Cost: one all-gather of 8 bytes per tensor.
    """
    lengths = [tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)]
    mine = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    output = torch.empty((comms.size, len(mine)), dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(output, mine, async_op=False)
    return output.tolist()


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """``shape`` with another size along ``dim``.

    Example:
        >>> resized((2, 3, 4), 1, 9)
        [2, 9, 4]
    """
    return [*shape[:dim], size, *shape[dim + 1 :]]


def every_shape(comms: Communicators, leaves: Leaves, dims: Sequence[int], agreement: Agreement) -> list[Shapes]:
    """``[r][i]``: the shape of rank r's leaf i; sizes are asked for only where they differ and did not come along."""
    shapes = leaves.layout.shapes
    if agreement.uniform:
        return [shapes] * comms.size
    sizes = agreement.sizes() or sizes_along(comms, leaves.tensors, dims)
    return [[resized(shape, dim, n) for shape, dim, n in zip(shapes, dims, row, strict=True)] for row in sizes]


def by_comm(
    comms: Communicators, tensors: Sequence[torch.Tensor], indices: Sequence[int], total: int
) -> Iterable[tuple[TorchComm, Sequence[int]]]:
    """The leaves that share a communicator.

    Args:
        comms: The group.
        tensors: The leaves.
        indices: Those of them that travel.
        total: Their bytes, or another number on which all ranks agree.
    """
    if all(tensors[i].is_cpu for i in indices):
        return [(comms.cpu(total), indices)] if indices else []
    groups: dict[int, tuple[TorchComm, list[int]]] = {}
    for i in indices:
        comm = comms.cpu(total) if tensors[i].is_cpu else comms.data(tensors[i].device)
        groups.setdefault(id(comm), (comm, []))[1].append(i)
    return groups.values()


def large_alone(indices: Sequence[int], nbytes: Sequence[int]) -> list[Sequence[int]]:
    """Which leaves travel as one message: each large one alone, so that it need not be packed; the others together.

    Args:
        indices: Those that travel.
        nbytes: Of each leaf a size on which all ranks agree, so that they make the same messages.

    Example:
        >>> large_alone([0, 1, 2, 3], [8, LARGE, 4, LARGE])
        [[1], [3], [0, 2]]
    """
    small = [i for i in indices if nbytes[i] < LARGE]
    return [*([i] for i in indices if nbytes[i] >= LARGE), *([small] if small else [])]


def smallest(shapes: Sequence[Shapes], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Of each leaf the bytes on the rank that has least of it."""
    rows = shapes[:1] if all(row is shapes[0] for row in shapes) else shapes
    return [
        min(map(math.prod, column)) * dtype.itemsize
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]


_is_cpu = operator.attrgetter("is_cpu")


def small_payload(comms: Communicators, leaves: Leaves) -> Sequence[torch.Tensor]:
    """The leaves, where they may travel with the header: small, on the CPU, and each a tensor of its own."""
    if comms.size == 1 or leaves.ties is not None or leaves.layout.packing.nbytes > comms.frames.nbytes:
        return ()
    return leaves.tensors if all(map(_is_cpu, leaves.tensors)) else ()


def from_payloads(
    agreement: Agreement, leaves: Leaves, shapes: Sequence[Shapes], dims: Sequence[int]
) -> list[torch.Tensor]:
    """The leaves that came with the headers, concatenated over ranks."""
    if agreement.uniform and not any(dims):
        return leaves.layout.packing.unpack_rows(agreement.payloads())
    return join([agreement.payload(rank) for rank in range(len(shapes))], leaves.layout.dtypes, shapes, dims)


def packed_like(comm: TorchComm, dtypes: Sequence[torch.dtype], shapes: Shapes) -> torch.Tensor:
    """A buffer for tensors of these dtypes and shapes, where ``comm`` wants it."""
    return memory.empty([packed_nbytes(dtypes, shapes)], torch.uint8, comm.get_device())


def packed_nbytes(dtypes: Sequence[torch.dtype], shapes: Shapes) -> int:
    """The length of a packed buffer."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


class Landing:
    """Where every rank's part of the leaves of one bucket arrives, and how the parts become results.

    A single leaf along dim 0 arrives in its place in the result. Leaves of one size on all ranks, along dim 0, arrive
    in rows of equal length and are copied once. Anything else is concatenated from one packed buffer per rank.

    Attributes:
        buffers: One per rank.
    """

    def __init__(
        self, comm: TorchComm, tensors: Sequence[torch.Tensor], shapes: Sequence[Shapes], dims: Sequence[int]
    ) -> None:
        self._dtypes, self._shapes, self._dims = [t.dtype for t in tensors], shapes, dims
        self.buffers: Sequence[torch.Tensor]
        self.results: Callable[[], list[torch.Tensor]]
        if any(dims):
            self._in_parts(comm)
        elif len(tensors) == 1:
            self._in_place(comm)
        elif all(row == shapes[0] for row in shapes):
            self._in_rows(comm)
        else:
            self._in_parts(comm)

    def _in_place(self, comm: TorchComm) -> None:
        rows = [shape[0] for (shape,) in self._shapes]
        whole = memory.empty(resized(self._shapes[0][0], 0, sum(rows)), self._dtypes[0], comm.get_device())
        self.buffers = [wire.as_bytes(part) for part in whole.split(rows)]
        self.results = lambda: [whole]

    def _in_rows(self, comm: TorchComm) -> None:
        nbytes = packed_nbytes(self._dtypes, self._shapes[0])
        width = (nbytes // 16 + 1) * 16  # a multiple of every item size
        rows = memory.empty((comm.get_size(), width), torch.uint8, comm.get_device())
        self.buffers = rows[:, :nbytes].unbind()
        self.results = lambda: wire.unpack_rows(rows, self._dtypes, self._shapes[0])

    def _in_parts(self, comm: TorchComm) -> None:
        self.buffers = [packed_like(comm, self._dtypes, row) for row in self._shapes]
        self.results = lambda: join(self.buffers, self._dtypes, self._shapes, self._dims)


def join(
    buffers: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Shapes],
    dims: Sequence[int],
) -> list[torch.Tensor]:
    """Concatenate what came from every rank, leaf by leaf.

    Args:
        buffers: One packed buffer per rank.
        dtypes: Of the leaves.
        shapes: ``[r][i]``: the shape of leaf i in buffer r.
        dims: Along which dimension each leaf is concatenated.

    Cost: one copy per leaf.
    """
    parts = [wire.unpack(buffer, dtypes, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    return [_cat(column, dim) for column, dim in zip(zip(*parts, strict=True), dims, strict=True)]


def _cat(column: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    dtype = column[0].dtype
    if wire.is_copyable(dtype):
        return torch.cat(column, dim)
    return torch.cat([part.view(wire.BITS[dtype.itemsize]) for part in column], dim).view(dtype)
