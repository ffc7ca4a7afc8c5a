"""The coordinator: one object for all that the ranks of a group exchange."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.agreement.calling import seconds
from easydist.agreement.runner import meet, run
from easydist.eager import eager
from easydist.groups.communicators import unregistered
from easydist.groups.standalone import gloo_group
from easydist.parallel import compiled
from easydist.parallel.capture import GraphCaptureContext, capturing, is_captured
from easydist.parallel.collectives import AllGatherV, AllReduce, ReduceScatter
from easydist.parallel.experts import Experts
from easydist.parallel.objects import Objects
from easydist.parallel.pairs import Pairs
from easydist.parallel.transfers import end_lines
from easydist.typing import Timeout, Tree
from easydist.verbs.broadcast import broadcast
from easydist.verbs.gather import gather


class GroupCoordinator(Experts, Objects, Pairs):
    """A group of ranks, and every exchange between them; what engines call for tensor, pipeline and data parallelism.

    Law: every method gives what the single-process expression in its docstring gives; with one rank too.

    Every ``src`` and ``dst`` is a rank inside the group. All ranks of the group make the same collective calls in the
    same order; where they do not, all of them raise the same error. ``group=`` of every verb of easydist takes a
    coordinator.

    Example:
        >>> import torch
        >>> from easydist.parallel import GroupCoordinator
        >>> tp = GroupCoordinator([[0]], 0, "gloo", use_device_communicator=False, group_name="tp")
        >>> tp.rank_in_group, tp.world_size, tp.is_last_rank
        (0, 1, True)
        >>> tp.all_reduce(torch.ones(2))
        tensor([1., 1.])
        >>> tp.broadcast_tensor_dict({"x": torch.ones(2), "step": 3})
        {'x': tensor([1., 1.]), 'step': 3}
        >>> tp.destroy()

    Args:
        group_ranks: The groups, as lists of ranks of the world; every rank belongs to one. All ranks of the world make
            the coordinator together, and each gets that of its own group.
        local_rank: This process on its host; its accelerator's index.
        torch_distributed_backend: For tensors on the accelerator: ``"nccl"``, …; ``"gloo"`` or None has one gloo group
            carry everything.
        use_device_communicator: Let that backend carry tensors on the accelerator; else they go through the CPU.
        use_message_queue_broadcaster: ``broadcast_object`` uses a ``MessageQueue`` for each source.
        group_name: For ``unique_name``.
        weights_only: Decode objects with the restricted decoder (``docs/safety.md``): plain data, tensors, arrays, and
            what was allowed. False unpickles anything, and trusts the peers with that. The same on all ranks.

    Raises:
        RemoteError: A rank of the world is in no list or in two, or a list has a rank that the world does not have.
            Where all ranks have passed the same lists, a ValueError.
        DisagreementError: The ranks have passed different lists or backends.

    Cost: one header exchange of the world, a process group for each list (two where the backend is not gloo), four
    small exchanges of the group.

    Source: vLLM's ``GroupCoordinator``.
    """

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str | dist.Backend | None,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        *,
        weights_only: bool = True,
    ) -> None:
        super().__init__(group_ranks, local_rank, torch_distributed_backend, use_device_communicator, group_name)
        self.weights_only = weights_only
        self._begin_objects(use_message_queue_broadcaster)

    @classmethod
    def stateless(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        group_name: str,
        *,
        local_rank: int = 0,
        use_message_queue_broadcaster: bool = False,
        timeout: Timeout = timedelta(minutes=30),
        weights_only: bool = True,
    ) -> GroupCoordinator:
        """Make a group of processes that meet in a store, beside the default process group or without one.

        For members that come together later: an engine and its workers, a world that has grown.

        Example:
            >>> from torch.distributed import HashStore
            >>> from easydist.parallel import GroupCoordinator
            >>> group = GroupCoordinator.stateless(HashStore(), 0, 1, "weights")
            >>> group.all_gather(torch.ones(2)), group.ranks
            (tensor([1., 1.]), [0])
            >>> group.destroy()

        Args:
            store: The same for all members.
            rank: This process among them.
            world_size: How many they are.
            group_name: The same on all of them, and used once in this store.
            local_rank: As in the constructor.
            use_message_queue_broadcaster: Likewise.
            timeout: How long meeting and each call may take.
            weights_only: As in the constructor.

        Returns:
            The coordinator; its ``ranks`` are counted among the members. Tensors travel by gloo.

        Raises:
            RuntimeError: The members did not all come.
        """
        self = cls.__new__(cls)
        limit = timedelta(seconds=seconds(timeout, "GroupCoordinator.stateless"))
        own = f"easydist/{group_name}"
        group = gloo_group(PrefixStore(own, store), rank, world_size, own, limit)
        unregistered.add(group)
        self.use_device_communicator, self.weights_only = False, weights_only
        self._join([*range(world_size)], rank, local_rank, group_name, (group, group))
        self._begin_objects(use_message_queue_broadcaster)
        return self

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks.

        Law: ``input_ of rank 0 + … + input_ of rank W-1``, in a new tensor; ``input_`` stays as it is, whatever its
        strides. The dtype stays, so integers wrap as in torch; halves are accumulated in float32. May be called in a
        compiled function.

        Args:
            input_: Of one shape and dtype on all ranks.

        Raises:
            DisagreementError: Shapes or dtypes differ.

        Cost: one header exchange, which carries a small tensor; else an all-reduce.
        """
        if torch.compiler.is_compiling():
            return compiled.all_reduce(input_, self.unique_name)
        return self._all_reduce_out_place(input_)

    @eager
    def _all_reduce_out_place(self, input_: torch.Tensor) -> torch.Tensor:
        if is_captured(input_):
            return self._captured_all_reduce(input_)
        return run(AllReduce(input_), self.communicators)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors.

        Law: ``torch.cat([input_ of rank 0, …], dim)``; the sizes along ``dim`` may differ. May be called in a compiled
        function, which takes them to be equal.

        Args:
            input_: Of one dtype, and of one shape apart from ``dim``, on all ranks.
            dim: Along which dimension.

        Raises:
            DisagreementError: Dtypes or shapes apart from ``dim`` differ.
            ValueError: There is no such dimension.

        Cost: that of ``easydist.gather``.
        """
        if torch.compiler.is_compiling():
            return compiled.all_gather(input_, dim, self.world_size, self.unique_name)
        return self._all_gather_out_place(input_, dim)

    @eager
    def _all_gather_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        return gather(input_, dim=dim, group=self)

    @eager
    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Any:
        """Concatenate tensors whose sizes differ.

        Law: ``torch.cat([input_ of rank 0, …], dim)``; of a list, tensor by tensor. A rank may have size 0.

        Args:
            input_: A tensor, or a list of tensors, which then travel together.
            dim: Along which dimension.
            sizes: Each rank's size along ``dim``; checked. None: they are found out.

        Raises:
            RemoteError: A rank's size is not what ``sizes`` says.

        Cost: that of ``easydist.gather``.
        """
        return run(AllGatherV(input_, dim, sizes), self.communicators)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum a tensor over the ranks, and keep this rank's part.

        Law: ``torch.chunk(input_ of rank 0 + … , W, dim)[rank_in_group]``. May be called in a compiled function.

        Args:
            input_: Of one shape and dtype on all ranks.
            dim: Along which dimension the sum is cut; its size is a multiple of W.

        Raises:
            ValueError: It is not, or there is no such dimension.

        Cost: one header exchange, which carries a small tensor; else a reduce-scatter.
        """
        if torch.compiler.is_compiling():
            return compiled.reduce_scatter(input_, dim, self.world_size, self.unique_name)
        return self._reduce_scatter_out_place(input_, dim)

    @eager
    def _reduce_scatter_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        return run(ReduceScatter(input_, dim, None, may_differ=False), self.communicators)

    @eager
    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum a tensor over the ranks, and keep this rank's part, of any size.

        Law: ``(input_ of rank 0 + …).split(sizes, dim)[rank_in_group]``; without sizes
        ``torch.tensor_split(…, W, dim)[rank_in_group]``.

        Args:
            input_: Of one shape and dtype on all ranks.
            dim: Along which dimension the sum is cut.
            sizes: How much each rank gets, the same on all ranks; may be 0.

        Raises:
            ValueError: They do not add up to the size along ``dim``.

        Cost: as ``reduce_scatter``.
        """
        return run(ReduceScatter(input_, dim, sizes, may_differ=True), self.communicators)

    @eager
    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate the ranks' tensors on one rank.

        Law, on ``dst``: ``torch.cat([input_ of rank 0, …], dim)``; elsewhere None.

        Args:
            input_: As in ``all_gather``.
            dst: The only rank that gets the result.
            dim: Along which dimension.
        """
        gathered: torch.Tensor | None = gather(input_, dst=dst, dim=dim, group=self)
        return gathered

    @eager
    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Give all ranks the values of one rank's tensor.

        Law, in place: ``input_ == input_ of rank src``.

        Args:
            input_: Of one shape and dtype on all ranks; of any strides.
            src: The source.

        Returns:
            ``input_``.
        """
        return broadcast(input_, src, group=self)

    @eager
    def barrier(self) -> None:
        """Block until every rank of the group has come here.

        Cost: one header exchange on the CPU; no accelerator takes part.
        """
        meet(self.communicators, "barrier")

    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Give a stream on which ``torch.cuda.graph`` may record ``all_reduce`` of this group.

        Args:
            graph_capture_context: One with a stream; None makes one.

        Returns:
            A context manager. On the CPU the stream of what it gives is None, as there are no graphs.
        """
        return capturing(self.device, graph_capture_context)

    def _captured_all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Without the header exchange: a graph is replayed without the CPU."""
        total = input_.detach().clone(memory_format=torch.contiguous_format)
        if self.device_group is None:
            return total
        dist.all_reduce(total, group=self.device_group)
        return total

    @eager
    def prepare_communication_buffer_for_model(self, model: Tree) -> None:
        """Make what large exchanges need, before the first one does; all ranks of the group call it.

        Args:
            model: Not looked at: what is made does not depend on the model.
        """
        self._make_room()

    def destroy(self) -> None:
        """Take down queues and process groups. A second call does nothing; other methods raise then."""
        if not self.is_destroyed:
            end_lines(self.communicators)
        self._end_objects()
        self._leave()
