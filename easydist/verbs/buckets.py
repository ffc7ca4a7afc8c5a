"""The buckets of leaves: which of them travel together, in which messages, over which communicator, and their parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from easydist import memory
from easydist.agreement.frames import Agreement
from easydist.base.torch_private import foreach_clone
from easydist.data import packing
from easydist.data.arithmetic import split_bounds
from easydist.data.leaves import Indexed, Leaves
from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives

Shapes = Sequence[Sequence[int]]
"""The shapes of the leaves in one buffer."""

LARGE = 1 << 18
"""The bytes from which a leaf is sent alone, because copying it into a packed buffer costs more than a message."""

LARGE_AT_ONCE = 5 << 12
"""The same where one operation in shared memory moves all messages."""

_TURN, _TURNS = 1 << 21, 16
"""The bytes of the packed leaves that travel at the same time, and the most parts into which all of them are divided:
over a slow link, each part takes a round trip. Without parts, the buffers of all ranks need as much as the results."""


def copied(leaves: Leaves, indices: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return copies of some leaves, in row-major order, by index: the results of a single rank."""
    tensors = [leaves.tensors[i] for i in indices]
    if tensors and all(map(torch.Tensor.is_contiguous, tensors)):
        copies: Iterable[torch.Tensor] = foreach_clone(tensors)  # half the time of one call for each
    else:
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return dict(zip(indices, copies, strict=True))


def dims_of(leaves: Leaves, dim: int, operation: str) -> list[int]:
    """Return ``dim`` as a non-negative index into each leaf's shape.

    Args:
        leaves: The tree.
        dim: The dimension, counted from the end if negative.
        operation: The verb's name, for the error.

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
    """Return ``[r][i]``, the size of rank r's tensor i along its dimension.

    Cost: nothing if the sizes came with the headers; else one all-gather of 8 bytes per tensor.
    """
    if (sizes := agreement.sizes()) is not None:
        return sizes
    lengths = [tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)]
    mine = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    output = torch.empty((comms.size, len(mine)), dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(output, mine, async_op=False)
    return output.tolist()


def pad_first(dim: int) -> str:
    """Return the advice for calls in which dimensions other than ``dim`` differ."""
    return f"Only dim {dim} may differ between ranks; pad the other dims first: pad_across_processes(x, dim={{dim}})"


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Return ``shape`` with another size along ``dim``.

    Example:
        >>> resized((2, 3, 4), 1, 9)
        [2, 9, 4]
    """
    return [*shape[:dim], size, *shape[dim + 1 :]]


def every_shape(comms: Communicators, leaves: Leaves, dim: int, agreement: Agreement) -> list[Shapes]:
    """Return ``[r][i]``, the shape of rank r's leaf i; exchange sizes only if they differ and did not come along."""
    shapes = leaves.layout.shapes
    if agreement.uniform:
        return [shapes] * comms.size
    dims = leaves.layout.free(dim)[0]
    sizes = sizes_along(comms, leaves.tensors, dims, agreement)
    return [[resized(shape, dim, n) for shape, dim, n in zip(shapes, dims, row, strict=True)] for row in sizes]


def by_comm(
    comms: Communicators, tensors: Sequence[torch.Tensor], indices: Sequence[int], total: int
) -> Iterable[tuple[Collectives, Sequence[int]]]:
    """Group the leaves by communicator.

    Args:
        comms: The group.
        tensors: The leaves.
        indices: The leaves to send.
        total: Their bytes, or another number that is the same on all ranks.
    """
    if all(tensors[i].is_cpu for i in indices):
        return [(comms.cpu(total), indices)] if indices else []
    groups: dict[int, tuple[Collectives, list[int]]] = {}
    for i in indices:
        comm = comms.cpu(total) if tensors[i].is_cpu else comms.data(tensors[i].device)
        groups.setdefault(id(comm), (comm, []))[1].append(i)
    return groups.values()


def carriers(comms: Communicators, messages: Iterable[tuple[str, int]]) -> dict[str, Collectives]:
    """Return the communicator that carries the data of each device type.

    Args:
        comms: The group.
        messages: The device type and the bytes of each message, the same on all ranks.
    """
    totals: Counter[str] = Counter()
    for kind, nbytes in messages:
        totals[kind] += nbytes
    found = {kind: comms.data(torch.device(kind)) for kind in totals}
    on_cpu = [kind for kind, comm in found.items() if comm is comms.control]
    return found | dict.fromkeys(on_cpu, comms.cpu(sum([totals[kind] for kind in on_cpu])))


class Bucket(NamedTuple):
    """Leaves that travel at the same time."""

    alone: Sequence[int]
    """The indices of those with a message of their own."""

    packed: Sequence[int]
    """The indices of those that share the last message."""

    def groups(self) -> list[Sequence[int]]:
        """Return the indices of the leaves of each message."""
        return [*([i] for i in self.alone), *([self.packed] if self.packed else [])]

    def unpacked(self, nbytes: Sequence[int]) -> Bucket:
        """Return the same bucket, without packing if that would only copy: a single leaf, which is empty on no rank.

        Args:
            nbytes: See ``at_once``.

        Example:
            >>> at_once([0, 1], [8, 300], large=200).unpacked([8, 300])
            Bucket(alone=[1, 0], packed=())
        """
        if len(self.packed) == 1 and nbytes[self.packed[0]]:
            return Bucket([*self.alone, *self.packed], ())
        return self

    def messages(self, comm: Collectives, tensors: Indexed) -> list[torch.Tensor]:
        """Return the messages with these tensors, flat: values, or packed bytes."""
        device = comm.get_device()
        found = [tensors[i].to(device).contiguous().view(-1) for i in self.alone]
        if not self.packed:
            return found
        packed = [tensors[i] for i in self.packed]
        nbytes = sum(map(packing.nbytes, packed))
        message = memory.empty([padded(nbytes)], torch.uint8, device)
        packing.pack(packed, out=message[:nbytes])
        return [*found, message]


def at_once(indices: Sequence[int], nbytes: Sequence[int], large: int) -> Bucket:
    """Return the bucket in which all of these leaves travel.

    Args:
        indices: The leaves to send.
        nbytes: One size per leaf that is the same on all ranks, so that they make the same messages.
        large: The bytes from which a leaf is sent alone.

    Example:
        >>> at_once([0, 1, 2, 3], [8, 300, 4, 200], large=200)
        Bucket(alone=[1, 3], packed=[0, 2])
    """
    return Bucket([i for i in indices if nbytes[i] >= large], [i for i in indices if nbytes[i] < large])


def in_turns(indices: Sequence[int], nbytes: Sequence[int], large: int, are_copied: bool = False) -> list[Bucket]:
    """Return buckets that travel in turns, so that few packed leaves need memory at the same time.

    Args:
        indices: See ``at_once``.
        nbytes: See ``at_once``.
        large: See ``at_once``.
        are_copied: True if the leaves that are sent alone need memory beside their results, too.

    Example:
        >>> sizes = [LARGE] * 9 + [LARGE - 8] * 9
        >>> [(bucket.alone, len(bucket.packed)) for bucket in in_turns(range(18), sizes, LARGE)]
        [([0, 1, 2, 3, 4, 5, 6, 7, 8], 9)]
        >>> [(len(bucket.alone), len(bucket.packed)) for bucket in in_turns(range(18), sizes, LARGE, are_copied=True)]
        [(8, 0), (1, 8), (0, 1)]
    """
    alone, others = ((), indices) if are_copied else at_once(indices, nbytes, large)
    longest = max(_TURN, sum([nbytes[i] for i in others]) // _TURNS)
    start, parts = 0, dict[int, list[int]]()
    for i in others:
        parts.setdefault(start // longest, []).append(i)
        start += nbytes[i]
    first, *later = [at_once(part, nbytes, large) for part in parts.values()] or [Bucket((), ())]
    return [Bucket([*alone, *first.alone], first.packed), *later]


def are_same(shapes: Sequence[Shapes]) -> bool:
    """True if the shapes of all ranks are one object, as ``every_shape`` returns those that do not differ."""
    return all(row is shapes[0] for row in shapes)


def smallest(shapes: Sequence[Shapes], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return the bytes of each leaf on the rank where it is smallest."""
    rows = shapes[:1] if are_same(shapes) else shapes
    return [
        min(map(math.prod, column)) * dtype.itemsize
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]


def small_payload(comms: Communicators, leaves: Leaves) -> Sequence[torch.Tensor]:
    """Return the leaves if they may go with the header (small, on the CPU, none tied to another); else nothing.

    Leaves without bytes may be tied: the ranks count bytes to find out whether all data has come with the headers.
    """
    nbytes = leaves.layout.packing.nbytes
    if comms.size == 1 or (leaves.ties is not None and nbytes) or nbytes > comms.frames.nbytes:
        return ()
    return leaves.tensors if leaves.is_cpu else ()


def packed_like(comm: Collectives, dtypes: Sequence[torch.dtype], shapes: Shapes) -> torch.Tensor:
    """Return memory for a message that is packed from tensors of these dtypes and shapes."""
    return memory.empty([padded(packed_nbytes(dtypes, shapes))], torch.uint8, comm.get_device())


def packed_nbytes(dtypes: Sequence[torch.dtype], shapes: Shapes) -> int:
    """Return the length of a packed buffer."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def padded(nbytes: int) -> int:
    """Return the length of a packed message: 16 is a multiple of every item size, so that the next one is aligned."""
    return (nbytes // 16 + 1) * 16


def share_of(shape: Sequence[int], dim: int, size: int, rank: int) -> list[int]:
    """Return the shape of the part of a tensor for one rank, see ``parts_of``."""
    start, stop = split_bounds(shape[dim], size, rank)
    return resized(shape, dim, stop - start)


def parts_of(tensor: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    """Cut a tensor into the parts for each of ``size`` ranks."""
    bounds = [split_bounds(tensor.shape[dim], size, rank) for rank in range(size)]
    return [tensor.narrow(dim, start, stop - start) for start, stop in bounds]


def from_payloads(
    agreement: Agreement, leaves: Leaves, shapes: Sequence[Shapes], dims: Sequence[int]
) -> list[torch.Tensor]:
    """Return the leaves that came with the headers, concatenated over ranks."""
    if agreement.uniform and not any(dims):
        return agreement.packed().joined()
    return join([agreement.payload(rank) for rank in range(len(shapes))], leaves.layout.dtypes, shapes, dims)


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
    return [concatenated(column, dim) for column, dim in zip(zip(*parts, strict=True), dims, strict=True)]


def concatenated(column: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the parts of a leaf as one tensor, also for floats of 8 bits, whose bits are copied."""
    dtype = column[0].dtype
    if packing.is_copyable(dtype):
        return torch.cat([*column], dim)
    return torch.cat([part.view(packing.BITS[dtype.itemsize]) for part in column], dim).view(dtype)
