"""The gradients of verbs: results join autograd's graph, and backward makes the transposed call.

A verb computes its results from detached tensors. Those that have a gradient are then joined with the inputs by one
node of the graph, whatever their number. The node of a ``differentiable`` call is there on every rank, also where no
input requires grad, because backward is a call in which all ranks take part.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from easydist import tree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import R, Verb, run
from easydist.base.eager import eager
from easydist.data.backing import absence
from easydist.data.leaves import Leaves
from easydist.groups.communicators import Communicators
from easydist.typing import Timeout, Tree

Adjoint = Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""The transpose of a verb: from indices of leaves and the gradients of their results to those of this rank's leaves.

It consists of differentiable operations, so that it can be differentiated again. A graph keeps it, so it holds no data.
"""


def has_gradient(dtype: torch.dtype) -> bool:
    """True if tensors of this dtype can require grad."""
    return dtype.is_floating_point or dtype.is_complex


class Gradient:
    """The gradient of one call with ``differentiable=True``, and that of a call in backward, which has an origin.

    Args:
        timeout: The time limit of the call, and of that in backward.
        check: True to compare the calls; None to do as ``EASYDIST_CHECK`` says.
        origin: The number and the site of the call whose gradient the verb computes; None outside of backward.

    Attributes:
        is_joined: True if results join the graph.
    """

    _comms: Communicators
    _marks: int

    def __init__(
        self, timeout: Timeout | None, check: bool | None = None, origin: tuple[int, str | None] | None = None
    ) -> None:
        self._timeout, self._check, self._origin = timeout, check, origin
        self.is_joined = origin is None or torch.is_grad_enabled()

    def ask(self, call: Call, leaves: Leaves, comms: Communicators) -> Call:
        """Add to a rank's call that results join the graph and which of its leaves require grad, and return it.

        Raises:
            ValueError: There are more leaves than the frame has room for.
        """
        if self._origin is not None:
            call.arguments["call"] = self._origin[0]
        if not self.is_joined:
            return call
        call.arguments["differentiable"] = True
        if not torch.is_grad_enabled():
            call.arguments["no_grad"] = True
        words = -(-len(leaves.values) // 64) if any(map(has_gradient, leaves.layout.dtypes)) else 0
        if 8 * words > comms.frames.nbytes // 2:
            count = f"{4 * comms.frames.nbytes} leaves, got {len(leaves.values)}"
            raise ValueError(f"differentiable=True takes at most {count}; stack some of them")
        call.numbers = words, *struct.unpack(f"<{words}q", _marks(leaves).to_bytes(8 * words, "little"))
        return call

    def learn(self, comms: Communicators, agreed: Agreement, verb: Verb[Any]) -> None:
        """Take from the agreement which leaves are differentiated: those that require grad on any rank.

        Raises:
            TypeError: No leaf of the tree can have a gradient; all ranks raise this.
        """
        if not self.is_joined:
            return
        words = agreed.words()
        if not any(words):
            raise TypeError(
                f"{verb.operation}: differentiable=True, but no leaf has a floating-point or complex dtype, and others "
                "have no gradient; leave it out"
            )
        marks = [int.from_bytes(struct.pack(f"<{len(row)}q", *row), "little") for row in words]
        self._comms, self._marks = comms, functools.reduce(int.__or__, marks)
        self._operation, self._number, self._site = verb.operation, comms.monitor.number, comms.monitor.site

    def join(
        self, values: Sequence[Any], results: Mapping[int, torch.Tensor], adjoint: Adjoint, ignored: Tree = None
    ) -> dict[int, torch.Tensor]:
        """Return the results, of which those that are differentiated have the gradient ``adjoint``.

        Args:
            values: This rank's leaves; none if it has passed no tree.
            results: The results by index.
            adjoint: The transpose of the verb.
            ignored: A tree that this rank has passed although the verb takes another's. The gradients of its dense
                leaves are zeros, and through them ``torch.autograd.grad`` and a second backward find the nodes of this
                rank.
        """
        chosen = [i for i in results if self.is_joined and self._marks >> i & 1]
        if not chosen:
            return dict(results)
        inputs = {i: values[i] for i in chosen if i < len(values) and requires_grad(values[i])}
        others = [leaf for leaf in tree.leaves(ignored) if requires_grad(leaf) and not absence(leaf)]
        kept, kinds = {*inputs}, [(other.shape, other.dtype, other.device) for other in others]

        def backward(gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
            found = adjoint(chosen, cast(Sequence[torch.Tensor], gradients))
            own = [gradient for i, gradient in zip(chosen, found, strict=True) if i in kept]
            return [*own, *_zeros(found[0], kinds)] if kinds else own

        joined = _joined([results[i] for i in chosen], [*inputs.values(), *others], backward)
        return dict(results) | dict(zip(chosen, joined, strict=True))

    def run(self, make: Callable[[Gradient], Verb[R]]) -> R:
        """Make a call of backward, which all ranks make for the same call."""
        verb = make(Gradient(self._timeout, self._check, (self._number, self._site)))
        verb.operation, verb.site = f"backward of {self._operation}", self._site
        return run(verb, self._comms, self._timeout, self._check)


def demand_everyone(operation: str, dst: int | None) -> None:
    """Refuse a differentiable call with a result on one rank alone.

    Raises:
        ValueError: ``dst`` is not None.
    """
    if dst is not None:
        raise ValueError(
            f"{operation}: differentiable=True needs a result on every rank, because all take part in backward; "
            "leave out dst="
        )


def requires_grad(value: Any) -> bool:
    """True if a leaf is a tensor that requires grad."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _marks(leaves: Leaves) -> int:
    if not (leaves.requires_grad and torch.is_grad_enabled()):
        return 0
    return sum(1 << i for i, value in enumerate(leaves.values) if requires_grad(value))


def with_own_gradient(
    values: Sequence[Any], results: Mapping[int, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the results, of which those of leaves that require grad have a gradient that needs no exchange.

    Args:
        values: This rank's leaves.
        results: The results by index.
        change: The function from the gradient of a result to that of this rank's leaf.
    """
    chosen = [i for i in results if requires_grad(values[i])]

    def backward(gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        return [None if gradient is None else change(gradient) for gradient in gradients]

    joined = _joined([results[i] for i in chosen], [values[i] for i in chosen], backward, is_shared=False)
    return dict(results) | dict(zip(chosen, joined, strict=True))


def _zeros(found: torch.Tensor, kinds: Sequence[tuple[torch.Size, torch.dtype, torch.device]]) -> list[torch.Tensor]:
    """Return zeros that a second backward connects with ``found``."""
    zero = found.reshape(-1)[:0].to(torch.complex64).sum().real  # floats of 8 bits have no sum
    return [zero.expand(shape).to(device, dtype) for shape, dtype, device in kinds]


_Backward = Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]]


def _joined(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], backward: _Backward, is_shared: bool = True
) -> Sequence[torch.Tensor]:
    shapes = [value.shape for value in inputs]

    def shaped(gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        found = zip(backward(gradients), shapes, strict=True)
        return [None if gradient is None else gradient.reshape(shape) for gradient, shape in found]

    anchor = torch.empty(0, requires_grad=True, device="cpu")  # for ranks on which no input requires grad
    return cast(Sequence[torch.Tensor], _Join.apply(shaped, results, is_shared, anchor, *inputs))  # type: ignore[no-untyped-call]


class _Join(torch.autograd.Function):
    """The node that joins results, which have been computed already, with inputs."""

    @staticmethod
    def forward(
        ctx: Any, backward: _Backward, results: Sequence[torch.Tensor], is_shared: bool, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.of_inputs = backward
        # Other ranks may use a result that this one does not, so its gradient counts as zeros in an exchange.
        ctx.set_materialize_grads(is_shared)
        return tuple([result.data for result in results])  # no views: these could not be changed in place

    @staticmethod
    @eager  # a compiled ``loss.backward()`` and compiled autograd come here without the verb, which is eager itself
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dense = [one if one is None or one.layout is torch.strided else one.to_dense() for one in gradients]
        return None, None, None, None, *ctx.of_inputs(dense)
