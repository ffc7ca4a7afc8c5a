"""The exchange of the backward passes: parts of gradients go to the ranks to which the data belonged.

It is its own transpose, with the counts of what is sent and received swapped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb
from easydist.data import packing
from easydist.data.leaves import Leaves
from easydist.groups.communicators import Communicators
from easydist.verbs.buckets import Bucket, by_comm
from easydist.verbs.gradients import Gradient
from easydist.verbs.moving import results_of, swapped

Parts = Sequence[Sequence[torch.Tensor]]
"""``[i][r]``, the part of leaf i that goes to rank r, or comes from there."""

CountMatrix = Sequence[Sequence[int]]
"""``[i][r]``, the number of elements of such a part."""


def swap(gradient: Gradient, parts: Parts, shapes: Sequence[Sequence[Sequence[int]]]) -> Parts:
    """Give part r of every leaf to rank r, and return the parts that come from each rank.

    Args:
        gradient: The gradient of the call to which these gradients belong.
        parts: The parts to send.
        shapes: The shapes of the parts that come, in the same order.

    Cost: one header exchange, and one exchange of the parts.
    """
    sent = [[part.numel() for part in row] for row in parts]
    received = [[*map(math.prod, row)] for row in shapes]
    flat = [cat([part.reshape(-1) for part in row]) for row in parts]
    arrived = gradient.run(lambda own: _Swap(flat, sent, received, own))
    return [
        [piece.reshape(shape) for piece, shape in zip(one.split(counts), row, strict=True)]
        for one, counts, row in zip(arrived, received, shapes, strict=True)
    ]


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add parts in rank order; those of 16 and 8 bits in float32."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    return functools.reduce(torch.add, [part.to(wide) for part in parts]).to(dtype)


def cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Do as ``torch.cat``, also for floats of 8 bits."""
    dtype = parts[0].dtype
    wide = dtype if packing.is_copyable(dtype) else torch.float32
    return torch.cat([part.to(wide) for part in parts], dim).to(dtype)


class _Swap(Verb[list[torch.Tensor]]):
    operation = "backward of gather"  # or of the verb to which the gradients belong

    def __init__(self, flat: list[torch.Tensor], sent: CountMatrix, received: CountMatrix, gradient: Gradient) -> None:
        self._flat, self._sent, self._received, self._gradient = flat, sent, received, gradient

    def prepare(self, comms: Communicators) -> Call:
        leaves = Leaves(self._flat)
        call = Call({}, leaves, 0, nbytes=leaves.layout.packing.nbytes)
        return self._gradient.ask(call, leaves, comms)

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        self._gradient.learn(comms, agreed, self)

    def exchange(self, comms: Communicators, agreed: Agreement) -> dict[int, torch.Tensor]:
        leaves = agreed.call.tree
        arrived: dict[int, torch.Tensor] = {}
        sent, received = leaves.layout.ordered(self._sent), leaves.layout.ordered(self._received)
        for comm, indices in by_comm(comms, leaves.tensors, range(len(self._flat)), max(agreed.nbytes)):
            parts = {i: leaves.tensors[i].split(sent[i]) for i in indices}
            shapes = [[[counts[rank]] for counts in received] for rank in range(comms.size)]
            begun = swapped(comm, leaves.tensors, parts, shapes, [0] * len(received), Bucket((), indices))
            arrived |= results_of(leaves, comm, *begun)
        return arrived

    def result(self, comms: Communicators, agreed: Agreement, arrived: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        leaves, gradient = agreed.call.tree, self._gradient
        sent, received = leaves.layout.ordered(self._sent), leaves.layout.ordered(self._received)

        def adjoint(indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            parts = [one.split(received[i]) for one, i in zip(gradients, indices, strict=True)]
            return [cat(row) for row in swap(gradient, parts, [[[n] for n in sent[i]] for i in indices])]

        joined = gradient.join(leaves.values, arrived, adjoint)
        return [joined[i] for i in leaves.layout.places]
