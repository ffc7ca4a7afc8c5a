"""Conversion of tensors with any strides to flat memory and back; tensors that are not contiguous are copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from easydist.base.torch_private import is_zerotensor
from easydist.data.backing import backed, writable
from easydist.data.leaves import overlaps
from easydist.transport.work import Pending, TorchWork


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in one dimension; a contiguous tensor keeps its own memory.

    Example:
        >>> flat(torch.tensor([[1, 2], [3, 4]]).t())
        tensor([1, 3, 2, 4])
    """
    if is_flat(tensor):
        return tensor  # the rest of this function costs two microseconds
    if type(tensor) is not torch.Tensor or not is_direct(tensor) or is_zerotensor(tensor):
        tensor = backed(tensor).contiguous()
    # A single element may have any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_flat(tensor: torch.Tensor) -> bool:
    """True if the tensor is its own flat memory."""
    return tensor.stride() == (1,) and not (tensor.requires_grad or tensor.is_complex() or tensor.is_neg())


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

    def deliver(self, work: TorchWork) -> TorchWork:
        """Let a work copy the values into the outputs at its end, and return it."""
        return work.followed_by(self.copy) if self.copies else work

    def copy(self) -> Sequence[Pending]:
        """Copy the values into the outputs."""
        for tensor, memory in self.copies:
            writable(tensor.detach()).copy_(memory.view(tensor.shape))
        return ()


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Check that no two elements of an output share memory.

    Raises:
        RuntimeError: Some do: the tensor is expanded, for instance.
        TypeError: It is a ZeroTensor.
    """
    if is_zerotensor(tensor):
        raise TypeError(f"{name}: the zeros of a ZeroTensor are not in memory: pass a clone")
    if not tensor.is_contiguous() and overlaps(tensor):
        raise RuntimeError(
            f"{name}: Tensor must be contiguous or strided; elements of this one share memory: pass a clone"
        )
