"""The verb ``all_to_all``, which gives rank r part r of every rank's tree."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.base.arguments import dimension
from easydist.base.eager import eager
from easydist.data.leaves import Leaves, as_array
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.transport.comm import Collectives
from easydist.typing import Group, T, Timeout, Tree
from easydist.verbs.buckets import Bucket, Shapes, dims_of, every_shape, pad_first, parts_of, share_of
from easydist.verbs.gradients import Adjoint, Gradient
from easydist.verbs.moving import Moving, moved, swapped
from easydist.verbs.swap import cat, swap
from easydist.verbs.trees import TreeVerb, leaves_of

__all__ = ["all_to_all"]


@eager
def all_to_all(
    tensor: T,
    *,
    dim: int = 0,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> T:
    """Cut every rank's tree into one part per rank, and give part r of each tree to rank r.

    Law: ``all_to_all(x, dim=d) == torch.cat([torch.tensor_split(x of rank s, W, dim=d)[rank] for s in ranks], dim=d)``
    for every leaf. The sizes along ``dim`` may differ between ranks.

    Example:
        >>> import torch, easydist
        >>> easydist.all_to_all({"x": torch.arange(3)})
        {'x': tensor([0, 1, 2])}

    On two ranks::

        easydist.all_to_all(torch.arange(3) + 10 * rank)  # rank 0: tensor([ 0,  1, 10, 11])   rank 1: tensor([ 2, 12])

    Args:
        tensor: Any tree.
        dim: The dimension along which to cut and concatenate.
        group: The ranks that take part.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        differentiable: True to give the result its exact gradient, which takes an exchange in backward, on all ranks:
            see "Gradients" in the documentation.

    Returns:
        A new tree of the same structure, detached from autograd unless ``differentiable``.

    Raises:
        DisagreementError: Paths, dtypes or shapes apart from ``dim`` differ between ranks.
        RemoteError: Another rank's tree could not be sent.
        ValueError: A leaf has no dimension ``dim``.

    Cost: one header exchange, and one exchange of the tree's bytes; large leaves are exchanged one by one, without a
    copy if ``dim`` is 0. If sizes differ, the header carries those of some thousand leaves; more leaves need one more
    exchange, of 8 bytes per leaf.
    """
    gradient = Gradient(timeout, check) if differentiable else None
    swapped: T = run(_AllToAll(tensor, dim, gradient), communicators(group), timeout, check)
    return swapped


_Moved = tuple[Sequence[Shapes], dict[int, torch.Tensor]]
"""Every rank's shapes, and the results by the index of their leaf."""


class _AllToAll(TreeVerb):
    operation = "all_to_all"

    def __init__(self, tensor: Tree, dim: int, gradient: Gradient | None = None) -> None:
        self._tensor, self._dim, self.gradient = tensor, dim, gradient

    def prepare(self, comms: Communicators) -> Call:
        self._dim = dimension(self._dim)
        leaves = leaves_of(self._tensor, "all_to_all")
        dims_of(leaves, self._dim, "all_to_all")
        call = Call({"dim": self._dim}, leaves, self._dim, advice=pad_first(self._dim))
        return call if self.gradient is None else self.gradient.ask(call, leaves, comms)

    def exchange(self, comms: Communicators, agreed: Agreement) -> _Moved:
        leaves = agreed.call.tree
        every = every_shape(comms, leaves, self._dim, agreed)
        dims = leaves.layout.free(self._dim)[0]
        rows = every[:1] if agreed.uniform else every
        shares = [[share_of(*one, comms.size, comms.rank) for one in zip(row, dims, strict=True)] for row in rows]
        shares = shares * comms.size if agreed.uniform else shares
        begin = functools.partial(self._begin, leaves, shares)
        return every, moved(comms, leaves, every, agreed.uniform, begin, self._dim)

    def _begin(self, leaves: Leaves, shares: Sequence[Shapes], comm: Collectives, bucket: Bucket) -> Moving:
        size, dims = comm.get_size(), leaves.layout.free(self._dim)[0]
        parts = {i: parts_of(leaves.tensors[i], size, dims[i]) for i in (*bucket.alone, *bucket.packed)}
        return swapped(comm, leaves.tensors, parts, shares, dims, bucket)

    def result(self, comms: Communicators, agreed: Agreement, arrived: _Moved) -> Tree:
        leaves, (every, results) = agreed.call.tree, arrived
        if self.gradient is not None:
            adjoint = _adjoint(self.gradient, comms, every, leaves.layout.free(self._dim)[0])
            results = self.gradient.join(leaves.values, results, adjoint)
        return leaves.rebuild(results, agreed.uniform, as_array)


def _adjoint(gradient: Gradient, comms: Communicators, every: Sequence[Shapes], dims: Sequence[int]) -> Adjoint:
    """Return the transpose, which gives every part back to the rank from which it came."""
    rank, size = comms.rank, comms.size

    def adjoint(indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        leaves = list(zip(indices, [dims[i] for i in indices], gradients, strict=True))
        parts = [one.split([share_of(row[i], d, size, rank)[d] for row in every], d) for i, d, one in leaves]
        shapes = [[share_of(every[rank][i], d, size, to) for to in range(size)] for i, d, _ in leaves]
        return [cat(row, d) for row, (_, d, _) in zip(swap(gradient, parts, shapes), leaves, strict=True)]

    return adjoint
