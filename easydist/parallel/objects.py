"""Objects and tensor dicts from one rank of a coordinator to all."""

from __future__ import annotations

from typing import Any

from easydist.agreement.calling import calling
from easydist.agreement.runner import run
from easydist.base.eager import eager
from easydist.parallel.members import Members
from easydist.queue import Handle, MessageQueue
from easydist.state import communicators
from easydist.typing import Group, Tree
from easydist.verbs.objects import BroadcastObjectList, gather_object
from easydist.verbs.ranks import source_rank
from easydist.verbs.tensor_dict_broadcast import BroadcastTensorDict

_CHUNK, _CHUNKS = 1 << 22, 6
_LARGE = 1 << 20


class _BroadcastObjectList(BroadcastObjectList):
    source_name = "src"


class Objects(Members):
    """The methods that send from one rank to all.

    Attributes:
        mq_broadcaster: The queue from rank 0; None without queues.
    """

    def _begin_objects(self, use_queue: bool) -> None:
        self._queues: dict[int, MessageQueue] = {}
        self._has_queues = bool(use_queue) and self.world_size > 1
        self.mq_broadcaster = self._queue_from(0) if self._has_queues else None

    def _queue_from(self, src: int) -> MessageQueue:
        """Return the queue from a rank. All ranks call it, and the first call creates the queue."""
        if src not in self._queues:
            self._queues[src] = self.create_mq_broadcaster(src)
        return self._queues[src]

    @eager
    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Send one rank's object to all ranks.

        Law: ``obj of rank src``; on ``src``, ``obj`` itself.

        Args:
            obj: On ``src``, any object that ``weights_only`` of the constructor permits.
            src: The source.

        Raises:
            RemoteError: The object cannot travel. With a queue the source alone raises the encoder's error, a
                ``TypeError`` or an ``UnsafeObjectError``, and has sent nothing.
            EOFError: With a queue, the source has destroyed its coordinator.
            BrokenPipeError: With a queue, a reader has.
            ValueError: ``src`` is not a rank of the group.

        Cost: one header exchange, which also carries a small object. With ``use_message_queue_broadcaster``, one
        message through the queue of ``src``, for which only the readers wait.
        """
        if not self._has_queues:
            verb = _BroadcastObjectList([obj], src, self.weights_only)
            verb.operation = "broadcast_object"
            return run(verb, self.communicators)[0]
        source = source_rank(self.communicators, "broadcast_object", "src", src)
        return self._queue_from(source).broadcast_object(obj)

    @eager
    def broadcast_object_list(self, obj_list: list[Any], src: int = 0, group: Group = None) -> list[Any]:
        """Replace the objects in all ranks' lists with those of one rank.

        Law: ``obj_list == obj_list of rank src``, element by element.

        Args:
            obj_list: A list of the same length on all ranks. The elements of the other ranks are replaced.
            src: The source, a rank inside the group.
            group: Another group; None means the coordinator's.

        Returns:
            The same list.
        """
        comms = self.communicators if group is None else communicators(group)
        return run(_BroadcastObjectList(obj_list, src, self.weights_only), comms)

    @eager
    def broadcast_tensor_dict(
        self, tensor_dict: Tree = None, src: int = 0, group: Group = None, metadata_group: Group = None
    ) -> Tree:
        """Send one rank's tree of tensors and other values to all ranks, which need not know its structure.

        Law: ``tensor_dict of rank src``; on ``src``, ``tensor_dict`` itself. ``send_tensor_dict`` lists what can
        travel.

        Args:
            tensor_dict: The tree, on ``src``. Other ranks ignore it.
            src: The source, a rank inside the group.
            group: The group that carries data too large for the headers; None means ``metadata_group``.
            metadata_group: The group that exchanges headers; None means ``group``. Without both, the coordinator's.

        Raises:
            RemoteError: Something in the tree cannot travel, or a rank cannot receive it.
            ValueError: ``src`` is not a rank of the group, or the two groups have different sizes.

        Cost: one header exchange, which also carries a small tree on the CPU (512 KiB / W in small groups). A larger
        one needs one more, and one broadcast for each tensor of 256 KiB or more and one for all others.
        """
        if group is None and metadata_group is None:
            return self._broadcast(tensor_dict, src, None)
        data = communicators(metadata_group if group is None else group)
        comms = data if metadata_group is None else communicators(metadata_group)
        if (data.size, data.rank) != (comms.size, comms.rank):
            raise ValueError(
                f"broadcast_tensor_dict: group has {data.size} ranks and this is rank {data.rank} of it, "
                f"metadata_group has {comms.size} and this is rank {comms.rank}; pass groups of the same ranks"
            )
        verb = BroadcastTensorDict(tensor_dict, src, None, True, self.weights_only, None if data is comms else data)
        return run(verb, comms)

    def _broadcast(self, tensor_dict: Tree, src: int, into: Tree) -> Tree:
        return run(BroadcastTensorDict(tensor_dict, src, into, True, self.weights_only), self.communicators)

    @eager
    def create_mq_broadcaster(
        self, writer_rank: int = 0, external_writer_handle: Handle | None = None, blocking: bool = True
    ) -> MessageQueue:
        """Create a queue from one rank to all others. All ranks of the group call it.

        Args:
            writer_rank: The writer, a rank inside the group.
            external_writer_handle: On ``writer_rank``, the handle of a writer outside the group; then all ranks read.
            blocking: Wait until all readers have attached.
        """
        return MessageQueue.create_from_process_group(
            self, _CHUNK, _CHUNKS, writer_rank, external_writer_handle, blocking, weights_only=self.weights_only
        )

    @eager
    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue, list[Handle]]:
        """Create a queue from every rank to one of them. All ranks of the group call it.

        Args:
            reader_rank_in_group: The reader.
            blocking: Wait until the reader has attached. The reader itself does not wait.

        Returns:
            The writer's end of this rank's queue. On the reader also the handles of all queues, in rank order, each for
            ``MessageQueue.create_from_handle(handle, 0)``; on other ranks an empty list.
        """
        return MessageQueue.create_from_process_group_single_reader(
            self, _CHUNK, _CHUNKS, reader_rank_in_group, blocking, weights_only=self.weights_only
        )

    def _make_room(self) -> None:
        comms = self.communicators
        gather_object(None, weights_only=True, group=self)  # all ranks are here
        with calling(comms, "prepare_communication_buffer_for_model"):
            comms.cpu(_LARGE)

    def _end_objects(self) -> None:
        while self._queues:
            self._queues.popitem()[1].close()
        self.mq_broadcaster = None
