"""One-sided communication: memory of a rank that the others read and write without its participation."""

from __future__ import annotations

import enum
import operator
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import SupportsIndex

import torch

from easydist.base.arguments import integer
from easydist.comms.regions import Regions, check_fits, numel_of
from easydist.data.backing import absence
from easydist.groups.pickled import OfThisProcess
from easydist.groups.sharing import all_gather
from easydist.transport.checked import flat
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork

_LARGEST = 2**63 - 1


class SignalCmpOp(enum.Enum):
    """The comparison that ``wait_signal`` makes between the slot and its value."""

    EQ = 0
    GE = 1
    LE = 2


_COMPARE: dict[SignalCmpOp, Callable[[int, int], bool]] = {
    SignalCmpOp.EQ: operator.eq,
    SignalCmpOp.GE: operator.ge,
    SignalCmpOp.LE: operator.le,
}


class _Signal:
    """A wait for a signal."""

    def __init__(
        self,
        comm: Collectives,
        regions: Regions,
        slot: int,
        is_met: Callable[[int], bool],
        senders: Sequence[int],
        blocks: bool,
        unmet: Callable[[], object],
    ) -> None:
        self._regions, self._slot, self._is_met, self._limit = regions, slot, is_met, comm.time_limit
        self._senders, self._monitor, self._blocks, self._unmet = senders, comm.monitor, blocks, unmet

    def wait(self, timeout: timedelta | None = None) -> None:
        limit = timeout or self._limit
        try:
            self._regions.wait(self._slot, self._is_met, limit, self._senders, self._monitor, blocks=self._blocks)
        except BaseException:
            self._unmet()
            raise

    def is_completed(self) -> bool:
        return self._is_met(self._regions.value(self._slot))


class _Window(OfThisProcess):
    """A region per rank; see ``TorchCommWindow`` and ``RegisteredWindow``."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._regions: Regions | None = None

    def _exchange(self, mine: bytes) -> list[bytes]:
        return self._comm.exchange("window", lambda core, limit: all_gather(core, mine, limit))

    def get_size(self) -> int:
        """Return the bytes of each rank's part."""
        return 0 if self._regions is None else self._regions.nbytes

    def _open(self) -> Regions:
        if self._regions is None:
            raise RuntimeError("the window has no memory: call tensor_register(tensor) on every rank first")
        return self._regions

    def _view(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        regions = self._open()
        numel = numel_of(sizes)
        check_fits(numel, offset, dtype, regions.nbytes)
        begin = offset * dtype.itemsize
        return regions.region(rank)[begin : begin + numel * dtype.itemsize].view(dtype).view(tuple(sizes))

    def _put(self, tensor: torch.Tensor, rank: int, offset: int) -> TorchWork:
        self._comm.checks.tensors("put", [], [tensor])
        self._view(rank, [tensor.numel()], tensor.dtype, offset).copy_(flat(tensor))
        return TorchWork()

    def _wait(
        self,
        slot: int,
        is_met: Callable[[int], bool],
        async_op: bool,
        sender: int | None = None,
        unmet: Callable[[], object] = lambda: None,
    ) -> TorchWork:
        """Wait for a number that one rank writes, or any of them (None); call ``unmet`` if the wait fails."""
        peers = {} if self._comm.monitor is None else self._comm.monitor.peers
        senders = [rank for rank in peers if sender in (None, rank)]
        work = TorchWork([_Signal(self._comm, self._open(), slot, is_met, senders, not async_op, unmet)])
        if async_op:
            return work.in_background()
        work.wait()
        return work


class TorchCommWindow(_Window):
    """Memory of each rank that all ranks of a communicator write and read. Create it with ``comm.window_allocate``.

    All ranks must be on one host: a window is shared memory, and ``get_tensor`` returns a view of it. A rank that sees
    a signal also sees everything that the sender put before it. Sizes are in bytes, offsets in elements. ``put`` and
    ``signal`` are complete when they return, with or without ``async_op``.

    Example:
        >>> import torch
        >>> from easydist.comms import SignalCmpOp, Solo, TorchComm
        >>> window = TorchComm(Solo()).window_allocate(window_size=64)
        >>> window.put(torch.tensor([1.0, 2.0]), dst_rank=0, target_disp=3, async_op=False).wait()
        >>> window.signal(0, 7, dst_rank=0, async_op=False).wait()
        >>> window.wait_signal(0, 7, SignalCmpOp.EQ, async_op=False).wait()
        >>> window.get_tensor(0, (2,), torch.float32, offset=3)
        tensor([1., 2.])

    Source: the torchcomms API.
    """

    def __init__(self, comm: Collectives, window_size: int, cpu_buf: bool = False, signal_size: int = 256) -> None:
        super().__init__(comm)
        wrong = f"a window cannot have {window_size} bytes and {signal_size} signals"
        fault = wrong if window_size < 0 or signal_size < 0 else ""
        self._regions = Regions(comm.core(), self._exchange, window_size, signal_size, fault)

    def get_tensor(
        self, rank: SupportsIndex, sizes: tuple[int, ...], dtype: torch.dtype, offset: SupportsIndex
    ) -> torch.Tensor:
        """Return a view of a rank's memory. Later puts of any rank are visible in it.

        Args:
            rank: The owner of the memory.
            sizes: The shape.
            dtype: The dtype of the elements.
            offset: The offset in elements.

        Raises:
            RuntimeError: The view does not lie inside the window, or there is no such rank.
        """
        return self._view(self._comm.checks.rank("rank", rank), sizes, dtype, integer("offset", offset, "an integer"))

    def put(
        self, tensor: torch.Tensor, dst_rank: SupportsIndex, target_disp: SupportsIndex, async_op: bool
    ) -> TorchWork:
        """Copy a tensor into a rank's memory.

        Args:
            tensor: A tensor of any dtype and strides.
            dst_rank: The owner of the memory, which may be this rank.
            target_disp: The offset, in elements of the tensor's dtype.
            async_op: Makes no difference.

        Returns:
            The work, which has ended.

        Raises:
            RuntimeError: The tensor does not fit into the window, or there is no such rank.
        """
        return self._put(
            tensor, self._comm.checks.rank("dst_rank", dst_rank), integer("target_disp", target_disp, "an integer")
        )

    def signal(
        self, signal_disp: SupportsIndex, signal_val: SupportsIndex, dst_rank: SupportsIndex, async_op: bool
    ) -> TorchWork:
        """Store a number in a slot of a rank, visible at once, after everything that this rank has put before.

        Args:
            signal_disp: The slot.
            signal_val: A signed number of 64 bits.
            dst_rank: The owner of the slot.
            async_op: Makes no difference.

        Returns:
            The work, which has ended.

        Raises:
            RuntimeError: There is no such slot or rank, or the number is too large.
        """
        rank, value = self._comm.checks.rank("dst_rank", dst_rank), integer("signal_val", signal_val, "an integer")
        if not -_LARGEST - 1 <= value <= _LARGEST:
            raise RuntimeError(f"signal_val must be a number of 64 bits, got {value}")
        self._open().signal(rank, self._slot(signal_disp), value)
        return TorchWork()

    def wait_signal(
        self, signal_disp: SupportsIndex, signal_val: SupportsIndex, cmp_op: SignalCmpOp, async_op: bool
    ) -> TorchWork:
        """Wait until the number in a slot of this rank meets a condition.

        Args:
            signal_disp: The slot.
            signal_val: The value to compare with.
            cmp_op: The condition: ``slot == signal_val``, ``>=`` or ``<=``.
            async_op: Return at once.

        Returns:
            The work, which ends when the condition holds.

        Raises:
            TypeError: ``cmp_op`` is not a ``SignalCmpOp``.
            RuntimeError: There is no such slot, or the communicator's time limit has passed (CommTimeout), or all other
                ranks have ended, or some have and the rest wait for signals without ``async_op`` (CommPeerLost), or one
                of them has failed or recovers the communicator (the error of an operation).
        """
        if not isinstance(cmp_op, SignalCmpOp):
            raise TypeError(f"wait_signal(): cmp_op must be a SignalCmpOp, got {cmp_op!r}")
        value, compare = integer("signal_val", signal_val, "an integer"), _COMPARE[cmp_op]
        return self._wait(self._slot(signal_disp), lambda slot: compare(slot, value), async_op)

    def _slot(self, signal_disp: SupportsIndex) -> int:
        slot, count = integer("signal_disp", signal_disp, "an integer"), self._open().count
        if not 0 <= slot < count:
            raise RuntimeError(f"signal_disp must be in range [0, {count}), but got {slot}")
        return slot


class RegisteredWindow(_Window):
    """The window API of later torchcomms releases: a tensor's own memory, with signals counted per sender.

    Example:
        >>> import torch
        >>> from easydist.comms import Solo, TorchComm
        >>> tensor = torch.zeros(3)
        >>> window = TorchComm(Solo()).new_window(tensor)
        >>> window.put(torch.ones(1), 0, 1, async_op=False).wait()
        >>> tensor
        tensor([0., 1., 0.])
    """

    def __init__(self, comm: Collectives) -> None:
        super().__init__(comm)
        self._tensor: torch.Tensor | None = None
        self._sent, self._taken = [0] * comm.get_size(), [0] * comm.get_size()
        self._lock = threading.Lock()

    def tensor_register(self, tensor: torch.Tensor) -> None:
        """Move a tensor's values into memory that the other ranks can access. All ranks call it, with one size.

        Args:
            tensor: Keeps its values. Existing views of it still refer to the old memory.

        Raises:
            RuntimeError: On every rank: that of one is no contiguous tensor, or it has registered another one, or the
                sizes differ, or the ranks cannot share memory.
        """
        fault, core = self._fault(tensor), self._comm.core()
        self._regions = Regions(core, self._exchange, getattr(tensor, "nbytes", 0), core.get_size(), fault)
        memory = self._view(self._comm.get_rank(), tensor.shape, tensor.dtype, 0)
        memory.copy_(tensor.detach())
        tensor.data = memory
        self._tensor = tensor
        self._exchange(b"")  # afterwards all ranks see its values

    def _fault(self, tensor: object) -> str:
        """Return the reason why this rank cannot register what it was given; empty if it can."""
        if self._tensor is not None:
            return "a tensor is registered already: call tensor_deregister first"
        if not isinstance(tensor, torch.Tensor):
            return f"tensor_register: takes a tensor, got {type(tensor).__name__}"
        if reason := absence(tensor):
            return f"tensor_register: the tensor {reason}"
        return "" if tensor.is_contiguous() else "tensor_register: Tensor must be contiguous"

    def tensor_deregister(self) -> None:
        """Give the tensor its own memory again.

        Raises:
            RuntimeError: No tensor is registered.
        """
        if self._tensor is None:
            raise RuntimeError("no tensor is registered")
        self._tensor.data = self._tensor.detach().clone()
        self._tensor, self._regions = None, None

    def map_remote_tensor(self, rank: SupportsIndex) -> torch.Tensor:
        """Return a view of the tensor that another rank has registered, in the shape and dtype of this rank's.

        Args:
            rank: The other rank.
        """
        if self._tensor is None:
            raise RuntimeError("no tensor is registered")
        return self._view(self._comm.checks.rank("rank", rank), self._tensor.shape, self._tensor.dtype, 0)

    def put(
        self, tensor: torch.Tensor, dst_rank: SupportsIndex, target_offset_nelems: SupportsIndex, async_op: bool
    ) -> TorchWork:
        """Copy a tensor into the registered tensor of a rank.

        Args:
            tensor: A tensor of any dtype and strides.
            dst_rank: The owner of the memory.
            target_offset_nelems: The offset, in elements of the tensor's dtype.
            async_op: Makes no difference.

        Returns:
            The work, which has ended.
        """
        return self._put(
            tensor,
            self._comm.checks.rank("dst_rank", dst_rank),
            integer("target_offset_nelems", target_offset_nelems, "an integer"),
        )

    def signal(self, peer_rank: SupportsIndex, async_op: bool) -> TorchWork:
        """Signal a rank after everything that this rank has put before.

        Args:
            peer_rank: The rank to signal.
            async_op: Makes no difference.

        Returns:
            The work, which has ended.
        """
        rank = self._comm.checks.rank("peer_rank", peer_rank)
        regions = self._open()
        self._sent[rank] += 1
        regions.signal(rank, self._comm.get_rank(), self._sent[rank])
        return TorchWork()

    def wait_signal(self, peer_rank: SupportsIndex, async_op: bool) -> TorchWork:
        """Wait for the next signal of a rank. Each signal is consumed once; a wait that raises consumes none.

        Args:
            peer_rank: The sender.
            async_op: Return at once.

        Returns:
            The work, which ends with the signal.

        Raises:
            RuntimeError: There is no such rank, or the communicator's time limit has passed (CommTimeout), or the
                sender has ended without a further signal (CommPeerLost), or has failed or recovers the communicator
                (the error of an operation).
        """
        rank = self._comm.checks.rank("peer_rank", peer_rank)
        self._open()
        count = self._take(rank, 1)
        return self._wait(rank, lambda seen: seen >= count, async_op, rank, lambda: self._take(rank, -1))

    def _take(self, rank: int, count: int) -> int:
        """Consume signals of a rank, or give them back; return the number of those that are consumed."""
        with self._lock:
            self._taken[rank] += count
            return self._taken[rank]
