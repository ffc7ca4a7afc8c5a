"""Moving the leaves of a tree: turns, memory for the messages of all ranks, and the results made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from easydist import memory
from easydist.data import packing
from easydist.data.leaves import Leaves
from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork
from easydist.typing import T
from easydist.verbs.buckets import (
    LARGE,
    LARGE_AT_ONCE,
    Bucket,
    Shapes,
    are_same,
    at_once,
    by_comm,
    concatenated,
    in_turns,
    join,
    packed_nbytes,
    padded,
    resized,
    smallest,
)


def moved(
    comms: Communicators,
    leaves: Leaves,
    shapes: Sequence[Shapes],
    uniform: bool,
    begin: Callable[[Collectives, Bucket], Moving],
    dim: int,
    is_one: bool = False,
) -> dict[int, torch.Tensor]:
    """Move the leaves of a tree in turns, so that few packed messages need memory at the same time.

    Args:
        comms: The group.
        leaves: The tree.
        shapes: Every rank's shapes, which say what all ranks take for large; not needed if ``uniform``.
        uniform: True if all ranks have leaves of the same shapes, and the same ones tied: these move once.
        begin: Begins to move the leaves of a bucket.
        dim: The dimension along which the leaves are cut or concatenated; along others than 0, parts are copied.
        is_one: True if one operation moves all messages of a bucket.

    Returns:
        The results by index, on the devices of their leaves.
    """
    nbytes = leaves.layout.packing.lengths if uniform else smallest(shapes, leaves.layout.dtypes)
    are_copied = any(leaves.layout.free(dim)[0])
    every = by_comm(comms, leaves.tensors, leaves.travelling(uniform), sum(nbytes))

    def begun() -> Iterator[tuple[Collectives, Moving]]:
        for comm, members in every:
            large = LARGE_AT_ONCE if is_one and comm.backend.shares_memory and not are_copied else LARGE
            is_cpu = comm.get_device().type == "cpu"
            buckets = in_turns(members, nbytes, large, are_copied) if is_cpu else [at_once(members, nbytes, large)]
            for bucket in buckets:
                yield comm, begin(comm, bucket.unpacked(nbytes))

    results: dict[int, torch.Tensor] = {}
    for comm, moving in ahead(begun(), *[comm for comm, _ in every]):
        results |= results_of(leaves, comm, *moving)
        del moving  # and its memory, before the next one begins
    return results


def ahead(begun: Iterator[T], *comms: Collectives) -> Iterator[T]:
    """Yield each operation after the next one has begun, so that two are under way; in shared memory, only one.

    There, ranks wait for nothing but one another's copies, and moving two operations in turn takes a tenth longer.

    Args:
        begun: Begins the operations.
        *comms: Their communicators.
    """
    if all(comm.backend.shares_memory for comm in comms):
        yield from begun
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


def at_home(leaves: Leaves, comm: Collectives, results: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the results by index, moved to the devices of their leaves if the communicator uses another device."""
    device = comm.get_device()
    if (leaves.is_cpu and device.type == "cpu") or all(leaves.tensors[i].device == device for i in results):
        return results
    return {i: result.to(leaves.tensors[i].device) for i, result in results.items()}


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
    wholes, sizes = alone.wholes + packed.wholes, [*alone.sizes, *packed.sizes]
    return Receiving(wholes, sizes, lambda: alone.results() | packed.results())


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
    return concatenated([part.view(*shape) for part, shape in parts], dim)


def _packed(
    comm: Collectives,
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[Shapes],
    dims: Sequence[int],
    indices: Sequence[int],
) -> Receiving:
    dtypes, count, uniform = [tensors[i].dtype for i in indices], len(shapes), are_same(shapes)
    rows = [[row[i] for i in indices] for row in shapes[: 1 if uniform else count]]
    sizes = [padded(packed_nbytes(dtypes, row)) for row in rows]
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
