"""The common part of all operations of a communicator: its properties, and the checks of arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

import torch

from easydist.base.torch_private import is_zerotensor
from easydist.data.backing import absence, is_backed, writable
from easydist.transport.backend import Backend
from easydist.transport.reduce_op import ReduceOp
from easydist.transport.staging import Staging, check_writable, flat
from easydist.transport.work import COMPLETED, ENDED, Begun, TorchWork, handle, wait

Hints = Mapping[str, str] | None
How = tuple[bool, Hints, timedelta | None]
"""The last three arguments of an operation: ``async_op``, ``hints``, ``timeout``."""

Begin = Callable[[], Begun]
"""A function that begins an operation."""

About = tuple[torch.Tensor | None, int | None, ReduceOp | None]
"""The tensor, the root and the reduction by which the ranks compare an operation, see ``described``."""

Moved = tuple[Staging, list[torch.Tensor], list[torch.Tensor]]
"""The tensors of an operation for its backend: their staging, the outputs and the inputs."""

BYTES = torch.uint8
_TIME_LIMIT = timedelta(minutes=10)
_Tensor, _STRIDED = torch.Tensor, torch.strided
_FLAT = (1,)
_FOREVER = timedelta(days=36500)
"""The longest time limit: gloo counts nanoseconds in 64 bits, so that ``timedelta.max`` would be over at once."""


class Checked:
    """A backend with a name, and the checks of its arguments.

    Args:
        backend: The backend that moves the bytes.
        name: The name for users.
    """

    def __init__(self, backend: Backend, name: str = "") -> None:
        self._backend = backend
        self._name = name
        self._raw = _as_it_is if backend.moves_any_dtype else _as_bytes
        self._is_on_cpu = backend.device.type == "cpu"
        self.communicators: object = None

    def __repr__(self) -> str:
        return (
            f"TorchComm({self._name!r}, backend={self.get_backend()!r}, rank={self.get_rank()}, "
            f"size={self.get_size()}, device={self.get_device()})"
        )

    @property
    def time_limit(self) -> timedelta:
        """The time limit of an operation that sets none."""
        return _TIME_LIMIT

    @property
    def backend(self) -> Backend:
        """The backend that moves the bytes."""
        return self._backend

    def get_backend(self) -> str:
        """Return the backend's name, such as ``"gloo"``, ``"nccl"``, ``"solo"``."""
        return self._backend.name

    def get_device(self) -> torch.device:
        """Return the device on which the tensors have to be."""
        return self._backend.device

    def get_name(self) -> str:
        """Return the name given when the communicator was made."""
        return self._name

    def get_rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._backend.rank

    def get_size(self) -> int:
        """Return the number of processes in the group."""
        return self._backend.size

    def finalize(self) -> None:
        """Release the resources that the communicator itself has created; a process group that it was put on stays."""
        self._backend.close()

    def _run(
        self,
        name: str,
        begin: Begin,
        async_op: bool,
        hints: Hints,
        timeout: timedelta | None,
        staging: Staging | None = None,
        about: About = (None, None, None),
    ) -> TorchWork:
        """Begin an operation with checked arguments, and wait for its end unless it is asynchronous.

        ``about`` is not used here: verbs compare their calls themselves.
        """
        limit = checked_timeout(timeout)
        if not async_op:
            return self._ended(begin(), limit or None, staging)
        work = handle(begin()).within(limit)
        return work if staging is None else staging.deliver(work)

    def _ended(self, begun: Begun, timeout: timedelta | None, staging: Staging | None) -> TorchWork:
        """Wait for the end of an operation, and return its handle."""
        if begun is not ENDED:
            wait(begun, timeout)
        if staging is None:
            return begun if isinstance(begun, TorchWork) else COMPLETED
        if staging.copies:
            staging.copy()
        work = begun if isinstance(begun, TorchWork) else TorchWork()
        return work.returning(staging.outputs)

    def _raws(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return flat tensors in the dtype that the backend moves."""
        return tensors if self._raw is _as_it_is else [*map(self._raw, tensors)]

    def _rank(self, what: str, rank: SupportsIndex) -> int:
        value, size = operator.index(rank), self._backend.size
        if not 0 <= value < size:
            raise RuntimeError(f"{what} must be in range [0, {size}), but got {value}")
        return value

    def _peer(self, name: str, what: str, rank: SupportsIndex) -> int:
        peer = self._rank(what, rank)
        demand(peer != self._backend.rank, f"Cannot {name} self")
        return peer

    def _moved(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> Moved:
        """Check the tensors of an operation, and return what the backend moves."""
        moved = self._staged(name, outputs, inputs)
        if self._raw is _as_it_is:
            return moved
        staging, targets, data = moved
        return staging, self._raws(targets), self._raws(data)

    def _staged(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> Moved:
        """Do as ``_moved``, with the tensors in their own dtype, in which they are reduced."""
        if self._are_plain((*outputs, *inputs)):
            return Staging(*outputs), [*map(writable, outputs)], [*inputs]  # copies: the caller may change its lists
        self._check(name, outputs, inputs)
        staging = Staging()
        return staging, staging.targets(outputs), list(map(flat, inputs))

    def _are_plain(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if ``_check`` accepts the tensors and their memory is flat: most are, and finding that out is quick.

        So this calls neither ``is_flat`` nor, for a tensor with elements, ``is_backed``.
        """
        device, is_cpu, dtype = self._backend.device, self._is_on_cpu, None
        try:
            for tensor in tensors:
                if type(tensor) is not _Tensor or tensor.stride() != _FLAT:
                    return False
                if not (tensor.is_cpu if is_cpu else tensor.device == device):
                    return False
                if tensor.requires_grad or tensor.is_neg():
                    return False
                if (own := tensor.dtype) is not dtype:
                    if dtype is not None or own.is_complex:
                        return False
                    dtype = own
                storage, end = tensor.untyped_storage(), tensor.nbytes + tensor.storage_offset() * own.itemsize
                if not ((storage.data_ptr() and storage.nbytes() >= end) or is_backed(tensor)):
                    return False
        except RuntimeError:  # no strides, no storage, or no memory
            return False
        return True

    def _check(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> None:
        """Check that all are tensors of one dtype on the communicator's device, and that outputs can be written."""
        device, dtype = self._backend.device, None
        for tensor in (*outputs, *inputs):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}() takes tensors, got {type(tensor).__name__}")
            if (own := tensor.device) != device and own.type != device.type:
                raise RuntimeError(f"{name}: tensor is on {own}, the communicator on {device}")
            if tensor.layout is not _STRIDED:
                raise RuntimeError(f"{name}: Tensor must be contiguous or strided, got {tensor.layout}")
            if dtype is None:
                dtype = tensor.dtype
            elif tensor.dtype is not dtype:
                raise RuntimeError(f"{name}: all tensors must have one dtype, got {dtype} and {tensor.dtype}")
            if not (type(tensor) is torch.Tensor and is_backed(tensor)):
                _check_backed(name, tensor)
        for tensor in outputs:
            check_writable(name, tensor)

    def _one_per_rank(self, name: str, what: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(tensors) != (size := self._backend.size):
            raise RuntimeError(f"{what} size must equal comm_size for {name}: got {len(tensors)}, not {size}")
        return tensors

    def _demand_own(self, name: str, output: int, input: int) -> None:
        if output != input:
            raise RuntimeError(f"{name}: own output must fit the own input, got {output} and {input} elements")

    def _rows(self, name: str, what: str, tensor: torch.Tensor, sizes: Sequence[SupportsIndex]) -> list[int]:
        """Return the number of elements in each part of dim 0."""
        counts, length = [operator.index(size) for size in sizes], tensor.shape[0] if tensor.ndim else tensor.numel()
        demand(len(counts) == self.get_size(), f"{what}_split_sizes length must equal comm_size for {name}")
        if any(count < 0 for count in counts):
            raise TypeError(f"{name}(): {what}_split_sizes must not be negative, got {counts}")
        demand(sum(counts) <= length, f"Sum of {what}_split_sizes exceeds {what} tensor size for {name}")
        return [count * (tensor.numel() // length if length else 0) for count in counts]


def _check_backed(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without memory; the zeros of a ZeroTensor get some later."""
    if (reason := absence(tensor)) and not is_zerotensor(tensor):
        raise TypeError(f"{name}() takes tensors with memory, but this one {reason}")


def checked_timeout(timeout: timedelta | None) -> timedelta | None:
    """Return the time limit, after checking its type.

    Raises:
        TypeError: It is neither None nor a ``timedelta``.
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, got {timeout!r}")
    return timeout if timeout is None else min(timeout, _FOREVER)


def demand(condition: bool, text: str) -> None:
    """Raise a ``RuntimeError`` with this text unless the condition holds."""
    if not condition:
        raise RuntimeError(text)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BYTES)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def split(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the first elements of a flat tensor, in parts of these sizes."""
    rest = tensor.numel() - sum(sizes)
    return list(tensor.split_with_sizes([*sizes, rest])[:-1])  # tensor.split takes twice as long
