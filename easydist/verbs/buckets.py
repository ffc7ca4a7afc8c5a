"""The buckets of leaves: grouping into messages, memory for all ranks' parts, and joining the parts."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from easydist import memory
from easydist.agreement.frames import Agreement
from easydist.base.torch_private import foreach_clone
from easydist.data import packing
from easydist.data.arithmetic import split_bounds
from easydist.data.leaves import Leaves
from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork

Shapes = Sequence[Sequence[int]]
"""The shapes of the leaves in one buffer."""

LARGE = 1 << 18
"""The bytes from which a leaf is sent alone, because copying it into a packed buffer costs more than a message."""

Buckets = Sequence[Sequence[int]]
"""The indices of leaves, by message."""

_UNDER_WAY = 2
"""The most turns of packed leaves under way: one that arrives while the one before it is unpacked."""

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


def large_alone(indices: Sequence[int], nbytes: Sequence[int]) -> list[Sequence[int]]:
    """Group leaves into messages: each large one alone, so that it need not be packed; the others together.

    Args:
        indices: The leaves to send.
        nbytes: One size per leaf that is the same on all ranks, so that they make the same messages.

    Example:
        >>> large_alone([0, 1, 2, 3], [8, LARGE, 4, LARGE])
        [[1], [3], [0, 2]]
    """
    small = [i for i in indices if nbytes[i] < LARGE]
    return [*([i] for i in indices if nbytes[i] >= LARGE), *([small] if small else [])]


def in_turns(indices: Sequence[int], nbytes: Sequence[int]) -> list[list[Sequence[int]]]:
    """Group leaves into the messages of ``large_alone``, and these into turns, so that few packed leaves need memory.

    Args:
        indices: The leaves to send.
        nbytes: See ``large_alone``.

    Example:
        >>> [[len(message) for message in turn] for turn in in_turns(range(20), [LARGE] + [LARGE - 8] * 19)]
        [[1, 9], [8], [2]]
    """
    messages = large_alone(indices, nbytes)
    if not messages or nbytes[messages[-1][0]] >= LARGE:
        return [messages]
    *large, packed = messages
    stops = [*itertools.accumulate([nbytes[i] for i in packed])]
    turn = max(_TURN, stops[-1] // _TURNS)
    parts: dict[int, list[int]] = {}
    for i, stop in zip(packed, stops, strict=True):
        parts.setdefault((stop - nbytes[i]) // turn, []).append(i)
    turns: list[list[Sequence[int]]] = [[part] for part in parts.values()]
    turns[0] = [*large, *turns[0]]
    return turns


def moved(
    comms: Communicators,
    leaves: Leaves,
    shapes: Sequence[Shapes],
    uniform: bool,
    begin: Callable[[Collectives, Buckets], Begin],
) -> dict[int, torch.Tensor]:
    """Move the leaves of a tree in turns, of which two are under way, so that few packed buffers need memory.

    Args:
        comms: The group.
        leaves: The tree.
        shapes: Every rank's shapes, which say what all ranks take for large; not needed if ``uniform``.
        uniform: True if all ranks have leaves of the same shapes, and the same ones tied: these move once.
        begin: Begins to move some leaves, given the communicator and their indices by message.

    Returns:
        The results by index, on the devices of their leaves.
    """
    nbytes = leaves.layout.packing.lengths if uniform else smallest(shapes, leaves.layout.dtypes)
    results: dict[int, torch.Tensor] = {}
    under_way: deque[Callable[[], dict[int, torch.Tensor]]] = deque()
    for comm, members in by_comm(comms, leaves.tensors, leaves.travelling(uniform), sum(nbytes)):
        is_cpu = comm.get_device().type == "cpu"
        for buckets in in_turns(members, nbytes) if is_cpu else [large_alone(members, nbytes)]:
            if len(under_way) == _UNDER_WAY:
                results |= under_way.popleft()()
            under_way.append(functools.partial(_arrived, leaves, comm, buckets, *begin(comm, buckets)))
    while under_way:
        results |= under_way.popleft()()
    return results


def _arrived(
    leaves: Leaves, comm: Collectives, buckets: Buckets, places: Sequence[Receiving], works: Sequence[TorchWork]
) -> dict[int, torch.Tensor]:
    for work in works:
        work.wait()
    every = zip(buckets, places, strict=bool(places))  # on some ranks, nothing arrives
    return at_home(
        leaves, comm, {i: one for bucket, place in every for i, one in zip(bucket, place.results(), strict=True)}
    )


def smallest(shapes: Sequence[Shapes], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return the bytes of each leaf on the rank where it is smallest."""
    rows = shapes[:1] if all(row is shapes[0] for row in shapes) else shapes
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
    """Return a buffer for tensors of these dtypes and shapes, on the device of ``comm``."""
    return memory.empty([packed_nbytes(dtypes, shapes)], torch.uint8, comm.get_device())


def packed_nbytes(dtypes: Sequence[torch.dtype], shapes: Shapes) -> int:
    """Return the length of a packed buffer."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


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


class Receiving(NamedTuple):
    """The buffers for the parts of one bucket, and the function that turns the parts into results."""

    buffers: Sequence[torch.Tensor]
    """One buffer for each rank whose data comes."""

    results: Callable[[], list[torch.Tensor]]
    """The function that returns the results, to be called when all parts have arrived."""


Begin = tuple[Sequence[Receiving], Sequence[TorchWork]]
"""The memory for the data of each message, if any comes to this rank; and the operations under way."""


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


def receiving_one(comm: Collectives, like: Sequence[torch.Tensor]) -> Receiving:
    """Return memory for one part of the leaves of a bucket, which come like these; a single one becomes the result."""
    dtypes, shapes = [tensor.dtype for tensor in like], [tensor.shape for tensor in like]
    if len(like) == 1:
        return _in_place(comm, dtypes[0], shapes)
    buffer = packed_like(comm, dtypes, shapes)
    return Receiving([buffer], lambda: [part.clone() for part in packing.unpack(buffer, dtypes, shapes)])


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
