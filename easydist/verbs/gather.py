"""The verb ``gather``, which concatenates every rank's tree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from easydist import tree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.base.arguments import dimension
from easydist.base.eager import eager
from easydist.data.leaves import Indexed, Leaves, as_array, as_value
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.transport.comm import Collectives
from easydist.typing import Group, Item, T, Timeout, Tree
from easydist.verbs.buckets import (
    Bucket,
    Shapes,
    copied,
    dims_of,
    every_shape,
    from_payloads,
    pad_first,
    small_payload,
)
from easydist.verbs.gradients import Adjoint, Gradient, demand_everyone
from easydist.verbs.moving import Moving, moved, receiving
from easydist.verbs.ranks import check_rank, named_rank
from easydist.verbs.swap import swap, total
from easydist.verbs.trees import TreeVerb, leaves_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["gather"]


@overload
def gather(
    tensor: torch.Tensor,
    *,
    dst: None = None,
    dim: int = 0,
    as_list: Literal[False] = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> torch.Tensor: ...
@overload
def gather(
    tensor: NDArray[Item],
    *,
    dst: None = None,
    dim: int = 0,
    as_list: Literal[False] = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> NDArray[Item]: ...
@overload
def gather(
    tensor: complex,
    *,
    dst: None = None,
    dim: int = 0,
    as_list: Literal[False] = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> torch.Tensor: ...
@overload
def gather(
    tensor: T,
    *,
    dst: None = None,
    dim: int = 0,
    as_list: Literal[True],
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> list[T]: ...
@overload
def gather(
    tensor: Tree,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    dim: int = 0,
    as_list: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree: ...
@eager
def gather(
    tensor: Tree,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    dim: int = 0,
    as_list: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree:
    """Concatenate every rank's tree, leaf by leaf.

    Law: ``gather(x, dim=d) == torch.cat([x of rank 0, …, x of rank W-1], dim=d)`` for every leaf; a leaf without
    dimensions counts as one of shape ``(1,)``. The law holds at W = 1 as well. The sizes along ``dim`` may differ
    between ranks.

    With ``as_list``: ``gather(x, as_list=True) == [x of rank 0, …, x of rank W-1]``, a list of trees.

    Example:
        >>> import torch, easydist
        >>> easydist.gather({"loss": torch.tensor(0.5), "ids": ["a", torch.arange(2)]})
        {'loss': tensor([0.5000]), 'ids': ['a', tensor([0, 1])]}
        >>> easydist.gather({"loss": torch.tensor(0.5)}, as_list=True)
        [{'loss': tensor(0.5000)}]

    On two ranks::

        easydist.gather(torch.arange(2 + rank))  # both ranks: tensor([0, 1, 0, 1, 2])
        easydist.gather({"n": rank}, dst=0)  # rank 0: {'n': tensor([0, 1])}   rank 1: None

    Args:
        tensor: Any tree. Leaves may have any dtype, strides and device; NumPy arrays stay arrays; Python numbers become
            tensors of float64, int64, complex128 or bool. Values that are not leaves (str, None, …) have to be equal on
            all ranks, and are returned unchanged.
        dst: The only rank that gets the result, a rank inside the group; None for all ranks. With a group of torch, it
            must be the same rank of the world.
        group_dst: The same, for any group.
        dim: The dimension along which to concatenate.
        as_list: Return one tree per rank. Leaves are views of one tensor per leaf; numbers stay Python numbers. A leaf
            without dimensions then has none on any rank.
        group: The ranks that take part.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        differentiable: True to give the result its exact gradient, which takes an exchange in backward, on all ranks:
            see "Gradients" in the documentation.

    Returns:
        A new tree of the same structure, detached from autograd unless ``differentiable``; a tensor that was in several
        places is again one tensor. On ranks other than ``dst``: None.

    Raises:
        DisagreementError: Paths, dtypes or shapes apart from ``dim`` differ between ranks.
        RemoteError: Another rank's data could not be sent.
        ValueError: A leaf has no dimension ``dim``; ``dst`` is not a rank of the group, or is ambiguous, or is passed
            together with ``differentiable``.
        TypeError: A leaf is not a dense tensor (sparse, DTensor, NumPy strings, …); or the call is ``differentiable``,
            but no leaf has a floating-point or complex dtype.

    Cost: one header exchange, which carries a small tree (512 KiB / W in small groups); for larger trees one exchange
    of W × the tree's bytes. If sizes differ, the header carries those of some thousand leaves; more leaves need one
    more exchange, of 8 bytes per leaf.

    Source: accelerate's ``gather``.
    """
    dst = named_rank(group, "gather", "dst", dst, group_dst)
    gradient = Gradient(timeout, check) if differentiable else None
    return run(Gather(tensor, dst, dim, as_list, gradient), communicators(group), timeout, check)


Moved = tuple[Sequence[Shapes], Indexed | None]
"""Every rank's shapes, and the results, unless they came with the headers."""


class Gather(TreeVerb):
    """The verb itself, and the base of verbs that change the tree before and after the exchange."""

    operation = "gather"

    _spec: tree.Spec | None = None
    """The structure of the tree, if ``_tensor`` is the list of its leaves."""

    def __init__(
        self,
        tensor: Tree,
        dst: int | None,
        dim: int = 0,
        as_list: bool = False,
        gradient: Gradient | None = None,
    ) -> None:
        self._tensor, self._dst, self._dim, self._as_list, self.gradient = tensor, dst, dim, as_list, gradient

    def prepare(self, comms: Communicators) -> Call:
        dst = check_rank(comms, self.operation, "dst", self._dst)
        self._dim = dimension(self._dim)
        if self.gradient is not None:
            demand_everyone(self.operation, self._dst)
        leaves = leaves_of(self._tensor, self.operation, vectors=True, spec=self._spec)
        dims_of(leaves, self._dim, self.operation)
        arguments: dict[str, Any] = {"dst": dst, "dim": self._dim}
        if self._as_list:
            arguments["as_list"] = True
            if scalars := [leaves.layout.paths[i] or "the value" for i in _scalars(leaves)]:
                arguments["scalars"] = scalars  # beside a tensor of another rank they could be given back to neither
        nbytes, payload = leaves.layout.packing.nbytes, small_payload(comms, leaves)
        call = Call(arguments, leaves, self._dim, nbytes, payload, advice=pad_first(self._dim))
        return call if self.gradient is None else self.gradient.ask(call, leaves, comms)

    def exchange(self, comms: Communicators, agreed: Agreement) -> Moved:
        leaves = agreed.call.tree
        shapes = every_shape(comms, leaves, self._dim, agreed)
        if comms.size == 1:
            return shapes, copied(leaves, leaves.travelling(agreed.uniform))
        if agreed.has_payload:
            return shapes, None
        begin = functools.partial(self._begin, leaves, shapes)
        return shapes, moved(comms, leaves, shapes, agreed.uniform, begin, self._dim, is_one=self._dst is None)

    def _begin(self, leaves: Leaves, shapes: Sequence[Shapes], comm: Collectives, bucket: Bucket) -> Moving:
        dst, place, size = self._dst, None, comm.get_size()
        messages = bucket.messages(comm, leaves.tensors)
        if dst in (None, comm.get_rank()):
            place = receiving(comm, leaves.tensors, shapes, leaves.layout.free(self._dim)[0], bucket)
            if dst is None:
                return place, [comm.all_gather_parts(place.wholes, messages, place.sizes, async_op=True)]
        targets = [()] * len(messages) if place is None else place.parts(size)
        return place, [comm.gather(to, data, dst, async_op=True) for to, data in zip(targets, messages, strict=True)]

    def result(self, comms: Communicators, agreed: Agreement, arrived: Moved) -> Tree:
        shapes, results = arrived
        if self._dst not in (None, comms.rank):
            return None
        leaves = agreed.call.tree
        if results is None:
            results = from_payloads(agreed, leaves, shapes, leaves.layout.free(self._dim)[0])
            if not leaves.is_cpu:  # all are empty
                results = [one.to(leaf.device) for one, leaf in zip(results, leaves.tensors, strict=True)]
        if self.gradient is not None:
            adjoint = _adjoint(self.gradient, comms.rank, shapes, leaves.layout.free(self._dim)[0])
            by_index = {i: results[i] for i in leaves.travelling(agreed.uniform)}
            results = self.gradient.join(leaves.values, by_index, adjoint)
        if self._as_list:
            return by_rank(leaves, results, shapes, leaves.layout.free(self._dim)[0], agreed.uniform)
        return leaves.rebuild(results, agreed.uniform, as_array)


def _adjoint(gradient: Gradient, rank: int, shapes: Sequence[Shapes], dims: Sequence[int]) -> Adjoint:
    """Return the transpose, which gives each rank the sum over ranks of the gradients of its rows."""

    def adjoint(indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        leaves = zip(indices, gradients, strict=True)
        parts = [one.split([row[i][dims[i]] for row in shapes], dims[i]) for i, one in leaves]
        mine = [[shapes[rank][i]] * len(shapes) for i in indices]
        return [*map(total, swap(gradient, parts, mine))]

    return adjoint


def by_rank(leaves: Leaves, results: Indexed, shapes: Sequence[Shapes], dims: Sequence[int], tied: bool) -> list[Tree]:
    """Return each rank's tree, made of views of the concatenated tensors."""
    indices, scalars = leaves.travelling(tied), {*_scalars(leaves)}
    parts = {i: results[i].split([row[i][dims[i]] for row in shapes], dims[i]) for i in indices}
    rows = [
        {i: parts[i][rank].reshape(()) if i in scalars else parts[i][rank] for i in indices}
        for rank in range(len(shapes))
    ]
    return [leaves.rebuild(row, tied, as_value) for row in rows]


def _scalars(leaves: Leaves) -> list[int]:
    """Return the indices of the leaves without dimensions, which each rank's tree has without dimensions again."""
    return [i for i, value in enumerate(leaves.values) if np.ndim(value) == 0]
