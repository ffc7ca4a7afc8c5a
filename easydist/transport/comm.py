"""Collectives over one group's tensors, which check every argument before a backend moves the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import SupportsIndex

import torch

from easydist.liveness.monitor import Monitor
from easydist.transport.backend import Backend, Gathered
from easydist.transport.checked import (
    BYTES,
    Checks,
    Hints,
    How,
    RunOperation,
    StagedTensors,
    Staging,
    check_apart,
    check_own,
    demand,
    run_for_verbs,
    split,
)
from easydist.transport.reductions import Reductions
from easydist.transport.work import TorchWork
from easydist.typing import T

_TIME_LIMIT = timedelta(minutes=10)


class Collectives(Reductions):
    """Collectives over the tensors of one group, with torchcomms' names and signatures; the core of ``TorchComm``.

    Every method checks its arguments before anything is sent, and raises ``RuntimeError`` if they do not fit. Tensors
    have to be on the communicator's device and may have any strides and dtype (data moves as bytes, reductions in the
    tensor's own dtype). Numbers of elements are compared, shapes are not. With ``async_op=True`` an operation returns
    at once, and its result may be used after ``wait()``. ``hints`` are accepted and not used. ``timeout`` limits each
    wait; None or zero means the group's own.

    Args:
        backend: The backend that moves the bytes.
        name: The name for users.
        run: Runs the operations.

    Attributes:
        checks: The checks of arguments.
        monitor: Watches the other processes; None if there is no monitor, or the communicator does not know of it.
        communicators: The ``Communicators`` of the group, once it was passed to one of easydist's verbs; else None.

    Source: the torchcomms API.
    """

    monitor: Monitor | None = None

    def __init__(self, backend: Backend, name: str = "", run: RunOperation = run_for_verbs) -> None:
        self._backend, self._name, self._run = backend, name, run
        self.checks = Checks(backend)
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

    def core(self) -> Collectives:
        """Return this communicator for the verbs, which have their own rules for hooks, time limits and failures."""
        return self

    def exchange(self, name: str, run: Callable[[Collectives, timedelta], T]) -> T:
        """Run an exchange of easydist's own.

        Args:
            name: The name of the operation for errors.
            run: Runs the exchange over ``core()``, within the time limit.
        """
        return run(self.core(), self.time_limit)

    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``tensor_list[r] == tensor of rank r``; all of one size.

        Args:
            tensor_list: One tensor per rank, each with as many elements as ``tensor``.
            tensor: The data that this rank sends; as many elements on every rank. May be this rank's own output.
        """
        name = "all_gather"
        self.checks.one_per_rank(name, "tensor_list", tensor_list)
        moved = self.checks.moved(name, tensor_list, [tensor])
        same = [output.numel() for output in tensor_list].count(tensor.numel()) == len(tensor_list)
        demand(same, f"All tensors in tensor_list must have same size as input tensor for {name}")
        return self._all_gather(name, moved, (async_op, hints, timeout))

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output.flatten() == cat([input.flatten() of rank 0, …, of rank W-1])``.

        Args:
            output: ``W * input.numel()`` elements of the same dtype.
            input: As many elements on every rank; may be this rank's own part of ``output``.
        """
        name = "all_gather_single"
        staging, (target,), (data,) = self.checks.moved(name, [output], [input])
        fits = output.numel() == input.numel() * self.get_size()
        demand(
            fits, f"Output tensor size must be input_size * comm_size for {name}: the numbers of elements do not fit"
        )
        check_apart(name, [target], [data], self.get_rank(), self.get_size())
        about = (data, None, None)
        return self._run(
            name, lambda: self._backend.all_gather_single(target, data), async_op, hints, timeout, staging, about
        )

    def all_gather_upto(
        self,
        rows: torch.Tensor,
        nbytes: int,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``rows[r][:n] == rows[r][:n] of rank r``, where n is the ``nbytes`` of rank r.

        For short messages of which the other ranks do not know the lengths: the messages contain them, or the lengths
        are not needed.

        Args:
            rows: uint8, contiguous, one row per rank, all of one length; this rank's own row holds its message.
            nbytes: The length of this rank's message.
        """
        name = "all_gather_upto"
        if rows.dtype is not BYTES or rows.ndim != 2 or rows.shape[0] != self._backend.size or not rows.is_contiguous():
            raise RuntimeError(f"{name}: rows must be contiguous uint8 of the shape (comm_size, length)")
        if not 0 <= nbytes <= rows.shape[1]:
            raise RuntimeError(f"{name}: nbytes must fit a row")
        return self._run(name, lambda: self._backend.all_gather_upto(rows, nbytes), async_op, hints, timeout)

    def all_gather_v(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``tensor_list[r] == tensor of rank r``; the ranks' sizes may differ.

        Args:
            tensor_list: One tensor per rank, each with as many elements as that rank sends.
            tensor: The data that this rank sends.
        """
        name = "all_gather_v"
        self.checks.one_per_rank(name, "tensor_list", tensor_list)
        moved = self.checks.moved(name, tensor_list, [tensor])
        check_own(name, tensor_list[self.get_rank()].numel(), tensor.numel())
        return self._all_gather(name, moved, (async_op, hints, timeout))

    def all_gather_parts(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[Sequence[int] | None],
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``outputs[i].flatten() == cat([tensors[i].flatten() of rank 0, …, of rank W-1])``, as one operation.

        Args:
            outputs: One or more tensors.
            tensors: The data that this rank sends, one tensor for each output, of its dtype.
            sizes: For each output the number of elements from each rank; None if all ranks send as many.
        """
        name, rank, moved = "all_gather_parts", self.get_rank(), list[Gathered]()
        staging, targets, sources = self.checks.moved_each(name, outputs, tensors)
        for target, data, tensor, counts in zip(targets, sources, tensors, sizes, strict=True):
            if counts is not None:
                check_own(name, counts[rank], tensor.numel())
                # As many, in the dtype in which the backend moves them.
                counts = [count * tensor.itemsize // data.itemsize for count in counts]
            total = self.get_size() * data.numel() if counts is None else sum(counts)
            demand(target.numel() == total, f"{name}: an output does not fit the elements of all ranks")
            moved.append((target, data, counts))
        return self._run(name, lambda: self._backend.all_gather_parts(moved), async_op, hints, timeout, staging)

    def all_to_all(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor_list: Sequence[torch.Tensor],
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output_tensor_list[s] == input_tensor_list[rank] of rank s``; the sizes may differ.

        Args:
            output_tensor_list: One tensor per rank, for the data from that rank.
            input_tensor_list: One tensor per rank, with the data for that rank. Only that of this rank may be an
                output, too, its own one.
        """
        name, rank = "all_to_all", self.get_rank()
        self.checks.one_per_rank(name, "output_tensor_list", output_tensor_list)
        self.checks.one_per_rank(name, "input_tensor_list", input_tensor_list)
        staging, targets, data = self.checks.moved(name, output_tensor_list, input_tensor_list)
        check_own(name, output_tensor_list[rank].numel(), input_tensor_list[rank].numel())
        check_apart(name, targets, data, rank)
        about = (input_tensor_list[rank], None, None)
        return self._run(
            name, lambda: self._backend.all_to_all_v(targets, data), async_op, hints, timeout, staging, about
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``all_to_all`` of the W equal parts of the elements of ``input``, in their order.

        Args:
            output: As many elements as ``input``, of the same dtype; it must not share memory with ``input``.
            input: A multiple of W elements, as many on every rank.
        """
        name, size = "all_to_all_single", self.get_size()
        staging, (target,), (source,) = self.checks.staged(name, [output], [input])
        same = output.numel() == input.numel()
        demand(same, f"Input and output tensors must have same size for {name}")
        demand(input.numel() % size == 0, f"Tensor size must be divisible by comm_size for {name}")
        # In place, parts that arrive would overwrite parts that have yet to be sent.
        demand(not _share_memory(output, input), f"{name}: output and input must not share memory")
        outputs, inputs = (split(part, [part.numel() // size] * size) for part in (target, source))
        return self._swap(name, (staging, outputs, inputs), source, (async_op, hints, timeout))

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[SupportsIndex],
        input_split_sizes: Sequence[SupportsIndex],
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``all_to_all`` of parts of dim 0, of ``input_split_sizes`` and ``output_split_sizes`` rows.

        Args:
            output: The output; its rows after the received ones are not changed.
            input: The input; its rows after the sent ones are not used.
            output_split_sizes: The number of rows from each rank.
            input_split_sizes: The number of rows for each rank.
        """
        name = "all_to_all_v_single"
        staging, (target,), (source,) = self.checks.staged(name, [output], [input])
        demand(not _share_memory(output, input), f"{name}: output and input must not share memory")
        counts = (
            self.checks.rows(name, "output", output, output_split_sizes),
            self.checks.rows(name, "input", input, input_split_sizes),
        )
        check_own(name, counts[0][self.get_rank()], counts[1][self.get_rank()])
        outputs, inputs = split(target, counts[0]), split(source, counts[1])
        return self._swap(name, (staging, outputs, inputs), source, (async_op, hints, timeout))

    def barrier(self, async_op: bool, hints: Hints = None, timeout: timedelta | None = None) -> TorchWork:
        """Block until every rank has reached this call."""
        return self._run("barrier", self._backend.barrier, async_op, hints, timeout)

    def broadcast(
        self,
        tensor: torch.Tensor,
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``tensor == tensor of root``."""
        name, rank = "broadcast", self.checks.rank("root", root)
        staging, (target,), _ = self.checks.moved(name, [tensor])
        about = (target, rank, None)
        return self._run(name, lambda: self._backend.broadcast(target, rank), async_op, hints, timeout, staging, about)

    def broadcast_parts(
        self,
        tensors: Sequence[torch.Tensor],
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``tensors[i] == tensors[i] of root``; several ``broadcast`` as one operation.

        Args:
            tensors: The tensors, of the same sizes on every rank.
            root: The sending rank.
        """
        name, rank = "broadcast_parts", self.checks.rank("root", root)
        staging, targets, _ = self.checks.moved_each(name, tensors)
        about = (None, rank, None)
        return self._run(
            name, lambda: self._backend.broadcast_parts(targets, rank), async_op, hints, timeout, staging, about
        )

    def multicast(
        self,
        tensor: torch.Tensor,
        root: SupportsIndex,
        ranks: Iterable[SupportsIndex],
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place, on ``ranks``: ``tensor == tensor of root``; a broadcast to some ranks, called by all.

        Args:
            tensor: A tensor of the same size on every rank; its values are undefined afterwards on ranks that are not
                in ``ranks``, except on ``root``.
            root: The sending rank.
            ranks: The receiving ranks, the same on every rank.
        """
        name, rank = "multicast", self.checks.rank("root", root)
        # Sorted: the data goes from rank to rank in this order, which has to be the same on all of them.
        others = sorted({self.checks.rank("ranks", one) for one in ranks} - {rank})
        staging, (target,), _ = self.checks.moved(name, [tensor])
        begin, about = (lambda: self._backend.multicast(target, rank, others)), (target, rank, None)
        return self._run(name, begin, async_op, hints, timeout, staging, about)

    def gather(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor: torch.Tensor,
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, on ``root``: ``output_tensor_list[r] == input_tensor of rank r``; the ranks' sizes may differ.

        Args:
            output_tensor_list: On ``root`` one tensor per rank; ignored on other ranks.
            input_tensor: The data that this rank sends.
            root: The receiving rank.
        """
        name, rank = "gather", self.checks.rank("root", root)
        outputs = output_tensor_list if rank == self.get_rank() else []
        if rank == self.get_rank():
            self.checks.one_per_rank(name, "output_tensor_list", outputs)
            own = outputs[rank].numel() == input_tensor.numel()
            demand(
                own, "All output tensors must have same size as input tensor: own entry must fit the input for gather"
            )
        return self._gather(name, outputs, input_tensor, rank, (async_op, hints, timeout))

    def gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, on ``root``: ``output.flatten() == cat([input.flatten() of rank 0, …, of rank W-1])``.

        Args:
            output: On ``root`` ``W * input.numel()`` elements; ignored on other ranks.
            input: As many elements on every rank.
            root: The receiving rank.
        """
        name, rank, size = "gather_single", self.checks.rank("root", root), self.get_size()
        if rank != self.get_rank():
            return self._gather(name, [], input, rank, (async_op, hints, timeout))
        staging, (target,), (data,) = self.checks.moved(name, [output], [input])
        fits = output.numel() == input.numel() * size
        demand(fits, f"Output tensor size must be input_size * comm_size for {name}")
        parts = split(target, [target.numel() // size] * size)
        check_apart(name, parts, [data], rank)
        return self._run(
            name, lambda: self._backend.gather(parts, data, rank), async_op, hints, timeout, staging, (data, rank, None)
        )

    def recv(
        self,
        tensor: torch.Tensor,
        src: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``tensor == tensor that src sends``; the i-th ``recv`` from a rank gets its i-th ``send`` to this one.

        Args:
            tensor: The output, with as many bytes as are sent.
            src: Another rank.
        """
        rank = self.checks.peer("recv from", "src", src)
        staging, target = Staging(tensor), tensor
        if not self.checks.are_plain((tensor,)):
            staging, (target,), _ = self.checks.staged("recv", [tensor])
        memory = self.checks.raw(target)
        return self._run(
            "recv", lambda: self._backend.recv(memory, rank), async_op, hints, timeout, staging, (target, rank, None)
        )

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Sequence[torch.Tensor],
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output_tensor == input_tensor_list[rank] of root``; the sizes may differ.

        Args:
            output_tensor: The output of this rank.
            input_tensor_list: On ``root`` one tensor per rank; ignored on other ranks.
            root: The sending rank.
        """
        name, rank = "scatter", self.checks.rank("root", root)
        inputs = input_tensor_list if rank == self.get_rank() else []
        if rank == self.get_rank():
            self.checks.one_per_rank(name, "input_tensor_list", inputs)
            own = inputs[rank].numel() == output_tensor.numel()
            demand(
                own, "All input tensors must have same size as output tensor: own entry must fit the output for scatter"
            )
        staging, (target,), data = self.checks.moved(name, [output_tensor], inputs)
        check_apart(name, [target], data, rank)
        about = (target, rank, None)
        return self._run(
            name, lambda: self._backend.scatter(target, data, rank), async_op, hints, timeout, staging, about
        )

    def send(
        self,
        tensor: torch.Tensor,
        dst: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Send the tensor to ``dst``; see ``recv``. This may wait until ``dst`` has begun to receive.

        Args:
            tensor: The data; it must not be changed before the operation has ended.
            dst: Another rank.
        """
        rank = self.checks.peer("send to", "dst", dst)
        if not self.checks.are_plain((tensor,)):
            _, _, (tensor,) = self.checks.staged("send", [], [tensor])
        data = self.checks.raw(tensor)
        return self._run(
            "send", lambda: self._backend.send(data, rank), async_op, hints, timeout, None, (tensor, rank, None)
        )

    def _all_gather(self, name: str, moved: StagedTensors, how: How) -> TorchWork:
        staging, targets, (data,) = moved
        check_apart(name, targets, [data], self.get_rank())
        return self._run(name, lambda: self._backend.all_gather_v(targets, data), *how, staging, (data, None, None))

    def _swap(self, name: str, moved: StagedTensors, source: torch.Tensor, how: How) -> TorchWork:
        """Exchange the parts of two tensors, of which ``source`` is the second one."""
        staging, outputs, inputs = moved
        targets, data, about = self.checks.raws(outputs), self.checks.raws(inputs), (source, None, None)
        return self._run(name, lambda: self._backend.all_to_all_v(targets, data), *how, staging, about)

    def _gather(
        self, name: str, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, rank: int, how: How
    ) -> TorchWork:
        staging, targets, (data,) = self.checks.moved(name, outputs, [tensor])
        check_apart(name, targets, [data], rank)
        return self._run(name, lambda: self._backend.gather(targets, data, rank), *how, staging, (data, rank, None))


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both are contiguous and overlap; of other tensors an operation makes copies."""
    if not (one.is_contiguous() and other.is_contiguous()):
        return False
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
