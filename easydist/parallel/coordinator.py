"""The coordinator: one object for all exchanges of a group of ranks."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from easydist.agreement.calling import seconds
from easydist.base.eager import eager
from easydist.groups.connecting import gloo_group
from easydist.groups.known import unregistered
from easydist.groups.rendezvous import Rendezvous
from easydist.parallel.experts import Experts
from easydist.parallel.objects import Objects
from easydist.parallel.point_to_point import PointToPoint
from easydist.parallel.tensors import Tensors
from easydist.state import ProcessState
from easydist.typing import Timeout, Tree


class GroupCoordinator(Tensors, Experts, Objects, PointToPoint):
    """A group of ranks with all their exchanges, for engines with tensor, pipeline and data parallelism.

    Law: every method returns the value of the single-process expression in its docstring, with one rank too.

    Every ``src`` and ``dst`` is a rank inside the group. All ranks of the group make the same collective calls in the
    same order; if they do not, all of them raise the same error. ``group=`` of every verb of easydist accepts a
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
        group_ranks: The groups, as lists of ranks of the world. Every rank belongs to exactly one. All ranks of the
            world create the coordinator together, and each gets that of its own group.
        local_rank: The rank of this process on its host, which is the index of its accelerator.
        torch_distributed_backend: The backend for tensors on the accelerator: ``"nccl"``, …; with ``"gloo"`` or None,
            one gloo group carries everything.
        use_device_communicator: Use that backend for tensors on the accelerator; otherwise they go through the CPU.
        use_message_queue_broadcaster: ``broadcast_object`` uses a ``MessageQueue`` for each source.
        group_name: The first part of ``unique_name``.
        use_all2all: Accepted for compatibility: ``dispatch`` and ``combine`` need no preparation.
        weights_only: Decode objects with the restricted decoder (``docs/safety.md``), which accepts plain data,
            tensors, arrays and allowed classes. False unpickles anything, so the peers must be trusted. The same on
            all ranks.

    Raises:
        RemoteError: A rank of the world is in no list or in two, or a list has a rank that the world does not have. If
            all ranks have passed the same lists, a ValueError.
        DisagreementError: The ranks have passed different lists, backends or options.

    Cost: one header exchange of the world, a process group for each list (two if the backend is not gloo), and three
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
        use_all2all: bool = False,
        *,
        weights_only: bool = True,
    ) -> None:
        options = _options(use_message_queue_broadcaster, weights_only)
        backend = torch_distributed_backend
        super().__init__(group_ranks, local_rank, backend, use_device_communicator, group_name, options)
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
        """Create a group of processes that meet in a store, beside the default process group or without one.

        Use it for members that join later: an engine and its workers, or a world that has grown.

        Example:
            >>> import torch
            >>> from torch.distributed import HashStore
            >>> from easydist.parallel import GroupCoordinator
            >>> group = GroupCoordinator.stateless(HashStore(), 0, 1, "weights")
            >>> group.all_gather(torch.ones(2)), group.ranks
            (tensor([1., 1.]), [0])
            >>> group.destroy()

        Args:
            store: The same store for all members.
            rank: The rank of this process among the members.
            world_size: The number of members.
            group_name: A name that is the same on all members and used once in this store.
            local_rank: As in the constructor.
            use_message_queue_broadcaster: As in the constructor.
            timeout: The time limit for the meeting and for each call.
            weights_only: As in the constructor.

        Returns:
            The coordinator. Its ``ranks`` are numbered among the members. Tensors travel by gloo.

        Raises:
            CollectiveTimeout: Some members did not come; the text and ``missing`` name them.
            PeerLostError: A member has ended, or the store has.
            ValueError: ``rank`` is not a rank of that many members. Only this process raises.
            DisagreementError: The members have passed different options.
        """
        self = cls.__new__(cls)
        limit = timedelta(seconds=seconds(timeout, "GroupCoordinator.stateless"))
        if not 0 <= rank < world_size:
            raise ValueError(
                f"GroupCoordinator.stateless: rank={rank} is not below world_size={world_size}; count from 0"
            )
        own, what = PrefixStore(f"easydist/{group_name}", store), f"GroupCoordinator.stateless {group_name!r}"
        with Rendezvous(own, rank, world_size, limit, name=what) as rendezvous:
            rendezvous.introduce(False)
            at, monitor, check = rendezvous.store, rendezvous.monitor, rendezvous.check
            group = gloo_group(at, rank, world_size, f"easydist/{group_name}", limit, monitor, check)
        unregistered.add(group)
        self.use_device_communicator, self.weights_only = False, weights_only
        self.torch_distributed_backend = "gloo"
        self._join([[*range(world_size)]], rank, local_rank, group_name, (group, group))
        self._agree(_options(use_message_queue_broadcaster, weights_only))
        self._begin_objects(use_message_queue_broadcaster)
        return self

    @classmethod
    def alone(cls, local_rank: int, group_name: str, *, weights_only: bool = True) -> GroupCoordinator:
        """Create the coordinator of a group that has this rank only, without a process group; no other rank takes part.

        Args:
            local_rank: As in the constructor.
            group_name: As in the constructor.
            weights_only: As in the constructor.
        """
        self = cls.__new__(cls)
        state = ProcessState()
        self.use_device_communicator, self.weights_only = False, weights_only
        self.torch_distributed_backend = "gloo"
        lists = [[rank] for rank in range(state.num_processes)]
        self._join(lists, state.process_index, local_rank, group_name, (None, None))
        self._begin_objects(False)
        return self

    @eager
    def prepare_communication_buffer_for_model(self, model: Tree) -> None:
        """Allocate the buffers of large exchanges before the first one. All ranks of the group call it.

        Args:
            model: Ignored, since the buffers do not depend on the model.
        """
        self._make_room()

    def destroy(self) -> None:
        """Destroy queues and process groups. Other methods raise afterwards; a second call does nothing.

        Ranks may call it at different times: what this rank has sent still arrives, and a call of another rank that
        needs more of it raises ``PeerLostError``.
        """
        self._end_objects()
        self._leave()


def _options(use_message_queue_broadcaster: bool, weights_only: bool) -> dict[str, bool]:
    """Return the options on which all members have to agree."""
    return {"use_message_queue_broadcaster": bool(use_message_queue_broadcaster), "weights_only": bool(weights_only)}
