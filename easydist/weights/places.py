"""The targets of an entry's values: a tensor of the caller's, a shard of one, or new memory."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from easydist import memory
from easydist.data import packing
from easydist.typing import Device
from easydist.weights.blocks import Block, common, whole
from easydist.weights.schedule import Message, Part
from easydist.weights.source import box_of, local


class Place(NamedTuple):
    """A tensor to write, and the part of the entry that it holds.

    Attributes:
        tensor: The memory.
        box: The block of the entry that it holds.
        is_plain: True if its bytes are those of the block in order, on the CPU.
    """

    tensor: torch.Tensor
    box: Block
    is_plain: bool

    def direct(self, part: Part, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return the memory of a part as bytes; None if its strides, dtype or device do not match the message."""
        if self.tensor.dtype != dtype or not _is_on(self.tensor.device, device) or part.block.numel == 0:
            return None
        if common(part.block, self.box) != part.block:
            return None
        view = part.block.within(self.box).of(self.tensor)
        is_plain = view.is_contiguous() and not (view.is_conj() or view.is_neg())
        return packing.as_bytes(view) if is_plain else None

    def view(self, part: Part, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the memory to write and the part of ``values`` for it; None if they have nothing in common."""
        if part.block == self.box:
            return self.tensor, values
        if (block := common(part.block, self.box)) is None:
            return None
        return block.within(self.box).of(self.tensor), block.within(part.block).of(values)


def _is_on(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and device.index in (None, place.index)


def place_of(value: torch.Tensor) -> Place:
    """Return the place for a tensor or ``DTensor`` of the caller's."""
    tensor = local(value).detach()
    return place_at(tensor, whole(tensor.shape) if tensor.shape == value.shape else box_of(value))


def place_at(tensor: torch.Tensor, box: Block) -> Place:
    """Return the place for a block that a tensor holds."""
    return Place(tensor, box, tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()))


def new(shape: tuple[int, ...], dtype: torch.dtype, device: Device, pin: bool) -> torch.Tensor:
    """Allocate memory, pinned if requested and if there is an accelerator that benefits."""
    if pin and torch.device(device).type == "cpu" and torch.accelerator.is_available():
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    return memory.empty(shape, dtype, device)


def unpacked(message: Message, dtypes: list[torch.dtype], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a message, as views of its buffer."""
    starts = itertools.accumulate((part.nbytes for part in message.parts), initial=0)
    return [part.of(buffer, start, dtypes[part.entry]) for part, start in zip(message.parts, starts, strict=False)]
