"""Reductions: operations that combine the ranks' values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import SupportsIndex

import torch

from easydist.transport.backend import Backend, set_to
from easydist.transport.checked import Begin, Checks, Hints, How, RunOperation, demand, flat, split
from easydist.transport.reduce_op import ReduceOp, check_reducible
from easydist.transport.work import Begun, TorchWork, handle


class Reductions:
    """The reductions of ``Collectives``."""

    checks: Checks
    _backend: Backend
    _run: RunOperation

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``tensor == op(op(tensor of rank 0, tensor of rank 1), …)``; the same bits on every rank."""
        name = "all_reduce"
        staging, (target,), _ = self.checks.staged(name, [tensor])
        _check_op(name, op, tensor)
        about = (target, None, op)
        if op.is_scaled:
            data = flat(op.scaled(tensor))
            begin: Begin = functools.partial(self._backend.all_reduce_from, target, data, ReduceOp.SUM)
            return self._run(name, begin, async_op, hints, timeout, staging, about)
        return self._run(name, lambda: self._backend.all_reduce(target, op), async_op, hints, timeout, staging, about)

    def all_reduce_from(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output == op(op(input of rank 0, input of rank 1), …)``; ``input`` is not changed.

        This saves the copy that ``all_reduce`` would need.

        Args:
            output: As many elements as ``input``, of the same dtype; in other memory.
            input: As many elements on every rank.
            op: The reduction.
        """
        name = "all_reduce_from"
        staging, (target,), (data,) = self.checks.staged(name, [output], [input])
        _check_op(name, op, input)
        demand(output.numel() == input.numel(), f"{name}: output must have as many elements as input")
        if op.is_scaled:
            data = flat(op.scaled(input))
        plain, about = op.unscaled, (data, None, op)
        return self._run(
            name, lambda: self._backend.all_reduce_from(target, data, plain), async_op, hints, timeout, staging, about
        )

    def all_reduce_parts(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``outputs[i] == op(op(inputs[i] of rank 0, inputs[i] of rank 1), …)``: ``all_reduce_from`` of several.

        Args:
            outputs: One or more, of one dtype; each has as many elements as its input, in other memory.
            inputs: The tensors, of the same sizes on every rank.
            op: A reduction without a factor.
        """
        name = "all_reduce_parts"
        staging, targets, data = self.checks.staged(name, outputs, inputs)
        _check_op(name, op, inputs[0])
        demand(not op.is_scaled, f"{name}: op must have no factor")
        same = [*map(torch.Tensor.numel, outputs)] == [*map(torch.Tensor.numel, inputs)]
        demand(same, f"{name}: each output must have as many elements as its input")
        begin: Begin = functools.partial(self._backend.all_reduce_parts, targets, data, op)
        return self._run(name, begin, async_op, hints, timeout, staging, (None, None, op))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: SupportsIndex,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place on ``root``: ``tensor == op(op(tensor of rank 0, tensor of rank 1), …)``."""
        name, rank = "reduce", self.checks.rank("root", root)
        staging, (target,), _ = self.checks.staged(name, [tensor])
        _check_op(name, op, tensor)
        about = (target, rank, op)
        if not op.is_scaled:
            begin: Begin = functools.partial(self._backend.reduce, target, rank, op)
            return self._run(name, begin, async_op, hints, timeout, staging, about)
        # In other memory, because ``tensor`` may change only on the root.
        scaled = flat(op.scaled(tensor))

        def reduce_scaled() -> Begun:
            work = self._backend.reduce(scaled, rank, ReduceOp.SUM)
            return handle(work).followed_by(lambda: set_to(target, scaled)) if rank == self._backend.rank else work

        return self._run(name, reduce_scaled, async_op, hints, timeout, staging, about)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output == op(op(input_list[rank] of rank 0, input_list[rank] of rank 1), …)``.

        The inputs are not changed.

        Args:
            output: As many elements as ``input_list[rank]`` of every rank.
            input_list: One tensor per rank; their sizes may differ.
            op: The reduction.
        """
        return self._reduce_scatter("reduce_scatter", output, input_list, op, (async_op, hints, timeout))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``reduce_scatter`` of the W equal parts of ``input``, which is not changed.

        Args:
            output: As many elements on every rank.
            input: ``W * output.numel()`` elements of the same dtype.
            op: The reduction.
        """
        name = "reduce_scatter_single"
        self.checks.tensors(name, [output], [input])
        fits = input.numel() == output.numel() * self._backend.size
        demand(
            fits, f"Input tensor size must be output_size * comm_size for {name}: the numbers of elements do not fit"
        )
        _check_op(name, op, input)
        # Scaled as a whole: a factor may have the shape of ``input``, not that of its parts.
        parts = split(flat(op.scaled(input)), [output.numel()] * self._backend.size)
        return self._reduce_scatter(name, output, parts, op.unscaled, (async_op, hints, timeout), op)

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Do the same as ``reduce_scatter``, which also takes different sizes."""
        return self._reduce_scatter("reduce_scatter_v", output, input_list, op, (async_op, hints, timeout))

    def _reduce_scatter(
        self,
        name: str,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp,
        how: How,
        asked: ReduceOp | None = None,
    ) -> TorchWork:
        """Reduce; ``asked`` is the operation that the caller has asked for, if it differs from ``op``."""
        self.checks.one_per_rank(name, "input_list", input_list)
        staging, (target,), inputs = self.checks.staged(name, [output], input_list)
        _check_op(name, op, output)
        own = input_list[self._backend.rank].numel() == output.numel()
        demand(own, f"All input tensors must have same size as output tensor: own entry must fit the output for {name}")
        if op.is_scaled:
            # Not the flat inputs: a factor may have the shape of the tensor.
            inputs = [flat(op.scaled(tensor)) for tensor in input_list]
        plain = op.unscaled
        about = (target, None, asked or op)
        return self._run(name, lambda: self._backend.reduce_scatter(target, inputs, plain), *how, staging, about)


def _check_op(name: str, op: object, tensor: torch.Tensor) -> None:
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{name}(): op must be an easydist.comms.ReduceOp, such as ReduceOp.SUM, got {op!r}")
    check_reducible(tensor.dtype, op.unscaled)
