"""The backend over the collectives of a ``torch.distributed`` process group (nccl, xccl, mpi, …)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from easydist.transport.backend import Addressed, Backend, combined
from easydist.transport.backends.c10d import SEND_TAG, Gloo, Pairwise
from easydist.transport.reduce_op import RedOpType, ReduceOp
from easydist.transport.work import ENDED, Pending, TorchWork
from easydist.typing import Device

_NATIVE_OPS = {
    RedOpType.SUM: dist.ReduceOp.SUM,
    RedOpType.PRODUCT: dist.ReduceOp.PRODUCT,
    RedOpType.MIN: dist.ReduceOp.MIN,
    RedOpType.MAX: dist.ReduceOp.MAX,
}
_NATIVE_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)


def over(group: dist.ProcessGroup, device: Device = "cpu") -> Backend | None:
    """Return the backend for tensors on ``device`` in ``group``, or None if the group cannot move them.

    Args:
        group: A process group that this process belongs to.
        device: A device or its type.
    """
    device = torch.device(device)
    try:
        name = group._get_backend(device).name()
    except RuntimeError:  # "No backend type associated with device type …"
        return None
    if name == "gloo":
        return Gloo(group, device, name) if device.type == "cpu" else None
    if name == "easydist_shm":  # it has no tags: our messages would mix with the caller's
        return None
    return Native(group, device, name)


_ONE_GPU = (
    "NCCL needs a GPU for each rank, and tensors of two ranks are on the same one. Move them to ProcessState().device, "
    'and start at most as many ranks as there are GPUs; or use ProcessState(backend="gloo"), and tensors on GPUs '
    "travel through the CPU."
)


class Native(Pairwise):
    """The backend for tensors on the device of a group with good collectives of its own.

    Args:
        group: The process group.
        device: The device of the tensors.
        name: The name of the backend.
    """

    _share_a_gpu = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        if device.type != "cpu" and ":" not in str(device):  # other threads have another current device
            device = torch.device(device.type, torch.accelerator.current_device_index())
        super().__init__(group, device, name)

    def _started(self, begin: Callable[..., dist.Work], *args: object) -> dist.Work:
        """Begin an operation of the group; its first one connects the ranks."""
        if self._share_a_gpu:  # NCCL would find another reason now
            raise RuntimeError(_ONE_GPU)
        try:
            return begin(*args)
        except RuntimeError as error:
            if "Duplicate GPU" not in str(error):
                raise
            self._share_a_gpu = True
            raise RuntimeError(_ONE_GPU) from error

    # Not as a batch, for which nccl makes all ranks of the group connect, not just the two that take part.
    def send(self, tensor: torch.Tensor, dst: int) -> Pending:
        return self._started(self._group.send, [tensor], dst, SEND_TAG) if tensor.numel() else ENDED

    def recv(self, tensor: torch.Tensor, src: int) -> Pending:
        return self._started(self._group.recv, [tensor], src, SEND_TAG) if tensor.numel() else ENDED

    def _exchange(self, sends: Sequence[Addressed], recvs: Sequence[Addressed]) -> Sequence[Pending]:
        """Do the same as ``dist.batch_isend_irecv``, which does not support groups that torch does not know by name."""
        posts = [(self._group.recv, *recv) for recv in recvs] + [(self._group.send, *send) for send in sends]
        if not posts:
            return []
        if not self._group._get_backend(self.device).supports_coalescing:
            return [self._started(post, [tensor], peer, 0) for post, tensor, peer in posts]
        return [self._started(self._coalesced, posts)]

    def _coalesced(self, posts: Sequence[tuple[Callable[..., dist.Work], torch.Tensor, int]]) -> dist.Work:
        device = posts[0][1].device
        self._group._start_coalescing(device)
        try:
            for post, tensor, peer in posts:
                post([tensor], peer, 0)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # it would hide the reason
                self._group._end_coalescing(device)
            raise
        return self._group._end_coalescing(device)

    def batch(self, sends: Sequence[Addressed], recvs: Sequence[Addressed]) -> TorchWork:
        keep = [tensor for tensor, _ in (*sends, *recvs)]
        full = [[one for one in way if one[0].numel()] for way in (sends, recvs)]
        return TorchWork(self._exchange(*full), keep=keep)

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> TorchWork:
        """Let the library choose the way of equal parts, which may be a ring; others go from each rank to each."""
        if not data.numel() or {*map(torch.Tensor.numel, outputs)} != {data.numel()}:
            return super().all_gather_v(outputs, data)
        if _are_adjacent(outputs):
            return self.all_gather_single(outputs[0].as_strided([len(outputs) * data.numel()], [1]), data)
        rows = data.new_empty(len(outputs), data.numel())

        def deliver() -> Sequence[Pending]:
            for output, row in zip(outputs, rows.unbind(), strict=True):
                output.copy_(row)
            return ()

        return self.all_gather_single(rows.view(-1), data).followed_by(deliver)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor) -> TorchWork:
        return TorchWork([self._started(self._group._allgather_base, output, data)], keep=[output, data])

    def broadcast(self, tensor: torch.Tensor, root: int) -> TorchWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return TorchWork([self._started(self._group.broadcast, [tensor], options)], keep=[tensor])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> TorchWork:
        native = _NATIVE_OPS.get(op.type)
        if op.type is RedOpType.AVG and self.name == "nccl" and tensor.is_floating_point():
            native = dist.ReduceOp.AVG  # NCCL divides before it adds up
        if tensor.dtype not in _NATIVE_DTYPES or native is None:
            return self._gather_and_reduce(tensor, op)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(native)
        return TorchWork([self._started(self._group.allreduce, [tensor], options)], keep=[tensor])

    def _gather_and_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> TorchWork:
        """Reduce any dtype, also one that the group's library cannot add; this moves W times the bytes."""
        parts = tensor.new_empty(self.size, tensor.numel())
        gathered = self.all_gather_single(_bits(parts.view(-1)), _bits(tensor))
        return gathered.followed_by(lambda: combined(tensor, op, parts.unbind()))

    def barrier(self) -> TorchWork:
        begun = self.all_reduce(torch.zeros(1, dtype=torch.int32, device=self.device), ReduceOp.SUM)
        return begun if self.device.type == "cpu" else begun.followed_by(self._synchronized)

    def _synchronized(self) -> Sequence[Pending]:
        """Block the CPU, as a barrier does: the wait for the sum blocks only the stream."""
        torch.accelerator.current_stream(self.device).synchronize()
        return ()


def _are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    """True if flat tensors of equal length follow each other in one piece of memory."""
    first, nbytes = parts[0], parts[0].nbytes
    # Two storages may happen to be adjacent, but ``as_strided`` cannot go from one to the other.
    memory = first.untyped_storage().data_ptr()
    starts = [part.data_ptr() for part in parts]
    return starts == [*range(starts[0], starts[0] + nbytes * len(parts), nbytes)] and all(
        part.untyped_storage().data_ptr() == memory for part in parts
    )


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)
