"""Sums over ranks that keep the dtype and can be cut along any dimension, and gathering with known sizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from easydist import memory
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb
from easydist.base.arguments import dimension
from easydist.data.arithmetic import split_sizes
from easydist.data.leaves import unwritable
from easydist.errors import DisagreementError
from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives
from easydist.transport.reduce_op import ReduceOp, check_reducible, combine
from easydist.typing import Tree
from easydist.verbs.broadcast import Broadcast
from easydist.verbs.buckets import by_comm, resized, small_payload
from easydist.verbs.gather import Gather, Moved
from easydist.verbs.trees import leaves_of


class _Sum(Verb[torch.Tensor]):
    """The base of the sums: one tensor, of the same shape on all ranks."""

    def __init__(self, input_: torch.Tensor, into: Sequence[torch.Tensor] = ()) -> None:
        self._input, self._into = input_, into

    def _call(self, comms: Communicators, arguments: dict[str, Any]) -> Call:
        if not isinstance(self._input, torch.Tensor):
            raise TypeError(f"{self.operation}: input_ has to be a tensor, got {type(self._input).__name__}")
        check_reducible(self._input.dtype, ReduceOp.SUM)
        leaves = leaves_of(self._input, self.operation)
        self._tensor: torch.Tensor = leaves.tensors[0]
        return Call(arguments, leaves, nbytes=leaves.layout.packing.nbytes, payload=small_payload(comms, leaves))

    def exchange(self, comms: Communicators, agreed: Agreement) -> torch.Tensor | None:
        tensor = self._tensor
        if comms.size == 1:
            return tensor.clone()
        if agreed.has_payload and agreed.call.payload:
            return None
        ((comm, _),) = by_comm(comms, [tensor], [0], tensor.nbytes)
        return self._summed(comm, comms.rank).to(tensor.device)

    def _check_output(self, shape: Sequence[int]) -> None:
        """Check that the result of this shape can be written to the output, if there is one."""
        if not self._into:
            return
        output: Any = self._into[0]
        if not isinstance(output, torch.Tensor) or output.dtype is not self._input.dtype or output.shape != (*shape,):
            told = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, torch.Tensor) else repr(output)[:60]
            raise ValueError(f"{self.operation}: output has to be {self._input.dtype} {(*shape,)}, got {told}")
        if reason := unwritable(output):
            raise ValueError(f"{self.operation}: output {reason}, so it cannot be written in place")

    def _delivered(self, total: torch.Tensor) -> torch.Tensor:
        return self._into[0].detach().copy_(total) if self._into else total

    @abstractmethod
    def _summed(self, comm: Collectives, rank: int) -> torch.Tensor:
        """Return this rank's part of the sum, on the communicator's device."""

    def _payloads(self, comms: Communicators, agreed: Agreement) -> list[torch.Tensor]:
        """Return the tensors of all ranks if they arrived with the headers."""
        return [flat.view(self._tensor.shape) for flat in agreed.packed().flat[0]]


class AllReduce(_Sum):
    """The sum of a tensor over the ranks.

    Law: ``input_ of rank 0 + … + input_ of rank W-1``, a new tensor of the same dtype.
    """

    operation = "all_reduce"

    def prepare(self, comms: Communicators) -> Call:
        call = self._call(comms, {})
        self._check_output(self._input.shape)
        return call

    def _summed(self, comm: Collectives, rank: int) -> torch.Tensor:
        data = self._tensor.to(comm.get_device()).contiguous()
        total = memory.empty(data.shape, data.dtype, data.device)
        comm.all_reduce_from(total, data, ReduceOp.SUM, async_op=False)
        return total

    def result(self, comms: Communicators, agreed: Agreement, arrived: torch.Tensor | None) -> torch.Tensor:
        return self._delivered(combine(ReduceOp.SUM, self._payloads(comms, agreed)) if arrived is None else arrived)


class ReduceScatter(_Sum):
    """This rank's part of the sum of a tensor over the ranks.

    Law: ``(input_ of rank 0 + … + input_ of rank W-1).split(sizes, dim)[rank]``.

    Args:
        input_: A tensor.
        dim: The dimension along which it is cut.
        sizes: The size of each rank's part; None cuts it evenly.
        may_differ: Without sizes: the first ranks may get one more than the others.
        into: The tensor for the result; without one, it is new.
    """

    operation = "reduce_scatter"

    def __init__(
        self,
        input_: torch.Tensor,
        dim: int,
        sizes: Sequence[int] | None,
        may_differ: bool,
        into: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(input_, into)
        self._dim, self._given, self._may_differ = dim, sizes, may_differ

    def prepare(self, comms: Communicators) -> Call:
        given = None if self._given is None else [*map(index, self._given)]
        self._dim = dimension(self._dim)
        call = self._call(comms, {"dim": self._dim, "sizes": given})
        length = self._length()
        self._sizes = split_sizes(length, comms.size) if given is None else given
        fits = len(self._sizes) == comms.size and sum(self._sizes) == length and min(self._sizes) >= 0
        if not fits or (self._given is None and not self._may_differ and length % comms.size):
            told = "" if given is None else f" as sizes={given} says"
            raise ValueError(
                f"{self.operation}: dim {self._dim} of {tuple(self._input.shape)} cannot be split among {comms.size} "
                f"ranks{told}; pass sizes that add up to {length} to reduce_scatterv"
            )
        self._check_output(resized(self._input.shape, self._dim % self._input.ndim, self._sizes[comms.rank]))
        return call

    def _length(self) -> int:
        if not -self._input.ndim <= self._dim < self._input.ndim:
            raise ValueError(f"{self.operation}: a tensor of {self._input.ndim} dimensions has no dim {self._dim}")
        return self._input.shape[self._dim]

    def _summed(self, comm: Collectives, rank: int) -> torch.Tensor:
        parts = [part.to(comm.get_device()).contiguous() for part in self._tensor.split(self._sizes, self._dim)]
        output = memory.empty(parts[rank].shape, parts[rank].dtype, comm.get_device())
        comm.reduce_scatter(output, parts, ReduceOp.SUM, async_op=False)
        return output

    def result(self, comms: Communicators, agreed: Agreement, arrived: torch.Tensor | None) -> torch.Tensor:
        if arrived is None:
            mine = [tensor.split(self._sizes, self._dim)[comms.rank] for tensor in self._payloads(comms, agreed)]
            arrived = combine(ReduceOp.SUM, mine)
        return self._delivered(arrived)


class AllGather(Gather):
    """``gather`` to all ranks, under vLLM's name."""

    operation = "all_gather"


class BroadcastFrom(Broadcast):
    """``broadcast``, whose source is called ``src``."""

    source_name = "src"


class EvenGather(AllGather):
    """``all_gather`` of tensors whose sizes must be equal. All ranks raise if they are not."""

    def result(self, comms: Communicators, agreed: Agreement, arrived: Moved) -> Tree:
        shapes = [tuple(row[0]) for row in arrived[0]]
        if len({*shapes}) > 1:
            told = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise DisagreementError(
                f"all_gather: in a compiled function all ranks need one size along dim {agreed.call.dim}; got {told}\n"
                "Call all_gatherv outside of it."
            )
        return super().result(comms, agreed, arrived)


class AllGatherV(Gather):
    """``gather`` to all ranks with optional sizes, which are checked if they are given."""

    operation = "all_gatherv"

    def __init__(self, tensor: Tree, dim: int, sizes: Sequence[int] | None) -> None:
        super().__init__(tensor, None, dim)
        self._sizes, self._along = sizes, dim

    def prepare(self, comms: Communicators) -> Call:
        call = super().prepare(comms)
        if self._sizes is not None:
            call.arguments["sizes"] = sizes = [*map(index, self._sizes)]
            if len(sizes) != comms.size:
                raise ValueError(f"all_gatherv: sizes={sizes} has to have one entry per rank, {comms.size}")
            own = {shape[self._along] for shape in call.tree.layout.shapes}
            if own - {sizes[comms.rank]}:
                raise ValueError(
                    f"all_gatherv: rank {comms.rank} has sizes {sorted(own)} along dim {self._along}, but sizes={sizes}"
                )
        return call
