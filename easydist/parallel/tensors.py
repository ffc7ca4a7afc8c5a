"""The tensor methods of a coordinator: sums, concatenations, broadcasts, and their capture in a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from easydist.agreement.runner import meet, run
from easydist.base.arguments import dimension
from easydist.base.eager import eager
from easydist.parallel import compiled
from easydist.parallel.collectives import AllGather, AllGatherV, AllReduce, BroadcastFrom, ReduceScatter
from easydist.parallel.members import Members
from easydist.verbs.gather import Gather
from easydist.verbs.ranks import check_rank


@dataclass
class GraphCaptureContext:
    """The stream on which a graph is recorded.

    Attributes:
        stream: For ``torch.cuda.graph(graph, stream=…)``; None on the CPU, where there are no graphs.
    """

    stream: torch.cuda.Stream | None


class Tensors(Members):
    """The collective methods for tensors.

    In a group of one rank, ``all_reduce``, ``all_gather``, ``reduce_scatter`` and ``gather`` return the input itself,
    as in vLLM: nothing is copied, and a gradient flows through.
    """

    def _is_alone(self, operation: str, input_: Any, dim: Any = -1) -> bool:
        """True if this rank's tensor is the result.

        Raises:
            RuntimeError: The coordinator was destroyed.
            TypeError: ``dim`` is not an integer.
            ValueError: The tensor has no such dimension.
        """
        if self.world_size > 1 or not isinstance(input_, torch.Tensor):
            return False
        if self.is_destroyed:
            raise self._destroyed()
        dim = dim if isinstance(dim, int) else dimension(dim)
        if not -(ndim := max(1, input_.ndim)) <= dim < ndim:
            raise ValueError(f"{operation}: the tensor of shape {tuple(input_.shape)} has no dim {dim}")
        return True

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks.

        Law: ``input_ of rank 0 + … + input_ of rank W-1``; with several ranks, in a new tensor, detached from autograd.
        ``input_`` is unchanged and may have any strides. The dtype is kept, so integers wrap as in torch;
        half-precision floats are accumulated in float32. May be called in a compiled function.

        Args:
            input_: A tensor of the same shape and dtype on all ranks.

        Raises:
            DisagreementError: Shapes or dtypes differ.

        Cost: one header exchange, which also carries a small tensor; and an all-reduce for a larger one.
        """
        if self._is_alone("all_reduce", input_):
            return input_
        if torch.compiler.is_compiling():
            return compiled.all_reduce(input_, self.unique_name)
        return self._all_reduce_out_place(input_)

    @eager
    def _all_reduce_out_place(self, input_: torch.Tensor) -> torch.Tensor:
        if _is_captured(input_):
            return self._captured_all_reduce(input_)
        return run(AllReduce(input_), self.communicators)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors.

        Law: ``torch.cat([input_ of rank 0, …], dim)``. The sizes along ``dim`` may differ. May be called in a compiled
        function, in which they must be equal.

        Args:
            input_: A tensor of one dtype on all ranks, and of one shape apart from ``dim``.
            dim: The dimension to concatenate along.

        Raises:
            DisagreementError: Dtypes or shapes apart from ``dim`` differ, or in a compiled function any sizes.
            ValueError: There is no such dimension.

        Cost: that of ``easydist.gather``.
        """
        if self._is_alone("all_gather", input_, dim):
            return input_
        if torch.compiler.is_compiling():
            return compiled.all_gather(input_, dim, self.world_size, self.unique_name)
        return self._all_gather_out_place(input_, dim)

    @eager
    def _all_gather_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        gathered: torch.Tensor = run(AllGather(input_, None, dim), self.communicators)
        return gathered

    @eager
    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Any:
        """Concatenate tensors whose sizes differ.

        Law: ``torch.cat([input_ of rank 0, …], dim)``; for a list, tensor by tensor. A rank may have size 0.

        Args:
            input_: A tensor, or a list of tensors, which travel together.
            dim: The dimension to concatenate along.
            sizes: Each rank's size along ``dim``, to be checked. None: the ranks exchange their sizes.

        Raises:
            RemoteError: A rank's size differs from ``sizes``.

        Cost: that of ``easydist.gather``.
        """
        return run(AllGatherV(input_, dim, sizes), self.communicators)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum a tensor over the ranks, and return this rank's part.

        Law: ``torch.chunk(input_ of rank 0 + … , W, dim)[rank_in_group]``. May be called in a compiled function.

        Args:
            input_: A tensor of the same shape and dtype on all ranks.
            dim: The dimension along which the sum is cut. Its size must be a multiple of W.

        Raises:
            ValueError: The size is not a multiple of W, or there is no such dimension.

        Cost: one header exchange, which also carries a small tensor; and a reduce-scatter for a larger one.
        """
        if self._is_alone("reduce_scatter", input_, dim):
            return input_
        if torch.compiler.is_compiling():
            return compiled.reduce_scatter(input_, dim, self.world_size, self.unique_name)
        return self._reduce_scatter_out_place(input_, dim)

    @eager
    def _reduce_scatter_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        return run(ReduceScatter(input_, dim, None, may_differ=False), self.communicators)

    @eager
    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum a tensor over the ranks, and return this rank's part, which may have any size.

        Law: ``(input_ of rank 0 + …).split(sizes, dim)[rank_in_group]``; without sizes
        ``torch.tensor_split(…, W, dim)[rank_in_group]``.

        Args:
            input_: A tensor of the same shape and dtype on all ranks.
            dim: The dimension along which the sum is cut.
            sizes: The size of each rank's part, the same list on all ranks. A size may be 0.

        Raises:
            ValueError: They do not add up to the size along ``dim``.

        Cost: as ``reduce_scatter``.
        """
        return run(self._uneven(input_, dim, sizes), self.communicators)

    @eager
    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Do as ``reduce_scatterv``, into a tensor.

        Args:
            input_: As there.
            output: A tensor of the dtype and the shape of the result, with any strides.
            dim: As there.
            sizes: As there.

        Returns:
            ``output``.

        Raises:
            ValueError: ``output`` has another dtype or shape, or cannot be written. If that is so on some ranks only, a
                RemoteError on all.
        """
        run(self._uneven(input_, dim, sizes, [output]), self.communicators)
        return output

    def _uneven(self, input_: torch.Tensor, dim: int, sizes: Any, into: Sequence[torch.Tensor] = ()) -> ReduceScatter:
        verb = ReduceScatter(input_, dim, sizes, True, into)
        verb.operation = "reduce_scatterv"
        return verb

    @eager
    def cpu_all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place.

        Args:
            tensor: As in ``all_reduce``.

        Returns:
            ``tensor``.
        """
        if not self._is_alone("cpu_all_reduce_", tensor):
            verb = AllReduce(tensor, [tensor])
            verb.operation = "cpu_all_reduce_"
            run(verb, self.communicators)
        return tensor

    @eager
    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate the ranks' tensors on one rank.

        Law, on ``dst``: ``torch.cat([input_ of rank 0, …], dim)``; elsewhere None.

        Args:
            input_: As in ``all_gather``.
            dst: The only rank that gets the result.
            dim: The dimension to concatenate along.
        """
        if self._is_alone("gather", input_, dim):
            check_rank(self.communicators, "gather", "dst", dst)
            return input_
        gathered: torch.Tensor | None = run(Gather(input_, dst, dim), self.communicators)
        return gathered

    @eager
    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Give all ranks the values of one rank's tensor.

        Law, in place: ``input_ == input_ of rank src``.

        Args:
            input_: A tensor of the same shape and dtype on all ranks, with any strides.
            src: The source.

        Returns:
            ``input_``.
        """
        received: torch.Tensor = run(BroadcastFrom(input_, src), self.communicators)
        return received

    @eager
    def barrier(self) -> None:
        """Block until every rank of the group has called it.

        Cost: one header exchange on the CPU. It does not use the accelerator.
        """
        meet(self.communicators, "barrier")

    @contextmanager
    def graph_capture(self, graph_capture_context: GraphCaptureContext | None = None) -> Iterator[GraphCaptureContext]:
        """Provide a stream on which ``torch.cuda.graph`` can record ``all_reduce`` of this group.

        On an accelerator: ``with group.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream): …``.
        Call ``all_reduce`` once before, so that the connections are created outside of the graph, and ``graph.reset()``
        before ``destroy``, which waits for the graphs. The stream first waits for the current one.

        Args:
            graph_capture_context: A context with a stream; None creates one.

        Returns:
            A context manager that yields the context. On the CPU its stream is None, as there are no graphs.
        """
        context = graph_capture_context or GraphCaptureContext(None)
        if self.device.type != "cuda":
            yield context
            return
        stream = context.stream or torch.cuda.Stream(self.device)
        before = torch.cuda.current_stream(self.device)
        if stream != before:
            stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield GraphCaptureContext(stream) if context.stream is None else context
        if stream != before:
            before.wait_stream(stream)

    def _captured_all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Reduce without a header exchange, because a graph is replayed without the CPU."""
        if self.device_group is not None and self.device_group is self.cpu_group:
            raise RuntimeError('all_reduce: gloo cannot be captured in a graph; make the coordinator with "nccl"')
        total = input_.detach().clone(memory_format=torch.contiguous_format)
        if self.device_group is None:
            return total
        dist.all_reduce(total, group=self.device_group)
        return total


def _is_captured(value: object) -> bool:
    """True if operations on this tensor are being recorded."""
    return isinstance(value, torch.Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing()
