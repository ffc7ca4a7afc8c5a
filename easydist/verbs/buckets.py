"""Which leaves travel together, on which communicator, and how many bytes they are on each rank."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import torch

from easydist import memory
from easydist.agreement.frames import Agreement
from easydist.data.leaves import Leaves
from easydist.data.plan import split_bounds
from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives

Shapes = Sequence[Sequence[int]]
"""Of the leaves in one buffer."""

LARGE = 1 << 18
"""Bytes from which a leaf travels alone: by then copying it into a packed buffer costs more than a message."""


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


def sizes_along(
    comms: Communicators, tensors: Sequence[torch.Tensor], dims: Sequence[int], agreement: Agreement
) -> list[list[int]]:
    """``[r][i]``: the size of rank r's tensor i along its dimension.

    Cost: nothing where the sizes came with the headers; else one all-gather of 8 bytes per tensor.
    """
    if (sizes := agreement.sizes()) is not None:
        return sizes
    lengths = [tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)]
    mine = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    output = torch.empty((comms.size, len(mine)), dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(output, mine, async_op=False)
    return output.tolist()


def pad_first(dim: int) -> str:
    """What to do where other dimensions than ``dim`` differ."""
    return f"Only dim {dim} may differ between ranks; pad the other dims first: pad_across_processes(x, dim={{dim}})"


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """``shape`` with another size along ``dim``.

    Example:
        >>> resized((2, 3, 4), 1, 9)
        [2, 9, 4]
    """
    return [*shape[:dim], size, *shape[dim + 1 :]]


def every_shape(comms: Communicators, leaves: Leaves, dim: int, agreement: Agreement) -> list[Shapes]:
    """``[r][i]``: the shape of rank r's leaf i; sizes are asked for only where they differ and did not come along."""
    shapes = leaves.layout.shapes
    if agreement.uniform:
        return [shapes] * comms.size
    dims = leaves.layout.free(dim)[0]
    sizes = sizes_along(comms, leaves.tensors, dims, agreement)
    return [[resized(shape, dim, n) for shape, dim, n in zip(shapes, dims, row, strict=True)] for row in sizes]


def by_comm(
    comms: Communicators, tensors: Sequence[torch.Tensor], indices: Sequence[int], total: int
) -> Iterable[tuple[Collectives, Sequence[int]]]:
    """The leaves that share a communicator.

    Args:
        comms: The group.
        tensors: The leaves.
        indices: Those of them that travel.
        total: Their bytes, or another number on which all ranks agree.
    """
    if all(tensors[i].is_cpu for i in indices):
        return [(comms.cpu(total), indices)] if indices else []
    groups: dict[int, tuple[Collectives, list[int]]] = {}
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


def packed_like(comm: Collectives, dtypes: Sequence[torch.dtype], shapes: Shapes) -> torch.Tensor:
    """A buffer for tensors of these dtypes and shapes, where ``comm`` wants it."""
    return memory.empty([packed_nbytes(dtypes, shapes)], torch.uint8, comm.get_device())


def packed_nbytes(dtypes: Sequence[torch.dtype], shapes: Shapes) -> int:
    """The length of a packed buffer."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def parts_of(tensor: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    """The part of a tensor that each of ``size`` ranks gets."""
    bounds = [split_bounds(tensor.shape[dim], size, rank) for rank in range(size)]
    return [tensor.narrow(dim, start, stop - start) for start, stop in bounds]
