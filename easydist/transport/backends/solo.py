"""The backend of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from easydist.transport.backend import Backend
from easydist.transport.reduce_op import ReduceOp
from easydist.transport.work import TorchWork


class Solo(Backend):
    """The backend of a single process: every operation is a copy, or does nothing.

    Example:
        >>> from easydist.comms import Solo, TorchComm
        >>> TorchComm(Solo()).get_size()
        1

    Args:
        device: The device of the tensors; the CPU by default.
    """

    name = "solo"
    rank = 0
    size = 1
    moves_any_dtype = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor) -> TorchWork:
        output.copy_(data)
        return TorchWork()

    def all_gather_upto(self, rows: torch.Tensor, nbytes: int) -> TorchWork:
        return TorchWork()

    def all_gather_v(self, outputs: Sequence[torch.Tensor], data: torch.Tensor) -> TorchWork:
        return self.all_gather_single(outputs[0], data)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> TorchWork:
        return TorchWork()

    def all_to_all_v(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> TorchWork:
        return self.all_gather_single(outputs[0], inputs[0])

    def barrier(self) -> TorchWork:
        return TorchWork()

    def broadcast(self, tensor: torch.Tensor, root: int) -> TorchWork:
        return TorchWork()

    def gather(self, outputs: Sequence[torch.Tensor], data: torch.Tensor, root: int) -> TorchWork:
        return self.all_gather_single(outputs[0], data)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> TorchWork:
        return self.all_gather_single(output, inputs[0])

    def send(self, tensor: torch.Tensor, dst: int) -> NoReturn:
        raise RuntimeError("a world of one has no other rank to send to")

    def recv(self, tensor: torch.Tensor, src: int) -> NoReturn:
        raise RuntimeError("a world of one has no other rank to receive from")
