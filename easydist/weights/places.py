"""Where the values of an entry arrive: in a tensor of the caller's, in a shard of one, or in new memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easydist import memory
from easydist.data import packing
from easydist.typing import Device
from easydist.weights.blocks import Block, common, whole
from easydist.weights.schedule import Message, Part
from easydist.weights.source import box_of, local


class Place(NamedTuple):
    """A tensor to be written, and which part of the entry it holds."""

    tensor: torch.Tensor
    box: Block

    def direct(self, part: Part, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """The place of a part itself, as bytes; None where it has other strides, another dtype or device."""
        if (self.tensor.dtype, self.tensor.device.type) != (dtype, device.type) or part.block.numel == 0:
            return None
        if common(part.block, self.box) != part.block:
            return None
        view = part.block.within(self.box).of(self.tensor)
        is_plain = view.is_contiguous() and not (view.is_conj() or view.is_neg())
        return packing.as_bytes(view) if is_plain else None

    def view(self, part: Part, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is to be written, and the part of ``values`` that belongs there; None where there is nothing."""
        if part.block == self.box:
            return self.tensor, values
        if (block := common(part.block, self.box)) is None:
            return None
        return block.within(self.box).of(self.tensor), block.within(part.block).of(values)


def place_of(value: torch.Tensor) -> Place:
    """The place that a tensor or ``DTensor`` of the caller's is."""
    tensor = local(value).detach()
    return Place(tensor, whole(tensor.shape) if tensor.shape == value.shape else box_of(value))


def new(shape: tuple[int, ...], dtype: torch.dtype, device: Device, pin: bool) -> Place:
    """New memory; pinned where that is wanted and there is a device that gains by it."""
    if pin and torch.device(device).type == "cpu" and torch.accelerator.is_available():
        return Place(torch.empty(shape, dtype=dtype, pin_memory=True), whole(shape))
    return Place(memory.empty(shape, dtype, device), whole(shape))


def unpacked(message: Message, dtypes: list[torch.dtype], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a message, as views of its buffer."""
    pieces = buffer.split([part.nbytes for part in message.parts])
    return [
        piece.view(dtypes[part.entry]).view(part.block.shape) for part, piece in zip(message.parts, pieces, strict=True)
    ]
