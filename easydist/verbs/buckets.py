"""The buckets of leaves: grouping into messages, memory for all ranks' parts, and joining the parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from easydist.transport.work import TorchWork
from easydist.typing import T

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


def large_alone(indices: Sequence[int], nbytes: Sequence[int], large: int = LARGE) -> list[Sequence[int]]:
    """Group leaves into messages: each large one alone, so that it need not be packed; the others together.

    Args:
        indices: The leaves to send.
        nbytes: One size per leaf that is the same on all ranks, so that they make the same messages.
        large: The bytes from which a leaf is large.

    Example:
        >>> large_alone([0, 1, 2, 3], [8, LARGE, 4, LARGE])
        [[1], [3], [0, 2]]
    """
    small = [i for i in indices if nbytes[i] < large]
    return [*([i] for i in indices if nbytes[i] >= large), *([small] if small else [])]


class Bucket(NamedTuple):
    """Leaves that travel at the same time."""

    alone: Sequence[int]
    """The indices of those with a message of their own."""

    packed: Sequence[int]
    """The indices of those that share the last message."""

    def messages(self, comm: Collectives, tensors: Indexed) -> list[torch.Tensor]:
        """Return the messages with these tensors, flat: values, or packed bytes."""
        device = comm.get_device()
        found = [tensors[i].to(device).contiguous().view(-1) for i in self.alone]
        if not self.packed:
            return found
        packed = [tensors[i] for i in self.packed]
        nbytes = sum(map(packing.nbytes, packed))
        message = memory.empty([_padded(nbytes)], torch.uint8, device)
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


def in_turns(indices: Sequence[int], nbytes: Sequence[int], large: int) -> list[Bucket]:
    """Return several turns, so that few packed leaves need memory at the same time; for the arguments see ``at_once``.

    Example:
        >>> [(bucket.alone, len(bucket.packed)) for bucket in in_turns(range(20), [LARGE] + [LARGE - 8] * 19, LARGE)]
        [([0], 9), ([], 8), ([], 2)]
    """
    whole = at_once(indices, nbytes, large)
    longest = max(_TURN, sum([nbytes[i] for i in whole.packed]) // _TURNS)
    start, parts = 0, dict[int, list[int]]()
    for i in whole.packed:
        parts.setdefault(start // longest, []).append(i)
        start += nbytes[i]
    first, *others = [*parts.values()] or [[]]
    return [Bucket(whole.alone, first), *[Bucket((), part) for part in others]]


def moved(
    comms: Communicators,
    leaves: Leaves,
    shapes: Sequence[Shapes],
    uniform: bool,
    begin: Callable[[Collectives, Bucket], Moving],
    large: int = LARGE,
) -> dict[int, torch.Tensor]:
    """Move the leaves of a tree in turns, of which two are under way, so that few packed messages need memory.

    Args:
        comms: The group.
        leaves: The tree.
        shapes: Every rank's shapes, which say what all ranks take for large; not needed if ``uniform``.
        uniform: True if all ranks have leaves of the same shapes, and the same ones tied: these move once.
        begin: Begins to move the leaves of a bucket.
        large: The bytes from which a leaf is sent alone in shared memory.

    Returns:
        The results by index, on the devices of their leaves.
    """
    nbytes = leaves.layout.packing.lengths if uniform else smallest(shapes, leaves.layout.dtypes)

    def begun() -> Iterator[tuple[Collectives, Moving]]:
        for comm, members in by_comm(comms, leaves.tensors, leaves.travelling(uniform), sum(nbytes)):
            least = large if comm.backend.shares_memory else LARGE
            is_cpu = comm.get_device().type == "cpu"
            for bucket in in_turns(members, nbytes, least) if is_cpu else [at_once(members, nbytes, least)]:
                yield comm, begin(comm, bucket)

    results: dict[int, torch.Tensor] = {}
    for comm, moving in ahead(begun()):
        results |= results_of(leaves, comm, *moving)
    return results


def ahead(begun: Iterator[T]) -> Iterator[T]:
    """Yield each operation after the next one has begun, so that two of them are under way."""
    for earlier in begun:
        for later in begun:
            yield earlier
            earlier = later
        yield earlier


def results_of(
    leaves: Leaves, comm: Collectives, place: Receiving | None, works: Sequence[TorchWork]
) -> dict[int, torch.Tensor]:
    """Return what has arrived in a bucket by index, on the devices of the leaves, once all of it is there."""
    for work in works:
        work.wait()
    return {} if place is None else at_home(leaves, comm, place.results())


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
    return memory.empty([_padded(packed_nbytes(dtypes, shapes))], torch.uint8, comm.get_device())


def packed_nbytes(dtypes: Sequence[torch.dtype], shapes: Shapes) -> int:
    """Return the length of a packed buffer."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def _padded(nbytes: int) -> int:
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


class Receiving(NamedTuple):
    """Memory for the messages of a bucket, and the function that turns them into results."""

    wholes: list[torch.Tensor]
    """For each message the memory for those of all ranks, one after the other."""

    sizes: Sequence[Sequence[int] | None]
    """For each message the number of elements from each rank; None if they are all the same."""

    results: Callable[[], dict[int, torch.Tensor]]
    """The function that returns the results by index, to be called when all messages have arrived."""

    def parts(self, count: int) -> list[Sequence[torch.Tensor]]:
        """Return for each message the memory for those of ``count`` ranks."""
        return [
            whole.view(count, -1).unbind() if sizes is None else whole.split_with_sizes([*sizes])
            for whole, sizes in zip(self.wholes, self.sizes, strict=True)
        ]


Moving = tuple[Receiving | None, Sequence[TorchWork]]
"""The memory for the messages of a bucket, None if none comes to this rank; and the operations under way."""


def receiving(
    comm: Collectives, tensors: Sequence[torch.Tensor], shapes: Sequence[Shapes], dims: Sequence[int], bucket: Bucket
) -> Receiving:
    """Return memory for the messages of a bucket from all ranks, whose parts the results concatenate.

    A leaf that comes alone along dim 0 arrives in the result. Packed leaves along dim 0 with the same shapes on all
    ranks are copied once. All others are concatenated from the parts of each rank.

    Args:
        comm: The communicator.
        tensors: This rank's leaves, for their dtypes.
        shapes: ``[r][i]``, the shape of what comes from rank r for leaf i.
        dims: The dimension along which each leaf is concatenated.
        bucket: The indices of the leaves.
    """
    alone = _alone(comm, tensors, shapes, dims, bucket.alone)
    if not bucket.packed:
        return alone
    packed = _packed(comm, tensors, shapes, dims, bucket.packed)
    results = lambda: alone.results() | packed.results()  # noqa: E731
    return Receiving(alone.wholes + packed.wholes, [*alone.sizes, *packed.sizes], results)


def _alone(
    comm: Collectives,
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[Shapes],
    dims: Sequence[int],
    indices: Sequence[int],
) -> Receiving:
    device, count, like = comm.get_device(), len(shapes), shapes[0]
    if are_same(shapes) and not any(dims):
        results = {i: memory.empty([count * like[i][0], *like[i][1:]], tensors[i].dtype, device) for i in indices}
        return Receiving([one.view(-1) for one in results.values()], [None] * len(results), lambda: results)
    every = [[row[i] for row in shapes] for i in indices]
    sizes = [[*map(math.prod, rows)] for rows in every]
    wholes = [memory.empty([sum(each)], tensors[i].dtype, device) for i, each in zip(indices, sizes, strict=True)]
    arrived = zip(indices, wholes, sizes, every, strict=True)
    return Receiving(wholes, sizes, lambda: {i: _whole(whole, each, rows, dims[i]) for i, whole, each, rows in arrived})


def _whole(whole: torch.Tensor, sizes: Sequence[int], shapes: Shapes, dim: int) -> torch.Tensor:
    """Return the parts of all ranks along a dimension; without a copy along dim 0."""
    if not dim:
        return whole.view(resized(shapes[0], 0, sum([shape[0] for shape in shapes])))
    parts = zip(whole.split_with_sizes([*sizes]), shapes, strict=True)
    return _cat([part.view(*shape) for part, shape in parts], dim)


def _packed(
    comm: Collectives,
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[Shapes],
    dims: Sequence[int],
    indices: Sequence[int],
) -> Receiving:
    dtypes, count, uniform = [tensors[i].dtype for i in indices], len(shapes), are_same(shapes)
    rows = [[row[i] for i in indices] for row in shapes[: 1 if uniform else count]]
    sizes = [_padded(packed_nbytes(dtypes, row)) for row in rows]
    own = [dims[i] for i in indices]
    if any(own) or rows.count(rows[0]) < len(rows):
        rows, sizes = (rows * count, sizes * count) if uniform else (rows, sizes)
        whole = memory.empty([sum(sizes)], torch.uint8, comm.get_device())
        parts = whole.split_with_sizes(sizes)
        return Receiving([whole], [sizes], lambda: dict(zip(indices, join(parts, dtypes, rows, own), strict=True)))
    whole = memory.empty([count * sizes[0]], torch.uint8, comm.get_device())
    every = whole.view(count, sizes[0])
    return Receiving(
        [whole], [None], lambda: dict(zip(indices, packing.unpack_rows(every, dtypes, rows[0]), strict=True))
    )


def swapped(
    comm: Collectives,
    tensors: Sequence[torch.Tensor],
    parts: Mapping[int, Sequence[torch.Tensor]],
    shapes: Sequence[Shapes],
    dims: Sequence[int],
    bucket: Bucket,
) -> Moving:
    """Begin to give ``parts[i][r]`` of each leaf i of a bucket to rank r; for the other arguments see ``receiving``."""
    place, size = receiving(comm, tensors, shapes, dims, bucket), comm.get_size()
    rows = [bucket.messages(comm, {i: part[rank] for i, part in parts.items()}) for rank in range(size)]
    every = zip(place.parts(size), zip(*rows, strict=True), strict=True)
    return place, [comm.all_to_all(outputs, inputs, async_op=True) for outputs, inputs in every]


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


def _cat(column: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    dtype = column[0].dtype
    if packing.is_copyable(dtype):
        return torch.cat([*column], dim)
    return torch.cat([part.view(packing.BITS[dtype.itemsize]) for part in column], dim).view(dtype)


def at_home(leaves: Leaves, comm: Collectives, results: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the results by index, moved to the devices of their leaves if the communicator uses another device."""
    device = comm.get_device()
    if (leaves.is_cpu and device.type == "cpu") or all(leaves.tensors[i].device == device for i in results):
        return results
    return {i: result.to(leaves.tensors[i].device) for i, result in results.items()}
