"""The communicator: the one object that talks to other processes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

import torch

from easydist.data.packing import as_bytes
from easydist.transport.backend import Backend
from easydist.transport.reduce_op import ReduceOp
from easydist.transport.work import TorchWork

Hints = Mapping[str, str] | None


class TorchComm:
    """Collectives over the tensors of one group, with torchcomms' names and signatures.

    Every method checks its arguments before anything is sent and raises ``RuntimeError`` where they do not fit. Tensors
    have to be contiguous and on the communicator's device; dtypes are free (data moves as bytes, reductions in the
    tensor's own dtype). With ``async_op=True`` an operation returns at once, and its result may be used after
    ``wait()``. ``hints`` are accepted and not used. ``timeout`` limits each wait; None or zero is the group's own.

    Example:
        >>> from easydist.comms import ReduceOp, Solo, TorchComm
        >>> comm = TorchComm(Solo(), "main")
        >>> tensor = torch.ones(2)
        >>> comm.all_reduce(tensor, ReduceOp.SUM, async_op=False).wait()
        >>> tensor
        tensor([1., 1.])

    Attributes:
        communicators: What easydist's verbs know of the group, once it was given to one of them.

    Source: the torchcomms API.
    """

    def __init__(self, backend: Backend, name: str = "") -> None:
        self._backend = backend
        self._name = name
        self.communicators: object = None

    def __repr__(self) -> str:
        return (
            f"TorchComm({self._name!r}, backend={self.get_backend()!r}, rank={self.get_rank()}, "
            f"size={self.get_size()}, device={self.get_device()})"
        )

    @property
    def backend(self) -> Backend:
        """What moves the bytes."""
        return self._backend

    def get_backend(self) -> str:
        """The backend's name, such as ``"gloo"``, ``"nccl"``, ``"solo"``."""
        return self._backend.name

    def get_device(self) -> torch.device:
        """Where the tensors have to be."""
        return self._backend.device

    def get_name(self) -> str:
        """The name given when the communicator was made."""
        return self._name

    def get_rank(self) -> int:
        """This process in the group."""
        return self._backend.rank

    def get_size(self) -> int:
        """How many processes the group has."""
        return self._backend.size

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
            input: As many elements on every rank.
        """
        name = "all_gather_single"
        self._same_dtype(name, output, input)
        _demand(output.numel() == input.numel() * self.get_size(), name, "output must have comm_size * input elements")
        return self._run(lambda: self._backend.all_gather_single(as_bytes(output), as_bytes(input)), async_op, timeout)

    def all_gather_upto(
        self,
        rows: torch.Tensor,
        nbytes: int,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``rows[r][:n] == rows[r][:n] of rank r``, where n is the ``nbytes`` of rank r.

        For short messages whose lengths the others do not know; they stand in the messages, or nobody needs them.

        Args:
            rows: uint8, one row per rank, all of one length; this rank's own row holds its message.
            nbytes: The length of this rank's message.
        """
        name = "all_gather_upto"
        self._check(name, rows)
        shaped = rows.dtype is torch.uint8 and rows.ndim == 2 and rows.shape[0] == self.get_size()
        _demand(shaped, name, "rows must be uint8 of the shape (comm_size, length)")
        _demand(0 <= nbytes <= rows.shape[1], name, "nbytes must fit a row")
        return self._run(lambda: self._backend.all_gather_upto(rows, nbytes), async_op, timeout)

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
            tensor: What this rank sends.
        """
        self._check_rows("all_gather_v", tensor_list, tensor)
        return self._run(lambda: self._backend.all_gather_v(_flats(tensor_list), as_bytes(tensor)), async_op, timeout)

    def all_gather_parts(
        self,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``tensor_lists[i][r] == tensors[i] of rank r``; several ``all_gather_v`` as one operation.

        Args:
            tensor_lists: One or more; each has one tensor per rank, with as many elements as that rank sends.
            tensors: What this rank sends, one for each list.
        """
        name = "all_gather_parts"
        for tensor_list, tensor in zip(tensor_lists, tensors, strict=True):
            self._check_rows(name, tensor_list, tensor)
        outputs = [_flats(tensor_list) for tensor_list in tensor_lists]
        return self._run(lambda: self._backend.all_gather_parts(outputs, _flats(tensors)), async_op, timeout)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``tensor == op(op(tensor of rank 0, tensor of rank 1), …)``; the same bits on every rank."""
        self._check("all_reduce", tensor)
        _check_op("all_reduce", op)
        flat = tensor.detach().reshape(-1)
        return self._run(lambda: self._backend.all_reduce(flat, op), async_op, timeout)

    def all_reduce_from(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output == op(op(input of rank 0, input of rank 1), …)``; ``input`` stays. Saves ``all_reduce`` a copy.

        Args:
            output: As many elements as ``input``, of the same dtype; in other memory.
            input: As many elements on every rank.
            op: The reduction.
        """
        name = "all_reduce_from"
        self._same_dtype(name, output, input)
        _check_op(name, op)
        _demand(output.numel() == input.numel(), name, "output must have as many elements as input")
        flats = output.detach().reshape(-1), input.detach().reshape(-1)
        return self._run(lambda: self._backend.all_reduce_from(*flats, op), async_op, timeout)

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
            output_tensor_list: One tensor per rank, for what comes from it.
            input_tensor_list: One tensor per rank, for what goes to it.
        """
        name, rank = "all_to_all", self.get_rank()
        self._one_per_rank(name, "output_tensor_list", output_tensor_list)
        self._one_per_rank(name, "input_tensor_list", input_tensor_list)
        self._same_dtype(name, *output_tensor_list, *input_tensor_list)
        own = output_tensor_list[rank].numel() == input_tensor_list[rank].numel()
        _demand(own, name, "own output must fit the own input")
        return self._run(
            lambda: self._backend.all_to_all_v(_flats(output_tensor_list), _flats(input_tensor_list)), async_op, timeout
        )

    def barrier(self, async_op: bool, hints: Hints = None, timeout: timedelta | None = None) -> TorchWork:
        """Block until every rank has reached this call."""
        return self._run(self._backend.barrier, async_op, timeout)

    def broadcast(
        self,
        tensor: torch.Tensor,
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``tensor == tensor of root``."""
        rank = self._rank("root", root)
        self._check("broadcast", tensor)
        return self._run(lambda: self._backend.broadcast(as_bytes(tensor), rank), async_op, timeout)

    def broadcast_parts(
        self,
        tensors: Sequence[torch.Tensor],
        root: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place: ``tensors[i] == tensors[i] of root``; several ``broadcast`` as one operation."""
        rank = self._rank("root", root)
        self._check("broadcast_parts", *tensors)
        return self._run(lambda: self._backend.broadcast_parts(_flats(tensors), rank), async_op, timeout)

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
            output_tensor_list: On ``root`` one tensor per rank; not looked at elsewhere.
            input_tensor: What this rank sends.
            root: The receiving rank.
        """
        rank = self._rank("root", root)
        outputs = output_tensor_list if rank == self.get_rank() else []
        if rank == self.get_rank():
            self._one_per_rank("gather", "output_tensor_list", outputs)
            _demand(outputs[rank].numel() == input_tensor.numel(), "gather", "own entry must fit the input")
        self._same_dtype("gather", *outputs, input_tensor)
        return self._run(lambda: self._backend.gather(_flats(outputs), as_bytes(input_tensor), rank), async_op, timeout)

    def recv(
        self,
        tensor: torch.Tensor,
        src: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``tensor == tensor that src sends``; the i-th ``recv`` from a rank meets its i-th ``send`` to this one.

        Args:
            tensor: As many bytes as are sent.
            src: Another rank.
        """
        rank = self._rank("src", src)
        self._check("recv", tensor)
        _demand(rank != self.get_rank(), "recv", "Cannot recv from self")
        return self._run(lambda: self._backend.recv(as_bytes(tensor), rank), async_op, timeout)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: SupportsIndex,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law, in place on ``root``: ``tensor == op(op(tensor of rank 0, tensor of rank 1), …)``."""
        rank = self._rank("root", root)
        self._check("reduce", tensor)
        _check_op("reduce", op)
        return self._run(lambda: self._backend.reduce(tensor.detach().reshape(-1), rank, op), async_op, timeout)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``output == op(op(input_list[rank] of rank 0, input_list[rank] of rank 1), …)``; the sizes may differ.

        Args:
            output: As many elements as ``input_list[rank]`` of every rank.
            input_list: One tensor per rank.
            op: The reduction.
        """
        name = "reduce_scatter"
        self._one_per_rank(name, "input_list", input_list)
        self._same_dtype(name, output, *input_list)
        _check_op(name, op)
        _demand(input_list[self.get_rank()].numel() == output.numel(), name, "own entry must fit the output")
        inputs = [tensor.detach().reshape(-1) for tensor in input_list]
        return self._run(
            lambda: self._backend.reduce_scatter(output.detach().reshape(-1), inputs, op), async_op, timeout
        )

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Law: ``reduce_scatter`` of the W equal parts of ``input``.

        Args:
            output: As many elements on every rank.
            input: ``W * output.numel()`` elements of the same dtype.
            op: The reduction.
        """
        name = "reduce_scatter_single"
        self._check(name, input)
        _demand(input.numel() == output.numel() * self.get_size(), name, "input must have comm_size * output elements")
        parts = input.detach().reshape(self.get_size(), -1).unbind()
        return self.reduce_scatter(output, parts, op, async_op, hints, timeout)

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
            output_tensor: What this rank gets.
            input_tensor_list: On ``root`` one tensor per rank; not looked at elsewhere.
            root: The sending rank.
        """
        rank = self._rank("root", root)
        inputs = input_tensor_list if rank == self.get_rank() else []
        if rank == self.get_rank():
            self._one_per_rank("scatter", "input_tensor_list", inputs)
            _demand(inputs[rank].numel() == output_tensor.numel(), "scatter", "own entry must fit the output")
        self._same_dtype("scatter", output_tensor, *inputs)
        return self._run(
            lambda: self._backend.scatter(as_bytes(output_tensor), _flats(inputs), rank), async_op, timeout
        )

    def send(
        self,
        tensor: torch.Tensor,
        dst: SupportsIndex,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Give ``dst`` the tensor; see ``recv``. May wait until ``dst`` has begun to receive.

        Args:
            tensor: Not to be changed before the end.
            dst: Another rank.
        """
        rank = self._rank("dst", dst)
        self._check("send", tensor)
        _demand(rank != self.get_rank(), "send", "Cannot send to self")
        return self._run(lambda: self._backend.send(as_bytes(tensor), rank), async_op, timeout)

    def finalize(self) -> None:
        """Give back what the communicator itself has created; a process group that it was put on stays."""
        self._backend.close()

    def _run(self, begin: Callable[[], TorchWork], async_op: bool, timeout: timedelta | None) -> TorchWork:
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a timedelta, got {timeout!r}")
        work = begin().within(timeout)
        if not async_op:
            work.wait()
        return work

    def _rank(self, what: str, rank: SupportsIndex) -> int:
        value, size = operator.index(rank), self.get_size()
        if not 0 <= value < size:
            raise RuntimeError(f"{what} must be in range [0, {size}), but got {value}")
        return value

    def _check(self, name: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}() takes tensors, got {type(tensor).__name__}")
            _demand(tensor.is_contiguous(), name, "tensor must be contiguous")
            if tensor.device.type != self.get_device().type:
                raise RuntimeError(f"{name}: tensor is on {tensor.device}, the communicator on {self.get_device()}")

    def _same_dtype(self, name: str, *tensors: torch.Tensor) -> None:
        self._check(name, *tensors)
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise RuntimeError(f"{name}: all tensors must have one dtype, got {sorted(map(str, dtypes))}")

    def _check_rows(self, name: str, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._one_per_rank(name, "tensor_list", tensor_list)
        self._same_dtype(name, *tensor_list, tensor)
        _demand(tensor_list[self.get_rank()].numel() == tensor.numel(), name, "own entry must fit the input")

    def _one_per_rank(self, name: str, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.get_size():
            raise RuntimeError(f"{name}: {what} size must equal comm_size")


def _check_op(name: str, op: object) -> None:
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{name}(): op must be a ReduceOp, got {op!r}")


def _demand(condition: bool, name: str, text: str) -> None:
    if not condition:
        raise RuntimeError(f"{name}: {text}")


def _flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [as_bytes(tensor) for tensor in tensors]
