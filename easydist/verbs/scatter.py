"""The verb ``scatter``, which cuts one rank's tree into one part per rank."""

from __future__ import annotations

from operator import index
from typing import overload

import torch

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb, run
from easydist.arguments import UNSET, hiding
from easydist.data import packing
from easydist.data.leaves import Leaves, as_array
from easydist.eager import eager
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group, T, Timeout, Tree
from easydist.verbs.buckets import by_comm, dims_of, packed_like, parts_of
from easydist.verbs.ranks import check_rank, named_rank
from easydist.verbs.structures import announced, shared_leaves
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
) -> Tree:
    """Cut the source's tree into one part per rank, and give each rank its part.

    Law: ``scatter(x, from_process=s, dim=d) == torch.tensor_split(x of rank s, W, dim=d)[rank]`` for every leaf, so
    ``gather(scatter(x)) == x``. If W does not divide the size, the first ranks get one element more.

    Example:
        >>> import torch, easydist
        >>> easydist.scatter({"x": torch.arange(3)})
        {'x': tensor([0, 1, 2])}

    Args:
        tensor: Any tree on the source; ignored on other ranks, which may pass None.
        from_process: The source, a rank inside the group. With a group of torch, it must be the same rank of the world.
        dim: The dimension along which to cut.
        group: The ranks that take part.
        group_src: The source, a rank inside any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        A new tree with this rank's part.

    Raises:
        RemoteError: The source's tree could not be sent.
        ValueError: A leaf has no dimension ``dim``, or ``from_process`` is not a rank of the group, or is
            ambiguous.

    Cost: two header exchanges, of which the first carries the structure (one more broadcast if it is larger than
    32 KiB), and one scatter of the tree's bytes.
    """
    source = named_rank(group, "scatter", "from_process", from_process, group_src)
    return run(_Scatter(tensor, source, dim), communicators(group), timeout, check)


_Arrived = tuple[Leaves, dict[int, torch.Tensor]]
"""Leaves like the source's, and this rank's part of each by its index."""


class _Scatter(Verb[Tree]):
    operation = "scatter"

    def __init__(self, tensor: Tree, source: int, dim: int) -> None:
        self._tensor, self._source, self._dim = tensor, source, dim

    def prepare(self, comms: Communicators) -> Call:
        check_rank(comms, "from_process", self._source)
        is_source = comms.rank == self._source
        leaves = leaves_of(self._tensor, "scatter") if is_source else Leaves(None)
        if is_source:
            demand_data(leaves, "scatter")
        dims_of(leaves, self._dim, "scatter")
        arguments = {"from_process": index(self._source), "dim": index(self._dim)}
        call = Call(arguments, leaves, self._dim, absent=not is_source)
        return announced(call, self._tensor) if is_source and comms.size > 1 else call

    def exchange(self, comms: Communicators, agreed: Agreement) -> _Arrived:
        leaves = agreed.call.tree
        if comms.size > 1:
            leaves = shared_leaves(comms, self.operation, self._tensor, self._source, agreed, hollow=True)
        return leaves, self._move(comms, leaves)

    def _move(self, comms: Communicators, leaves: Leaves) -> dict[int, torch.Tensor]:
        tensors = leaves.tensors
        arrived: dict[int, torch.Tensor] = {}
        for comm, indices in by_comm(comms, tensors, leaves.travelling(tied=True), leaves.layout.packing.nbytes):
            parts = [parts_of(tensors[i], comms.size, self._dim) for i in indices]
            mine = [column[comms.rank] for column in parts]
            dtypes, shapes = [t.dtype for t in mine], [t.shape for t in mine]
            buffer = packed_like(comm, dtypes, shapes)
            rows = zip(*parts, strict=True) if comms.rank == self._source else ()
            packed = [packing.pack(row, comm.get_device()) for row in rows]
            comm.scatter(buffer, packed, self._source, async_op=False)
            arrived |= zip(indices, packing.unpack(buffer, dtypes, shapes), strict=True)
        return arrived

    def result(self, comms: Communicators, agreed: Agreement, arrived: _Arrived) -> Tree:
        leaves, parts = arrived
        results = {i: part.clone().to(leaves.tensors[i].device) for i, part in parts.items()}
        return leaves.rebuild(results, True, as_array)
