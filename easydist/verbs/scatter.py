"""The verb ``scatter``, which cuts one rank's tree into one part per rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import overload

import torch

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb, run
from easydist.base.arguments import UNSET, dimension, hiding
from easydist.base.eager import eager
from easydist.data.arithmetic import split_sizes
from easydist.data.leaves import Leaves, as_array
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.transport.comm import Collectives
from easydist.typing import Group, T, Timeout, Tree
from easydist.verbs.buckets import Bucket, Shapes, dims_of, parts_of, resized, share_of
from easydist.verbs.gradients import Adjoint, Gradient
from easydist.verbs.moving import Moving, moved, receiving
from easydist.verbs.ranks import named_rank, source_rank
from easydist.verbs.structures import announced, shared_leaves
from easydist.verbs.swap import cat, swap
from easydist.verbs.trees import demand_data, leaves_of

__all__ = ["scatter"]


@overload
def scatter(
    tensor: None,
    from_process: int = 0,
    *,
    dim: int = 0,
    group: Group = None,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree: ...
@overload
def scatter(
    tensor: T,
    from_process: int = 0,
    *,
    dim: int = 0,
    group: Group = None,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> T: ...
@eager
@hiding(from_process=0)
def scatter(
    tensor: Tree,
    from_process: int = UNSET,
    *,
    dim: int = 0,
    group: Group = None,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree:
    """Cut the source's tree into one part per rank, and give each rank its part.

    Law: ``scatter(x, from_process=s, dim=d) == torch.tensor_split(x of rank s, W, dim=d)[rank]`` for every leaf, so
    ``gather(scatter(x)) == x``. If W does not divide the size, the first ranks get one element more.

    Example:
        >>> import torch, easydist
        >>> easydist.scatter({"x": torch.arange(3)})
        {'x': tensor([0, 1, 2])}

    On two ranks::

        easydist.scatter(torch.arange(3) if rank == 0 else None)  # rank 0: tensor([0, 1])   rank 1: tensor([2])

    Args:
        tensor: Any tree on the source; ignored on other ranks, which may pass None.
        from_process: The source, a rank inside the group. With a group of torch, it must be the same rank of the world.
        dim: The dimension along which to cut.
        group: The ranks that take part.
        group_src: The source, a rank inside any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        differentiable: True to give the result its exact gradient, which takes an exchange in backward, on all ranks:
            see "Gradients" in the documentation.

    Returns:
        A new tree with this rank's part, detached from autograd unless ``differentiable``.

    Raises:
        RemoteError: The source's tree could not be sent.
        ValueError: A leaf has no dimension ``dim``, or ``from_process`` is not a rank of the group, or is
            ambiguous.
        TypeError: The call is ``differentiable``, but no leaf has a floating-point or complex dtype.

    Cost: two header exchanges, of which the first carries the structure (one more broadcast if it is larger than
    512 KiB / W), and one scatter of the tree's bytes; large leaves are scattered one by one, without a copy if ``dim``
    is 0.
    """
    source = named_rank(group, "scatter", "from_process", from_process, group_src)
    gradient = Gradient(timeout, check) if differentiable else None
    return run(_Scatter(tensor, source, dim, gradient), communicators(group), timeout, check)


_Arrived = tuple[Leaves, dict[int, torch.Tensor]]
"""Leaves like the source's, and this rank's part of each by its index."""


class _Scatter(Verb[Tree]):
    operation = "scatter"

    def __init__(self, tensor: Tree, source: int, dim: int, gradient: Gradient | None = None) -> None:
        self._tensor, self._source, self._dim, self._gradient = tensor, source, dim, gradient

    def prepare(self, comms: Communicators) -> Call:
        source = source_rank(comms, self.operation, "from_process", self._source)
        self._dim = dimension(self._dim)
        is_source = comms.rank == self._source
        leaves = leaves_of(self._tensor, "scatter") if is_source else Leaves(None)
        if is_source:
            if self._tensor is None:
                raise ValueError(f"scatter: rank {source} is the source, but its tree is None")
            demand_data(leaves, "scatter")
        dims_of(leaves, self._dim, "scatter")
        arguments = {"from_process": source, "dim": self._dim}
        call = Call(arguments, leaves, self._dim, absent=not is_source)
        if self._gradient is not None:
            self._gradient.ask(call, leaves, comms)
        return announced(call, self._tensor) if is_source and comms.size > 1 else call

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        if self._gradient is not None:
            self._gradient.learn(comms, agreed, self)

    def exchange(self, comms: Communicators, agreed: Agreement) -> _Arrived:
        leaves = agreed.call.tree
        if comms.size > 1:
            leaves = shared_leaves(comms, self.operation, self._tensor, self._source, agreed, hollow=True)
        own = zip(leaves.layout.shapes, leaves.layout.free(self._dim)[0], strict=True)
        shapes = [share_of(shape, dim, comms.size, comms.rank) for shape, dim in own]
        return leaves, moved(comms, leaves, (), True, functools.partial(self._begin, leaves, shapes), self._dim)

    def _begin(self, leaves: Leaves, shapes: Shapes, comm: Collectives, bucket: Bucket) -> Moving:
        rank, size = comm.get_rank(), comm.get_size()
        parts = {i: parts_of(leaves.tensors[i], size, self._dim) for i in (*bucket.alone, *bucket.packed)}
        place = receiving(comm, leaves.tensors, [shapes], [0] * len(shapes), bucket)
        ranks = range(size) if rank == self._source else ()
        rows = [bucket.messages(comm, {i: part[to] for i, part in parts.items()}) for to in ranks]
        every = zip(place.wholes, zip(*rows, strict=True) if rows else itertools.repeat(()), strict=False)
        return place, [comm.scatter(output, inputs, self._source, async_op=True) for output, inputs in every]

    def result(self, comms: Communicators, agreed: Agreement, arrived: _Arrived) -> Tree:
        leaves, results = arrived
        if self._gradient is not None:
            values = leaves.values if comms.rank == self._source else ()
            layout = leaves.layout
            adjoint = _adjoint(self._gradient, comms, self._source, layout.shapes, layout.free(self._dim)[0])
            ignored = None if comms.rank == self._source else self._tensor
            results = self._gradient.join(values, results, adjoint, ignored)
        return leaves.rebuild(results, True, as_array)


def _adjoint(
    gradient: Gradient, comms: Communicators, source: int, shapes: Sequence[Sequence[int]], dims: Sequence[int]
) -> Adjoint:
    """Return the transpose, which gives all parts back to the source; other ranks get tensors without elements."""
    size = comms.size
    if comms.rank != source:
        shapes, dims = [(0,)] * len(shapes), [0] * len(dims)

    def adjoint(indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        parts = [[one if to == source else one.new_empty(0) for to in range(size)] for one in gradients]
        leaves = [(shapes[i], dims[i]) for i in indices]
        back = [[resized(shape, dim, n) for n in split_sizes(shape[dim], size)] for shape, dim in leaves]
        return [cat(row, dim) for row, (_, dim) in zip(swap(gradient, parts, back), leaves, strict=True)]

    return adjoint
