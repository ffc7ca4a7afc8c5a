"""Checked operations: their arguments, the flat memory in which a backend moves their tensors, and what runs them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, SupportsIndex

import torch

from easydist.base.arguments import integer
from easydist.base.torch_private import has_tangents, is_zerotensor
from easydist.data.backing import absence, backed, is_backed, starts, writable
from easydist.data.leaves import overlaps
from easydist.transport.backend import Backend
from easydist.transport.reduce_op import ReduceOp
from easydist.transport.work import COMPLETED, ENDED, Begun, Pending, TorchWork, handle, wait

Hints = Mapping[str, str] | None
How = tuple[bool, Hints, timedelta | None]
"""The last three arguments of an operation: ``async_op``, ``hints``, ``timeout``."""

Begin = Callable[[], Begun]
"""A function that begins an operation."""

About = tuple[torch.Tensor | None, int | None, ReduceOp | None]
"""The tensor, the root and the reduction by which the ranks compare an operation, see ``described``."""

BYTES = torch.uint8
_Tensor, _STRIDED = torch.Tensor, torch.strided
_dtype, _is_cpu, _nbytes, _requires_grad = map(operator.attrgetter, ("dtype", "is_cpu", "nbytes", "requires_grad"))
_FLAT = (1,)
_FEW = 64
"""The most pairs of an output and an input whose memory is compared one by one."""

_FOREVER = timedelta(days=36500)
"""The longest time limit: gloo counts nanoseconds in 64 bits, so that ``timedelta.max`` would be over at once."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in one dimension; a contiguous tensor keeps its own memory.

    Example:
        >>> flat(torch.tensor([[1, 2], [3, 4]]).t())
        tensor([1, 3, 2, 4])
    """
    if tensor.stride() == _FLAT and not (tensor.requires_grad or tensor.is_complex() or tensor.is_neg()):
        return tensor  # it is its own flat memory; the rest of this function costs two microseconds
    if type(tensor) is not torch.Tensor or not is_direct(tensor) or is_zerotensor(tensor):
        tensor = backed(tensor).contiguous()
    # A single element may have any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_direct(tensor: torch.Tensor) -> bool:
    """True if the memory of the tensor holds its values in their order."""
    return tensor.is_contiguous() and not (tensor.is_complex() and tensor.is_conj()) and not tensor.is_neg()


class Staging:
    """The flat memory of an operation's outputs, and the copies from there to the outputs.

    Args:
        outputs: Outputs that are flat memory themselves.

    Attributes:
        outputs: All outputs.
        copies: Outputs that are not flat, each with the memory from which its values are copied.

    Example:
        >>> staging, output = Staging(), torch.zeros(2, 2).t()
        >>> staging.target(output).copy_(torch.arange(4))
        tensor([0., 1., 2., 3.])
        >>> staging.deliver(TorchWork()).wait()
        >>> output
        tensor([[0., 1.],
                [2., 3.]])
    """

    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def __init__(self, *outputs: torch.Tensor) -> None:
        self.outputs = [*outputs]

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat memory into which the values of an output arrive; at first it holds the output's values.

        Raises:
            RuntimeError: Several elements of ``tensor`` share memory.
        """
        memory = writable(flat(tensor))
        self.outputs.append(tensor)
        if memory is not tensor and not is_direct(tensor):
            self.copies = [*self.copies, (tensor, memory)]
        return memory

    def targets(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the flat memory of several outputs."""
        return [self.target(tensor) for tensor in tensors]

    def add(self, other: Staging) -> None:
        """Add the outputs of another operation that runs as a part of this one."""
        self.outputs += other.outputs
        self.copies = [*self.copies, *other.copies]

    def deliver(self, work: TorchWork) -> TorchWork:
        """Let a work copy the values into the outputs at its end, and return it."""
        return work.followed_by(self.copy) if self.copies else work

    def copy(self) -> Sequence[Pending]:
        """Copy the values into the outputs."""
        for tensor, memory in self.copies:
            writable(tensor.detach()).copy_(memory.view(tensor.shape))
        return ()


StagedTensors = tuple[Staging, list[torch.Tensor], list[torch.Tensor]]
"""The tensors of an operation for its backend: their staging, the outputs and the inputs."""


def ended(begun: Begun, timeout: timedelta | None, staging: Staging | None) -> TorchWork:
    """Wait for the end of an operation, and return its handle."""
    if begun is not ENDED:
        wait(begun, timeout)
    if staging is None:
        return begun if isinstance(begun, TorchWork) else COMPLETED
    if staging.copies:
        staging.copy()
    work = begun if isinstance(begun, TorchWork) else TorchWork()
    return work.returning(staging.outputs)


class RunOperation(Protocol):
    """The rules by which a communicator runs its operations."""

    def __call__(
        self,
        name: str,
        begin: Begin,
        async_op: bool,
        hints: Hints,
        timeout: timedelta | None,
        staging: Staging | None = None,
        about: About = (None, None, None),
    ) -> TorchWork:
        """Begin an operation with checked arguments, and wait for its end unless it is asynchronous."""


def run_for_verbs(
    name: str,
    begin: Begin,
    async_op: bool,
    hints: Hints,
    timeout: timedelta | None,
    staging: Staging | None = None,
    about: About = (None, None, None),
) -> TorchWork:
    """Run an operation of easydist's verbs, which compare their calls themselves: ``about`` is not used."""
    limit = None if timeout is None else checked_timeout(timeout)
    if not async_op:
        return ended(begin(), limit or None, staging)
    work = handle(begin()).within(limit)
    return work if staging is None else staging.deliver(work)


class Checks:
    """The checks of a communicator's arguments; they raise before anything is sent.

    Args:
        backend: The backend that moves the tensors.

    Attributes:
        raw: Returns a flat tensor in the dtype in which the backend moves data that is not reduced.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_on_cpu = backend.device.type == "cpu"
        self.raw = _as_it_is if backend.moves_any_dtype else _as_bytes

    def raws(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``raw`` of several tensors."""
        return tensors if self.raw is _as_it_is else [*map(self.raw, tensors)]

    def rank(self, what: str, rank: SupportsIndex) -> int:
        """Return a rank as a number, after checking that it exists."""
        value, size = integer(what, rank, "a rank"), self._backend.size
        if not 0 <= value < size:
            raise RuntimeError(f"{what} must be in range [0, {size}), but got {value}")
        return value

    def peer(self, name: str, what: str, rank: SupportsIndex) -> int:
        """Return the rank at the other end of a message."""
        peer = self.rank(what, rank)
        demand(peer != self._backend.rank, f"Cannot {name} self")
        return peer

    def moved(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> StagedTensors:
        """Check the tensors of an operation, and return what the backend moves."""
        moved = self.staged(name, outputs, inputs)
        if self.raw is _as_it_is:
            return moved
        staging, targets, data = moved
        return staging, self.raws(targets), self.raws(data)

    def staged(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> StagedTensors:
        """Do as ``moved``, with the tensors in their own dtype, in which they are reduced."""
        if self.are_plain((*outputs, *inputs)):
            return Staging(*outputs), [*map(writable, outputs)], [*inputs]  # copies: the caller may change its lists
        self.tensors(name, outputs, inputs)
        staging = Staging()
        return staging, staging.targets(outputs), list(map(flat, inputs))

    def moved_each(
        self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()
    ) -> StagedTensors:
        """Do as ``moved`` for many outputs, each of a dtype of its own, which its input has, too, if there are any."""
        if self._backend.shares_memory and _are_memory(outputs, inputs):
            return Staging(*outputs), [*outputs], [*inputs]
        every, targets, sources = Staging(), list[torch.Tensor](), list[torch.Tensor]()
        for i, output in enumerate(outputs):
            staging, target, source = self.moved(name, [output], inputs[i : i + 1])
            every.add(staging)
            targets += target
            sources += source
        return every, targets, sources

    def are_plain(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if ``tensors`` accepts them and their memory is flat: most are, and finding that out is quick.

        So this calls neither ``flat`` nor, for a tensor with elements, ``is_backed``.
        """
        device, is_cpu, dtype = self._backend.device, self._is_on_cpu, None
        if has_tangents():
            return False
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

    def tensors(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> None:
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
            if not (type(tensor) is torch.Tensor and is_backed(tensor)) or has_tangents():
                _check_backed(name, tensor)
        for tensor in outputs:
            _check_writable(name, tensor)

    def one_per_rank(self, name: str, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Check that a list has one tensor per rank."""
        if len(tensors) != (size := self._backend.size):
            raise RuntimeError(f"{what} size must equal comm_size for {name}: got {len(tensors)}, not {size}")

    def rows(self, name: str, what: str, tensor: torch.Tensor, sizes: Sequence[SupportsIndex]) -> list[int]:
        """Return the number of elements in each part of dim 0."""
        counts, length = [operator.index(size) for size in sizes], tensor.shape[0] if tensor.ndim else tensor.numel()
        demand(len(counts) == self._backend.size, f"{what}_split_sizes length must equal comm_size for {name}")
        if any(count < 0 for count in counts):
            raise TypeError(f"{name}(): {what}_split_sizes must not be negative, got {counts}")
        demand(sum(counts) <= length, f"Sum of {what}_split_sizes exceeds {what} tensor size for {name}")
        return [count * (tensor.numel() // length if length else 0) for count in counts]


def _are_memory(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """True if the tensors are plain memory on the CPU, and each input has its output's dtype; quicker than a loop."""
    tensors = [*outputs, *inputs]
    dtypes = [*map(_dtype, tensors)]
    return (
        {*map(type, tensors)} == {_Tensor}
        and dtypes[: len(inputs)] == dtypes[len(outputs) :]
        and not any(dtype.is_complex for dtype in set(dtypes))
        and all(map(_is_cpu, tensors))
        and all(map(_Tensor.is_contiguous, tensors))
        and not any(map(_requires_grad, tensors))
        and not any(map(_Tensor.is_neg, tensors))
        and starts(tensors, [*map(_nbytes, tensors)]) is not None
    )


def _check_backed(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without memory; the zeros of a ZeroTensor get some later."""
    if (reason := absence(tensor)) and not is_zerotensor(tensor):
        raise TypeError(f"{name}() takes tensors with memory, but this one {reason}")


def _check_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse an output that is a ZeroTensor, or of which elements share memory: it is expanded, for instance."""
    if is_zerotensor(tensor):
        raise TypeError(f"{name}: the zeros of a ZeroTensor are not in memory: pass a clone")
    if not tensor.is_contiguous() and overlaps(tensor):
        raise RuntimeError(
            f"{name}: Tensor must be contiguous or strided; elements of this one share memory: pass a clone"
        )


def check_own(name: str, output: int, input: int) -> None:
    """Check that this rank's part of the output has as many elements as its input."""
    if output != input:
        raise RuntimeError(f"{name}: own output must fit the own input, got {output} and {input} elements")


def check_apart(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], rank: int, parts: int = 1
) -> None:
    """Check that nothing is written that has yet to be sent: only this rank's part may stay where it is.

    Args:
        name: The name of the operation for errors.
        outputs: Contiguous tensors: one per rank, or that of this rank alone.
        inputs: The same.
        rank: This rank.
        parts: The number of equal parts, one per rank, of which a lone output consists.
    """
    if len(outputs) * len(inputs) > _FEW or _share_memory(outputs, inputs):  # perhaps the own part alone
        _check_spans(name, _spans(outputs), _spans(inputs), rank, parts)


def _share_memory(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    for tensor in inputs:
        start = tensor.data_ptr()
        stop = start + tensor.nbytes
        for output in outputs:
            first = output.data_ptr()
            if first < stop and start < first + output.nbytes:
                return True
    return False


def _check_spans(name: str, written: list[tuple[int, int]], sent: list[tuple[int, int]], rank: int, parts: int) -> None:
    """Check whether any two overlap, except for those of this rank, in the order of their addresses."""
    if parts > 1:
        ((start, stop),) = written
        nbytes = (stop - start) // parts
        written = [(at, at + nbytes) for at in range(start, stop, nbytes or 1)]
    own = rank if len(written) > 1 else 0
    if written and sent and written[own] == sent[rank if len(sent) > 1 else 0]:
        del written[own]  # it gets the values that it has
    # Sorted, so that each has to be compared with nothing but the furthest end of the other kind so far.
    ends = [0, 0]
    for start, stop, is_sent in sorted([(*span, False) for span in written] + [(*span, True) for span in sent]):
        if start < stop and start < ends[not is_sent]:
            raise RuntimeError(f"{name}: output and input must not share memory, except for this rank's part")
        ends[is_sent] = max(ends[is_sent], stop)


def _spans(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(start := tensor.data_ptr(), start + tensor.nbytes) for tensor in tensors]


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
