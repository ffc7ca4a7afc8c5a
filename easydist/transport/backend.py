"""The interface of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from easydist import memory
from easydist.errors import DisagreementError
from easydist.transport.described import Described
from easydist.transport.reduce_op import ReduceOp, combine, combine_into
from easydist.transport.work import Begun, Pending, TorchWork, handle

Addressed = tuple[torch.Tensor, int]
"""A flat tensor and the rank it goes to or comes from."""

Gathered = tuple[torch.Tensor, torch.Tensor, Sequence[int] | None]
"""A flat output, the data of this rank, and the number of elements from each rank; None if they are all the same."""


class Backend(ABC):
    """The part of a communicator that moves flat, contiguous, detached tensors between the ranks of one group.

    ``Collectives`` checks every argument first, so a backend only moves data: every tensor has one dimension, ranks are
    in range, the sizes fit, and all tensors have the same dtype. The dtype is uint8 if nothing is reduced, unless
    ``moves_any_dtype``. An operation may return before it has ended, and it may return anything with ``wait`` and
    ``is_completed``: a ``TorchWork`` costs as much as a short message.

    Attributes:
        name: ``"gloo"``, ``"nccl"``, ``"solo"``, …
        device: The device of the tensors.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        moves_any_dtype: True if data that is not reduced may have any dtype, which saves a view of every tensor.
        shares_memory: True if the ranks read each other's memory, so that one more copy costs as much as the exchange.
        collects: True if ``reduce`` needs memory for the data of all ranks on its root.
        call: The description of the operation that begins next, for backends that compare those of the ranks; None if
            the callers have compared them already.
        compares: True if the backend compares the operations of the ranks.
    """

    moves_any_dtype = shares_memory = compares = False
    collects = True
    call: Described | None = None
    name: str
    device: torch.device
    rank: int
    size: int

    @abstractmethod
    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor) -> Begun:
        """Law: ``output = cat([data of rank 0, …])``; all of one size."""

    @abstractmethod
    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> Begun:
        """Law: ``outputs[r] = data of rank r``; sizes may differ."""

    def all_gather_upto(self, rows: torch.Tensor, nbytes: int) -> Begun:
        """Law: row r of ``rows`` begins with the first ``nbytes`` of row r on rank r.

        The lengths of the others are not known in advance; the rest of each row is undefined.

        Args:
            rows: uint8, contiguous, one row of the same length per rank; this rank's own row holds its message.
            nbytes: The length of this rank's message.
        """
        return self.all_gather_single(rows.view(-1), rows[self.rank].clone())

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Begun:
        """Law: ``tensor = op(tensor of rank 0, tensor of rank 1, …)``, the same bits on every rank."""

    def all_gather_parts(self, parts: Sequence[Gathered]) -> Begun:
        """Law: for each that of ``all_gather_single``, or of ``all_gather_v`` of the parts of its output.

        Args:
            parts: For each the output, the data of this rank, and the sizes of the parts.
        """
        return TorchWork(
            [
                self.all_gather_single(output, data) if sizes is None else self.all_gather_v(output.split(sizes), data)
                for output, data, sizes in parts
            ]
        )

    def all_reduce_from(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> Begun:
        """Law: ``output = op(data of rank 0, data of rank 1, …)``; ``data`` is not changed."""
        output.copy_(data)
        return self.all_reduce(output, op)

    def all_reduce_parts(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], op: ReduceOp) -> Begun:
        """Law: ``outputs[i] = op(parts[i] of rank 0, parts[i] of rank 1, …)``; ``all_reduce_from`` of one dtype."""
        return TorchWork([self.all_reduce_from(*pair, op) for pair in zip(outputs, parts, strict=True)])

    @abstractmethod
    def all_to_all_v(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Begun:
        """Law: ``outputs[s] = inputs[rank] of rank s``; sizes may differ."""

    @abstractmethod
    def barrier(self) -> Begun:
        """Begin an operation that ends after every rank has begun it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> Begun:
        """Law: ``tensor = tensor of root``."""

    def broadcast_parts(self, tensors: Sequence[torch.Tensor], root: int) -> Begun:
        """Law: ``tensors[i] = tensors[i] of root``. Several ``broadcast`` as one operation."""
        return TorchWork([self.broadcast(tensor, root) for tensor in tensors])

    def multicast(self, tensor: torch.Tensor, root: int, ranks: Sequence[int]) -> Begun:
        """Law: ``tensor = tensor of root`` on these ranks. It has one size on all ranks; the others may overwrite it.

        Args:
            tensor: The tensor.
            root: The sending rank.
            ranks: The receiving ranks, ascending, without ``root``; the same on every rank.
        """
        return self.broadcast(tensor, root)

    @abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor], data: torch.Tensor, root: int) -> Begun:
        """Law, on ``root``: ``outputs[r] = data of rank r``; sizes may differ. On other ranks ``outputs`` is empty."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int) -> Begun:
        """Law: ``tensor = tensor that src sends``; the i-th ``recv`` from a rank meets its i-th ``send``."""

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Begun:
        """Law, on ``root``: ``tensor = op(tensor of rank 0, tensor of rank 1, …)``; elsewhere it is not changed."""
        # As bytes: they are gathered before they are reduced, and a backend need not move every dtype.
        if self.rank != root:
            return self.gather([], tensor.view(torch.uint8), root)
        parts = parts_beside(tensor, root, self.size)
        work = self.gather([part.view(torch.uint8) for part in parts], tensor.view(torch.uint8), root)
        return handle(work).followed_by(lambda: combined(tensor, op, parts))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> Begun:
        """Law: ``output = op(inputs[rank] of rank 0, inputs[rank] of rank 1, …)``; sizes may differ."""
        parts = parts_beside(inputs[self.rank], self.rank, self.size)
        work = self.all_to_all_v([part.view(torch.uint8) for part in parts], [i.view(torch.uint8) for i in inputs])
        return handle(work).followed_by(lambda: set_to(output, combine(op, parts)))

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Begun:
        """Law: ``output = inputs[rank] of root``; sizes may differ. On other ranks ``inputs`` is empty."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> Begun:
        """Send to another rank, which receives as many bytes; messages never mix with those of collectives.

        Args:
            tensor: The data, which must not change before the operation has ended.
            dst: The rank that calls ``recv``.
        """

    def batch(self, sends: Sequence[Addressed], recvs: Sequence[Addressed]) -> Begun:
        """Run several ``send`` and ``recv`` as one operation: all begin before any is waited for.

        Args:
            sends: Tensors, each with the rank that receives it.
            recvs: Tensors to be filled, each with the rank that sends it.
        """
        messages = [self.recv(*recv) for recv in recvs]
        return TorchWork(messages + [self.send(*send) for send in sends])

    def finish(self, limit: timedelta | None = None) -> None:  # noqa: B027 - most backends' operations go on alone
        """Wait until the collectives under way have ended, or raise because they cannot.

        Args:
            limit: The time limit of all waits together; None to leave it to the guard of the waits.
        """

    def compare(  # noqa: B027 - most cannot
        self, error: Callable[[str], DisagreementError], who: str, excludes: Callable[[], object] | None = None
    ) -> None:
        """Compare the ranks' operations from now on, as ``call`` describes them. All ranks call this.

        Args:
            error: Makes the error that all ranks raise if operations differ.
            who: The name of the communicator, for its text.
            excludes: Returns a true value while the caller lets no other thread begin an operation; None if it never
                does so.
        """

    def close(self) -> None:  # noqa: B027 - most backends own nothing
        """Release the resources that the backend itself has created."""


def parts_beside(mine: torch.Tensor, rank: int, size: int) -> Sequence[torch.Tensor]:
    """Return the flat data of one rank, and new memory for as much from each of the others, in rank order."""
    others = memory.empty([size - 1, mine.numel()], mine.dtype, mine.device).unbind()
    return [*others[:rank], mine, *others[rank:]]


def combined(target: torch.Tensor, op: ReduceOp, parts: Sequence[torch.Tensor]) -> Sequence[Pending]:
    """Reduce, as the last step of an operation; see ``combine_into`` and ``TorchWork.followed_by``."""
    combine_into(target, op, parts)
    return ()


def set_to(target: torch.Tensor, value: torch.Tensor) -> Sequence[Pending]:
    """Copy the result of a reduction, as its last step; see ``TorchWork.followed_by``."""
    target.copy_(value)
    return ()
