"""A gloo group of ``torch.distributed`` that multiplies before it adds up, as FSDP2 asks for with a divide factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from easydist.torch_backend.reductions import premultiplied

_Base: Any = dist.ProcessGroup
"""Untyped, because its stubs have overloads that torch does not call."""


class GlooGroup(_Base):  # type: ignore[misc]
    """A process group over a gloo backend. ``PREMUL_SUM``, which gloo refuses, is a product and a sum.

    Args:
        store: The group's store.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        gloo: The backend.
    """

    def __init__(self, store: Store, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        # The methods below cannot call their base, which would call them again: it is virtual in C++.
        self._plain: Any = dist.ProcessGroup(store, rank, size)
        for group in (self, self._plain):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce in place."""
        return self._reduced("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce several tensors in place."""
        return self._reduced("allreduce_coalesced", tensors, opts)

    def _reduced(self, name: str, tensors: Any, opts: Any) -> Any:
        run = getattr(self._plain, name)
        if (op := premultiplied(opts)) is None:
            return run(tensors) if opts is None else run(tensors, opts)
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            tensor.detach().copy_(op.scaled(tensor))
        return run(tensors, _summing(opts))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce in place on the root. The tensors of the other ranks do not change if they are multiplied."""
        if (op := premultiplied(opts)) is None:
            return self._plain.reduce(tensors, opts)
        if opts.rootRank != self.rank():
            return self._plain.reduce([op.scaled(tensor) for tensor in tensors], _summing(opts))
        for tensor in tensors:
            tensor.detach().copy_(op.scaled(tensor))
        return self._plain.reduce(tensors, _summing(opts))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce the parts of lists."""
        if (op := premultiplied(opts)) is None:
            return self._plain.reduce_scatter(outputs, inputs, opts)
        scaled = [[op.scaled(tensor) for tensor in tensors] for tensors in inputs]
        return self._plain.reduce_scatter(outputs, scaled, _summing(opts))

    def _scattered(self, run: Callable[..., Any], output: Any, inputs: Any, opts: Any) -> Any:
        """Reduce the parts of one tensor, or of several."""
        if (op := premultiplied(opts)) is None:
            return run(output, inputs) if opts is None else run(output, inputs, opts)
        is_one = isinstance(inputs, torch.Tensor)
        scaled = op.scaled(inputs) if is_one else [op.scaled(tensor) for tensor in inputs]
        return run(output, scaled, _summing(opts))


def _add_scattering(name: str) -> None:
    """Add one of the names that torch's versions have for ``reduce_scatter`` of tensors."""

    def scatter(self: GlooGroup, output: Any, inputs: Any, opts: Any = None) -> Any:
        return self._scattered(getattr(self._plain, name), output, inputs, opts)

    if hasattr(dist.ProcessGroup, name):
        setattr(GlooGroup, name, scatter)


for _name in (
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
):
    _add_scattering(_name)


def _summing(opts: Any) -> Any:
    """Return the same options with a sum."""
    plain = type(opts)()
    for name in ("rootRank", "rootTensor", "timeout", "asyncOp"):
        if hasattr(opts, name):
            setattr(plain, name, getattr(opts, name))
    plain.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return plain
