"""The coordinator: one object for all that the ranks of a group exchange."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.agreement.calling import seconds
from easydist.eager import eager
from easydist.groups.communicators import unregistered
from easydist.groups.standalone import gloo_group
from easydist.parallel.experts import Experts
from easydist.parallel.objects import Objects
from easydist.parallel.tensors import Tensors
from easydist.parallel.tree_pairs import TreePairs
from easydist.transport.background import end_lines
from easydist.typing import Timeout, Tree


class GroupCoordinator(Tensors, Experts, Objects, TreePairs):
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
            >>> import torch
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
            end_lines(id(self.communicators))
        self._end_objects()
        self._leave()
