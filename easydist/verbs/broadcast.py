"""The verbs ``broadcast`` and ``copy_tensor_to_devices``, which give one rank's tree to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from easydist import memory
from easydist.agreement.agree import agree, shared
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.reports import exchange_json
from easydist.agreement.runner import run
from easydist.base.arguments import UNSET, hiding
from easydist.base.eager import eager
from easydist.data import packing
from easydist.data.backing import mark_written
from easydist.data.leaves import Leaves, as_value
from easydist.data.packing import Packed
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.transport.comm import Collectives
from easydist.typing import Group, T, Timeout, Tree
from easydist.verbs.buckets import LARGE, LARGE_AT_ONCE, at_once, by_comm, packed_like, small_payload
from easydist.verbs.gradients import Gradient
from easydist.verbs.ranks import named_rank, source_rank
from easydist.verbs.reduce import Reduce
from easydist.verbs.structures import announced, shared_leaves
from easydist.verbs.trees import TreeVerb, demand_data, leaves_of

__all__ = ["broadcast", "copy_tensor_to_devices"]


@overload
def broadcast(
    tensor: None,
    from_process: int = 0,
    group: Group = None,
    *,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree: ...
@overload
def broadcast(
    tensor: T,
    from_process: int = 0,
    group: Group = None,
    *,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> T: ...
@eager
@hiding(from_process=0)
def broadcast(
    tensor: Tree,
    from_process: int = UNSET,
    group: Group = None,
    *,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree:
    """Give every rank the source's values.

    Law: ``broadcast(x, from_process=s) == x of rank s`` for every leaf. The caller's tensors and arrays are written in
    place, unless the call is ``differentiable``; new Python numbers and NumPy scalars are in the returned tree only.

    Example:
        >>> import torch, easydist
        >>> easydist.broadcast({"w": torch.ones(2), "lr": 0.1})
        {'w': tensor([1., 1.]), 'lr': 0.1}

    On two ranks::

        easydist.broadcast(torch.tensor([5 + rank]))  # both ranks: tensor([5])

    Args:
        tensor: Any tree. Ranks other than the source may pass None, and get new tensors.
        from_process: The source, a rank inside the group. With a group of torch, it must be the same rank of the world.
        group: The ranks that take part.
        group_src: The source, a rank inside any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        differentiable: True to give the result its exact gradient, which takes an exchange in backward, on all ranks:
            see "Gradients" in the documentation.

    Returns:
        The tree with the same tensors and arrays, now equal on all ranks; with ``differentiable`` a new tree.

    Raises:
        DisagreementError: Paths, dtypes or shapes differ between ranks; nothing was written.
        RemoteError: One rank's tree could not be sent or written (read-only arrays, expanded tensors, …).
        ValueError: ``from_process`` is not a rank of the group, or is ambiguous; or the source's tree is None and
            another rank's is not.
        TypeError: The call is ``differentiable``, but no leaf has a floating-point or complex dtype.

    Cost: one header exchange, which carries a small tree (512 KiB / W in small groups), and for a larger tree a
    broadcast of its bytes. If some ranks pass None, two more header exchanges, of which the first carries the structure
    (one more broadcast if it is larger), and a broadcast of the tree's bytes even if it is small. If leaves are one
    tensor on some ranks and several in the same memory on others, two small exchanges more.

    Source: accelerate's ``broadcast``.
    """
    source = named_rank(group, "broadcast", "from_process", from_process, group_src)
    gradient = Gradient(timeout, check) if differentiable else None
    return run(Broadcast(tensor, source, gradient), communicators(group), timeout, check)


@overload
def copy_tensor_to_devices(
    tensor: None = None,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree: ...
@overload
def copy_tensor_to_devices(
    tensor: T,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> T: ...
@eager
def copy_tensor_to_devices(
    tensor: Tree = None, *, group: Group = None, check: bool | None = None, timeout: Timeout | None = None
) -> Tree:
    """Give every rank the tree that exactly one of them holds; the others pass None.

    Law: ``copy_tensor_to_devices(x if rank == s else None) == x of rank s``, for any one s.

    On two ranks::

        easydist.copy_tensor_to_devices(torch.tensor([5]) if rank == 1 else None)  # both ranks: tensor([5])

    Args:
        tensor: The tree on one rank, None elsewhere.
        group: The ranks that take part.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        The tree; new tensors on the ranks that passed None.

    Raises:
        ValueError: No rank or more than one rank has a tree.

    Cost: three header exchanges, of which the second carries the structure (one more broadcast if it is larger
    than 512 KiB / W), and one broadcast of the tree's bytes.

    Source: accelerate's ``copy_tensor_to_devices``.
    """
    return run(_CopyTensorToDevices(tensor), communicators(group), timeout, check)


_Arrived = tuple[Leaves, Packed | dict[int, torch.Tensor], bool]
"""The target leaves, the values, packed or by the index of their leaf, and True if tied leaves came only once."""


class Broadcast(TreeVerb):
    operation = "broadcast"
    needs_headers = False

    source_name = "from_process"
    """The argument that holds the source, for the error."""

    def __init__(self, tensor: Tree, source: int, gradient: Gradient | None = None) -> None:
        self._tensor, self._source, self.gradient, self._own = tensor, source, gradient, tensor
        if gradient is not None:
            self.needs_headers = True  # they tell which leaves require grad

    def prepare(self, comms: Communicators) -> Call:
        source = source_rank(comms, self.operation, self.source_name, self._source)
        own = leaves = self._leaves()
        if self.gradient is not None and self._tensor is not None:
            self._tensor = own.rebuild([tensor.clone() for tensor in own.tensors], False, as_value)
            leaves = self._leaves()
        if comms.rank != self._source:
            leaves.check_writable()
        absent = self._tensor is None
        call = Call(
            {"from_process": source},
            leaves,
            absent=absent,
            aliases=leaves.aliases(),
        )
        if comms.rank == self._source:
            call.nbytes, call.payload = leaves.layout.packing.nbytes, small_payload(comms, leaves)
        if self.gradient is not None:
            self.gradient.ask(call, own if comms.rank == self._source else Leaves(None), comms)
        return call

    def _leaves(self) -> Leaves:
        """Return this rank's own leaves; none for a rank without a tree."""
        return Leaves(None) if self._tensor is None else leaves_of(self._tensor, self.operation)

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        if self._source in agreed.absent and len(agreed.absent) < comms.size > 1:
            raise ValueError(f"{self.operation}: rank {self._source} is the source, but its tree is None")
        if not agreed.absent:  # ranks without a tree learn of one without data from its announcement
            demand_data(agreed.call.tree, self.operation)
        if self.gradient is not None:
            self.gradient.learn(comms, agreed, self)

    def exchange(self, comms: Communicators, agreed: Agreement) -> _Arrived | None:
        if len(agreed.absent) == comms.size or comms.size == 1:
            return None
        if agreed.are_tied_unlike(self._source):
            self._check_ties(comms, agreed.call.aliases)
        leaves = agreed.call.tree
        if agreed.absent:
            own = self._shared(comms, leaves)
            leaves = own if agreed.call.absent else leaves
        elif agreed.has_payload:
            return leaves, agreed.packed(self._source), False
        return leaves, _move(comms, leaves, agreed.uniform, self._source), agreed.uniform

    def _check_ties(self, comms: Communicators, mine: list[int] | None) -> None:
        """Check that leaves that share memory on a rank share some on the source, too, as one object or as several."""
        every = exchange_json(comms, mine)
        for rank, ties in enumerate(every):
            source = every[self._source] or range(len(ties or ()))
            if ties and any(source[i] != source[tie] for i, tie in enumerate(ties)):
                text = (
                    f"{self.operation}: leaves that are one tensor on rank {rank} are not on rank {self._source}, so "
                    "they cannot hold its values; tie the same leaves on all ranks, or pass copies"
                )
                raise shared(comms, ValueError(text))

    def _shared(self, comms: Communicators, leaves: Leaves) -> Leaves:
        """Return leaves like the source's, also on the ranks that passed None."""

        def announcement() -> Call:
            if comms.rank != self._source:
                return Call()
            demand_data(leaves, self.operation)
            return announced(Call(), self._tensor)

        agreed = agree(comms, self.operation, announcement)
        return shared_leaves(comms, self.operation, self._tensor, self._source, agreed)

    def result(self, comms: Communicators, agreed: Agreement, arrived: _Arrived | None) -> Tree:
        if arrived is not None and comms.rank != self._source:
            leaves, values, tied = arrived
            if isinstance(values, Packed):
                self._tensor = leaves.write_packed(values, self._source)
            else:
                self._tensor = leaves.write(values, tied)
        if self.gradient is None:
            return self._tensor
        own, ignored = (self._own, None) if comms.rank == self._source else (None, self._own)
        return _joined(self.gradient, self._tensor, Leaves(own).values, ignored)


def _joined(gradient: Gradient, new: Tree, own: Sequence[Any], ignored: Tree) -> Tree:
    """Return the new tree of a differentiable call, joined with the source's own leaves."""
    leaves = Leaves(new)

    def adjoint(indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = gradient.run(lambda own: Reduce([*gradients], "sum", 1.0, None, own))
        return found

    joined = gradient.join(own, dict(enumerate(leaves.tensors)), adjoint, ignored)
    return leaves.rebuild(joined, False, as_value)


class _CopyTensorToDevices(Broadcast):
    operation = "copy_tensor_to_devices"
    needs_headers = True

    def __init__(self, tensor: Tree) -> None:
        super().__init__(tensor, -1)

    def prepare(self, comms: Communicators) -> Call:
        return Call(leaves=self._leaves(), absent=self._tensor is None)

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        holders = [rank for rank in range(comms.size) if rank not in agreed.absent]
        if len(holders) != 1:
            who = f"ranks {', '.join(map(str, holders))} do" if holders else "none does"
            raise ValueError(
                f"copy_tensor_to_devices: exactly one rank has to pass the tensor, but {who}; the others pass None"
            )
        self._source = holders[0]
        super().validate(comms, agreed)


def _move(comms: Communicators, leaves: Leaves, tied: bool, source: int) -> dict[int, torch.Tensor]:
    """Move the source's values, and return them on the others; those of a contiguous leaf arrive in the leaf itself."""
    arrived: dict[int, torch.Tensor] = {}
    works, received = [], []
    nbytes = leaves.layout.packing.lengths
    for comm, members in by_comm(comms, leaves.tensors, leaves.travelling(tied), sum(nbytes)):
        large = LARGE_AT_ONCE if comm.backend.shares_memory else LARGE
        bucket = at_once(members, nbytes, large).unpacked(nbytes)
        if comms.rank == source:
            messages = bucket.messages(comm, leaves.tensors)
        else:
            messages = [_target(comm, leaves.tensors[i]) for i in bucket.alone]
            alone = zip(bucket.alone, messages, strict=True)
            arrived |= {i: message.view(leaves.layout.shapes[i]) for i, message in alone}
            if bucket.packed:
                dtypes, shapes = (
                    [each[i] for i in bucket.packed] for each in (leaves.layout.dtypes, leaves.layout.shapes)
                )
                messages.append(packed_like(comm, dtypes, shapes))
                arrived |= dict(zip(bucket.packed, packing.unpack(messages[-1], dtypes, shapes), strict=True))
            received += messages
        works.append(comm.broadcast_parts(messages, source, async_op=True))
    for work in works:
        work.wait()
    mark_written(received)
    return arrived


def _target(comm: Collectives, leaf: torch.Tensor) -> torch.Tensor:
    """Return the flat memory for the values of a leaf: its own if it is contiguous and on the right device."""
    if leaf.is_contiguous() and leaf.device.type == comm.get_device().type:
        return leaf.view(-1)
    return memory.empty([leaf.numel()], leaf.dtype, comm.get_device())
