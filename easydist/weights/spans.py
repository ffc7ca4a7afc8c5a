"""The tensors that hold blocks of entries, and the memory into which entries arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from easydist import memory
from easydist.base.torch_private import foreach_copy
from easydist.data import packing
from easydist.data.leaves import Leaves
from easydist.typing import Device
from easydist.weights.blocks import Block, common, whole
from easydist.weights.schedule import BlockPart, Packet
from easydist.weights.shards import LocalShard, box_of, local, memory_of
from easydist.weights.source import PINS

_CPU = torch.device("cpu")


class Span(NamedTuple):
    """A tensor of this rank, and the block of an entry that it holds.

    Attributes:
        tensor: The memory.
        box: The block of the entry that it holds.
        is_plain: True if its bytes are those of the block in order, on the CPU.
    """

    tensor: torch.Tensor
    box: Block
    is_plain: bool

    def direct(self, part: BlockPart, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return the memory of a part as bytes; None if its strides, dtype or device do not match the packet."""
        if self.tensor.dtype != dtype or not _is_on(self.tensor.device, device) or part.block.numel == 0:
            return None
        if common(part.block, self.box) != part.block:
            return None
        view = part.block.within(self.box).of(self.tensor)
        is_plain = view.is_contiguous() and not (view.is_conj() or view.is_neg())
        return packing.as_bytes(view) if is_plain else None

    def view(self, part: BlockPart, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the memory to write and the part of ``values`` for it; None if they have nothing in common."""
        if part.block == self.box:
            return self.tensor, values
        if (block := common(part.block, self.box)) is None:
            return None
        return block.within(self.box).of(self.tensor), block.within(part.block).of(values)


def _is_on(there: torch.device, device: torch.device) -> bool:
    return there.type == device.type and device.index in (None, there.index)


def span_of(value: torch.Tensor | LocalShard, name: str) -> Span:
    """Return the span of a tensor, ``DTensor`` or local shard of the caller's, an entry of this name."""
    tensor = local(value).detach()
    is_whole = tensor.shape == value.shape and not isinstance(value, LocalShard)
    return span_at(tensor, whole(tensor.shape) if is_whole else box_of(value, name))


def check_writable(spans: Mapping[str, Span]) -> None:
    """Check that the tensors of these entries can be written in place, none through another one.

    Raises:
        ValueError: One cannot, or two share a part of their memory, or all of it for different blocks.
    """
    first: dict[Any, tuple[Block, str]] = {}
    for name, span in spans.items():
        box, other = first.setdefault(memory_of(span.tensor), (span.box, name))
        if box != span.box:
            raise ValueError(f"[{other!r}] and [{name!r}] share memory, but are different parts of a tensor")
    Leaves({name: span.tensor for name, span in spans.items()}).check_writable()


def span_at(tensor: torch.Tensor, box: Block) -> Span:
    """Return the span of a tensor that holds a block."""
    return Span(tensor, box, tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()))


def new(shape: tuple[int, ...], dtype: torch.dtype, device: Device, pin: bool) -> torch.Tensor:
    """Allocate memory, pinned if requested and if there is an accelerator that benefits."""
    if pin and torch.device(device).type == "cpu" and torch.accelerator.is_available():
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    return memory.empty(shape, dtype, device)


class Destinations:
    """The memory into which packets arrive.

    Args:
        dtypes: The dtype of each entry on the wire.
        is_pinned: True if new memory is pinned, so that copies from a GPU into it do not block the next packet.

    Attributes:
        spans: The spans into which each entry is written.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], is_pinned: bool = False) -> None:
        self.spans: list[list[Span]] = [[] for _ in dtypes]
        self._dtypes, self._is_pinned = dtypes, is_pinned
        self._behind: set[torch.device] = set()

    def buffer(self, packet: Packet, there: torch.device) -> torch.Tensor:
        """Return the memory for a packet: where it belongs if possible, otherwise a temporary buffer."""
        if len(packet.parts) == 1:
            (part,) = packet.parts
            for span in self.spans[part.entry]:
                if (direct := span.direct(part, self._dtypes[part.entry], there)) is not None:
                    return direct
        return new((packet.nbytes,), torch.uint8, there, pin=self._accelerator(packet) is not None)

    def _accelerator(self, packet: Packet) -> torch.device | None:
        """Return the GPU on which all of a packet belongs; None if there is none."""
        if not torch.accelerator.is_available():
            return None
        first, *more = {span.tensor.device for part in packet.parts for span in self.spans[part.entry]} or {_CPU}
        return first if not more and first.type in PINS else None

    def take(self, packet: Packet, buffer: torch.Tensor) -> None:
        """Write a packet that did not arrive where it belongs."""
        if buffer.is_cpu and (device := self._accelerator(packet)) is not None:  # in one copy, and cast there
            buffer = buffer.to(device, non_blocking=True)
            self._behind.add(device)
        start, at = 0, buffer.data_ptr() if buffer.is_cpu else 0
        targets, values = [], []
        for part in packet.parts:
            dtype = self._dtypes[part.entry]
            for span in self.spans[part.entry]:
                if at and span.is_plain and span.tensor.dtype == dtype and span.box == part.block:
                    if (there := span.tensor.data_ptr()) != at + start:
                        memory.copy(there, at + start, part.nbytes)
                    continue
                pair = span.view(part, part.of(buffer, start, dtype))
                if pair is not None and (pair[0].is_neg() or pair[0].is_conj()):  # _foreach_copy_ takes neither
                    pair[0].copy_(pair[1])
                elif pair is not None and pair[0].data_ptr() != pair[1].data_ptr():
                    targets.append(pair[0])
                    values.append(pair[1])
            start += part.nbytes
        if targets:
            is_behind = self._is_pinned and not buffer.is_cpu
            foreach_copy(targets, values, non_blocking=is_behind)
            self._behind |= {buffer.device} if is_behind else set()

    def synchronize(self) -> None:
        """Wait for the copies from or to GPUs that may still run."""
        for device in self._behind:
            torch.accelerator.current_stream(device).synchronize()
