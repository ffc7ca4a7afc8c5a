"""The verbs for trees of tensors.

Each one resolves the communicators, agrees with the other ranks, moves packed bytes, and rebuilds the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

import torch

from easydist import codec, wire
from easydist.agree import Agreement, Call, agree, trust
from easydist.calling import calling
from easydist.comms import Communicators, TorchComm
from easydist.eager import eager
from easydist.exchange import (
    Landing,
    Shapes,
    by_comm,
    check_rank,
    dims_of,
    every_shape,
    from_payloads,
    join,
    large_alone,
    packed_like,
    resized,
    small_payload,
    smallest,
)
from easydist.leaves import Indexed, Leaves, as_array
from easydist.plan import split_bounds
from easydist.state import communicators
from easydist.structure import get_data_structure, initialize_tensors
from easydist.typing import Group, Timeout, Tree

__all__ = ["all_to_all", "broadcast", "copy_tensor_to_devices", "gather", "scatter"]


def _pad_first(dim: int) -> str:
    return f"Only dim {dim} may differ between ranks; pad the other dims first: pad_across_processes(x, dim={{dim}})"


@eager
def gather(
    tensor: Tree,
    *,
    dst: int | None = None,
    dim: int = 0,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Concatenate every rank's tree, leaf by leaf.

    Law: ``gather(x, dim=d) == torch.cat([x of rank 0, …, x of rank W-1], dim=d)`` for every leaf; a leaf without
    dimensions counts as one of shape ``(1,)``. Holds at W = 1 as well. The sizes along ``dim`` may differ between
    ranks.

    Example:
        >>> import torch, easydist
        >>> easydist.gather({"loss": torch.tensor(0.5), "ids": ["a", torch.arange(2)]})
        {'loss': tensor([0.5000]), 'ids': ['a', tensor([0, 1])]}

    Args:
        tensor: Any tree. Leaves of any dtype, strides and device; NumPy arrays stay arrays; Python numbers become
            tensors of float64, int64, complex128 or bool. What is not a leaf (str, None, …) stays as it is on each
            rank.
        dst: The only rank that gets the result; None is all of them.
        dim: Along which dimension.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        A new tree of the same structure, detached from autograd; one tensor that stood at several places is one tensor
        again. On ranks other than ``dst``: None.

    Raises:
        DisagreementError: Paths, dtypes or shapes apart from ``dim`` differ between ranks.
        RemoteError: Another rank's data could not travel.
        ValueError: A leaf has no dimension ``dim``; ``dst`` is not a rank of the group.
        TypeError: A leaf is no dense tensor (sparse, DTensor, NumPy strings, …).

    Cost: one header exchange, which carries a small tree (32 KiB in small groups) and the sizes, where they differ, of
    some thousand leaves; for larger ones one exchange of W × the tree's bytes.

    Source: accelerate's ``gather``.
    """
    with calling(communicators(group), "gather", timeout) as comms:

        def prepare() -> Call:
            check_rank(comms, "dst", dst)
            leaves = Leaves(tensor, vectors=True)
            dims_of(leaves, dim, "gather")
            arguments = {"dst": dst if dst is None else index(dst), "dim": index(dim)}
            nbytes, payload = leaves.layout.packing.nbytes, small_payload(comms, leaves)
            return Call(arguments, leaves, dim, nbytes, payload, advice=_pad_first(dim))

        call, agreement = agree(comms, "gather", prepare, check)
        leaves = call.leaves
        assert leaves is not None
        dims = leaves.layout.free(dim)[0]
        shapes = every_shape(comms, leaves, dims, agreement)
        results: Indexed
        if agreement.has_payload:
            results = from_payloads(agreement, leaves, shapes, dims)
        else:
            results = _gather_buckets(comms, leaves, shapes, dims, leaves.travelling(agreement.uniform), dst)
        comms.watch.is_awaited = False
        return None if dst not in (None, comms.rank) else leaves.rebuild(results, agreement.uniform, as_array)


def _gather_buckets(
    comms: Communicators,
    leaves: Leaves,
    shapes: Sequence[Shapes],
    dims: Sequence[int],
    travelling: Sequence[int],
    dst: int | None,
) -> dict[int, torch.Tensor]:
    """Gather bucket by bucket, all of them under way at once."""
    nbytes = smallest(shapes, leaves.layout.dtypes)
    arrivals = [
        _gather(comm, leaves, shapes, dims, large_alone(members, nbytes), dst)
        for comm, members in by_comm(comms, leaves.tensors, travelling, sum(nbytes))
    ]
    return {i: result for finish in arrivals for i, result in finish().items()}


def _gather(
    comm: TorchComm,
    leaves: Leaves,
    shapes: Sequence[Shapes],
    dims: Sequence[int],
    buckets: Sequence[Sequence[int]],
    dst: int | None,
) -> Callable[[], dict[int, torch.Tensor]]:
    """Begin to gather the leaves of one communicator; returns what waits for them."""
    groups = [[leaves.tensors[i] for i in bucket] for bucket in buckets]
    packed = [wire.pack(group, comm.get_device()) for group in groups]
    landings = [
        Landing(comm, group, [[row[i] for i in bucket] for row in shapes], [dims[i] for i in bucket])
        for group, bucket in zip(groups, buckets, strict=True)
        if dst in (None, comm.get_rank())
    ]
    if dst is None:
        works = [comm.all_gather_parts([landing.buffers for landing in landings], packed, async_op=True)]
    else:
        targets = [landing.buffers for landing in landings] or [()] * len(packed)
        works = [comm.gather(to, data, dst, async_op=True) for to, data in zip(targets, packed, strict=True)]

    def finish() -> dict[int, torch.Tensor]:
        for work in works:
            work.wait()
        every = zip(buckets, landings, strict=False)  # nothing lands on ranks other than dst
        arrived = [pair for bucket, at in every for pair in zip(bucket, at.results(), strict=True)]
        return {i: result.to(leaves.tensors[i].device) for i, result in arrived}

    return finish


@eager
def broadcast(
    tensor: Tree,
    from_process: int = 0,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Give every rank the source's values.

    Law: ``broadcast(x, from_process=s) == x of rank s`` for every leaf. Tensors and arrays are written in place, so
    that the caller's own are filled; Python numbers and NumPy scalars are in the returned tree only.

    Example:
        >>> import torch, easydist
        >>> easydist.broadcast({"w": torch.ones(2), "lr": 0.1})
        {'w': tensor([1., 1.]), 'lr': 0.1}

    Args:
        tensor: Any tree; on ranks other than the source also None: they get new tensors.
        from_process: The source, a rank inside the group.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        The tree with the same tensors and arrays, now equal on all ranks.

    Raises:
        DisagreementError: Paths, dtypes or shapes differ between ranks; nothing was written.
        RemoteError: One rank's tree could not be sent or written (read-only arrays, expanded tensors, …).
        ValueError: ``from_process`` is not a rank of the group; its tree is None and another rank's is not.

    Cost: one header exchange, which carries a small tree (32 KiB in small groups); for a larger one a broadcast of the
    tree's bytes. Where some ranks pass None, two header exchanges more.

    Source: accelerate's ``broadcast``.
    """
    with calling(communicators(group), "broadcast", timeout) as comms:

        def prepare() -> Call:
            check_rank(comms, "from_process", from_process)
            leaves = Leaves(tensor)
            if comms.rank != from_process:
                leaves.check_writable()
            call = Call({"from_process": index(from_process)}, leaves, absent=tensor is None)
            if comms.rank == from_process:
                call.nbytes, call.payload = leaves.layout.packing.nbytes, small_payload(comms, leaves)
            return call

        call, agreement = trust(comms, prepare, check) or agree(comms, "broadcast", prepare, check)
        return _broadcast(comms, tensor, call, agreement, from_process)


@eager
def copy_tensor_to_devices(
    tensor: Tree = None, *, group: Group = None, check: bool | None = None, timeout: Timeout | None = None
) -> Tree:
    """Give every rank the tree that exactly one of them holds; the others pass None.

    Law: ``copy_tensor_to_devices(x if rank == s else None) == x of rank s``, for any one s.

    Args:
        tensor: The tree on one rank, None elsewhere.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        The tree; new tensors on the ranks that passed None.

    Raises:
        ValueError: No rank or more than one rank has a tree.

    Cost: three header exchanges, one small broadcast, one broadcast of the tree's bytes.

    Source: accelerate's ``copy_tensor_to_devices``.
    """
    with calling(communicators(group), "copy_tensor_to_devices", timeout) as comms:
        call, agreement = agree(
            comms,
            "copy_tensor_to_devices",
            lambda: Call(leaves=Leaves(tensor), follows=True, absent=tensor is None),
            check,
        )
        holders = [rank for rank in range(comms.size) if rank not in agreement.absent]
        comms.watch.is_awaited = len(holders) == 1
        if len(holders) != 1:
            raise ValueError(f"copy_tensor_to_devices: exactly one rank has to hold the tensor, but ranks {holders} do")
        return _broadcast(comms, tensor, call, agreement, holders[0])


def _broadcast(comms: Communicators, tensor: Tree, call: Call, agreement: Agreement, source: int) -> Tree:
    if len(agreement.absent) == comms.size or comms.size == 1:
        return tensor
    if source in agreement.absent:
        comms.watch.is_awaited = False
        raise ValueError(f"{comms.watch.operation}: rank {source} is the source, but its tree is None")
    leaves = call.leaves
    assert leaves is not None
    if agreement.absent:
        announced = agree(comms, comms.watch.operation, lambda: _announced(comms, tensor, source))
        shared = _shared_structure(comms, tensor, source, announced)
        leaves = shared if call.absent else leaves
    elif agreement.has_payload:
        views = leaves.layout.packing.unpack(agreement.payload(source))
        return tensor if comms.rank == source else leaves.write(dict(enumerate(views)), False)
    return _broadcast_buckets(comms, tensor, leaves, agreement.uniform, source)


def _broadcast_buckets(comms: Communicators, tensor: Tree, leaves: Leaves, tied: bool, source: int) -> Tree:
    landed: dict[int, torch.Tensor] = {}
    works = []
    nbytes = [wire.nbytes(tensor) for tensor in leaves.tensors]
    for comm, members in by_comm(comms, leaves.tensors, leaves.travelling(tied), sum(nbytes)):
        buffers = []
        for bucket in large_alone(members, nbytes):
            targets = [leaves.tensors[i] for i in bucket]
            buffers.append(wire.pack(targets, comm.get_device()) if comms.rank == source else _target(comm, targets))
            views = wire.unpack(buffers[-1], [t.dtype for t in targets], [t.shape for t in targets])
            landed |= dict(zip(bucket, views, strict=True))
        works.append(comm.broadcast_parts(buffers, source, async_op=True))
    for work in works:
        work.wait()
    comms.watch.is_awaited = False
    return tensor if comms.rank == source else leaves.write(landed, tied)


def _target(comm: TorchComm, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where a broadcast arrives: the target itself where there is one, contiguous and in the right place."""
    if len(targets) == 1 and targets[0].is_contiguous() and targets[0].device.type == comm.get_device().type:
        return wire.as_bytes(targets[0])
    return packed_like(comm, [t.dtype for t in targets], [t.shape for t in targets])


def _announced(comms: Communicators, data: Tree, source: int) -> Call:
    call = Call(follows=True)
    return _announce(call, data) if comms.rank == source else call


def _announce(call: Call, data: Tree) -> Call:
    """The source's call, with the structure of its tree as what it sends; what is no leaf is pickled."""
    encoded = codec.encode(get_data_structure(data))
    call.nbytes, call.payload = encoded.numel(), [encoded]
    return call


def _shared_structure(
    comms: Communicators, data: Tree, source: int, announced: tuple[Call, Agreement], hollow: bool = False
) -> Leaves:
    """Leaves like the source's on every rank, and on the source its own."""
    (call, agreement), operation = announced, comms.watch.operation
    leaves: Leaves | None = None
    if agreement.has_payload:
        buffer = agreement.payload(source).clone()
    else:
        buffer = torch.empty(agreement.nbytes[source], dtype=torch.uint8, device="cpu")
        buffer = call.payload[0] if comms.rank == source else buffer
        comms.control.broadcast(buffer, source, async_op=False)

    def decode() -> Call:
        nonlocal leaves
        mine = comms.rank == source
        leaves = Leaves(data if mine else initialize_tensors(codec.decode(buffer), hollow=hollow))
        return Call(follows=True)

    agree(comms, operation, decode)  # a class that one receiver does not have must not stop the others
    assert leaves is not None
    return leaves


@eager
def scatter(
    tensor: Tree,
    from_process: int = 0,
    *,
    dim: int = 0,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Cut the source's tree into one part per rank.

    Law: ``scatter(x, from_process=s, dim=d) == torch.tensor_split(x of rank s, W, dim=d)[rank]`` for every leaf, so
    that ``gather(scatter(x)) == x``. The first ranks get one more where W does not divide the size.

    Example:
        >>> import torch, easydist
        >>> easydist.scatter({"x": torch.arange(3)})
        {'x': tensor([0, 1, 2])}

    Args:
        tensor: Any tree on the source; the other ranks may pass None, what they pass is not looked at.
        from_process: The source, a rank inside the group.
        dim: Along which dimension.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        A new tree with this rank's part.

    Raises:
        RemoteError: The source's tree could not be sent.
        ValueError: A leaf has no dimension ``dim``; ``from_process`` is not a rank of the group.

    Cost: two header exchanges, of which the first carries the structure, one scatter of the tree's bytes.
    """
    with calling(communicators(group), "scatter", timeout) as comms:
        is_source = comms.rank == from_process

        def prepare() -> Call:
            check_rank(comms, "from_process", from_process)
            leaves = Leaves(tensor if is_source else None)
            dims_of(leaves, dim, "scatter")
            arguments = {"from_process": index(from_process), "dim": index(dim)}
            call = Call(arguments, leaves, dim, follows=True, absent=not is_source)
            return _announce(call, tensor) if is_source and comms.size > 1 else call

        announced = agree(comms, "scatter", prepare, check)
        leaves = announced[0].leaves
        if comms.size > 1:
            leaves = _shared_structure(comms, tensor, from_process, announced, hollow=True)
        assert leaves is not None
        tensors = leaves.tensors
        results: dict[int, torch.Tensor] = {}
        for comm, indices in by_comm(comms, tensors, leaves.travelling(tied=True), leaves.layout.packing.nbytes):
            parts = [_parts(tensors[i], comms.size, dim) for i in indices]
            mine = [column[comms.rank] for column in parts]
            buffer = packed_like(comm, [t.dtype for t in mine], [t.shape for t in mine])
            packed = [wire.pack(list(row), comm.get_device()) for row in zip(*parts, strict=True)] if is_source else []
            comm.scatter(buffer, packed, from_process, async_op=False)
            views = wire.unpack(buffer, [t.dtype for t in mine], [t.shape for t in mine])
            results |= {i: view.clone().to(tensors[i].device) for i, view in zip(indices, views, strict=True)}
        comms.watch.is_awaited = False
        return leaves.rebuild(results, True, as_array)


def _parts(tensor: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    """What each rank gets of a tensor."""
    bounds = [split_bounds(tensor.shape[dim], size, rank) for rank in range(size)]
    return [tensor.narrow(dim, start, stop - start) for start, stop in bounds]


@eager
def all_to_all(
    tensor: Tree, *, dim: int = 0, group: Group = None, check: bool | None = None, timeout: Timeout | None = None
) -> Tree:
    """Cut every rank's tree into one part per rank, and give part r of all of them to rank r.

    Law: ``all_to_all(x, dim=d) == torch.cat([torch.tensor_split(x of rank s, W, dim=d)[rank] for s in ranks], dim=d)``
    for every leaf. The sizes along ``dim`` may differ between ranks.

    Example:
        >>> import torch, easydist
        >>> easydist.all_to_all({"x": torch.arange(3)})
        {'x': tensor([0, 1, 2])}

    Args:
        tensor: Any tree.
        dim: Along which dimension.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        A new tree of the same structure.

    Raises:
        DisagreementError: Paths, dtypes or shapes apart from ``dim`` differ between ranks.
        RemoteError: Another rank's tree could not be sent.
        ValueError: A leaf has no dimension ``dim``.

    Cost: one header exchange, one exchange of the tree's bytes; where sizes differ, 8 bytes per leaf more.
    """
    with calling(communicators(group), "all_to_all", timeout) as comms:

        def prepare() -> Call:
            leaves = Leaves(tensor)
            dims_of(leaves, dim, "all_to_all")
            return Call({"dim": index(dim)}, leaves, dim, follows=True, advice=_pad_first(dim))

        call, agreement = agree(comms, "all_to_all", prepare, check)
        leaves, uniform = call.leaves, agreement.uniform
        assert leaves is not None
        tensors, dims = leaves.tensors, leaves.layout.free(dim)[0]
        every = every_shape(comms, leaves, dims, agreement)
        results: dict[int, torch.Tensor] = {}
        total = sum(smallest(every, leaves.layout.dtypes))
        for comm, indices in by_comm(comms, tensors, leaves.travelling(tied=uniform), total):
            dtypes = [tensors[i].dtype for i in indices]
            shapes = [[_share_shape(row[i], dims[i], comms) for i in indices] for row in every]
            outputs = [packed_like(comm, dtypes, row) for row in shapes]
            parts = zip(*[_parts(tensors[i], comms.size, dims[i]) for i in indices], strict=True)
            comm.all_to_all(outputs, [wire.pack(row, comm.get_device()) for row in parts], async_op=False)
            joined = join(outputs, dtypes, shapes, [dims[i] for i in indices])
            results |= {i: result.to(tensors[i].device) for i, result in zip(indices, joined, strict=True)}
        comms.watch.is_awaited = False
        return leaves.rebuild(results, uniform, as_array)


def _share_shape(shape: Sequence[int], dim: int, comms: Communicators) -> list[int]:
    """The shape of this rank's part of a tensor."""
    start, stop = split_bounds(shape[dim], comms.size, comms.rank)
    return resized(shape, dim, stop - start)
