"""Entries that are handed over as they arrive, so that no rank holds all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from typing import Any

import torch

from easydist.weights.blocks import Block
from easydist.weights.manifest import Manifest
from easydist.weights.schedule import Packet
from easydist.weights.spans import new
from easydist.weights.target import Target, Wanted


class StreamTarget(Target):
    """The receiver's side of a call that hands over each entry once it is complete, and keeps nothing.

    Args:
        manifest: The arriving entries.

    Cost: the memory of the entries that are under way.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(None, manifest, Wanted())
        self._manifest = manifest
        self._missing = [box.numel for box in manifest.boxes]
        self._complete: deque[int] = deque()
        self._names: dict[str | None, list[str]] = {}
        for name, key in manifest.names.items():
            self._names.setdefault(key, []).append(name)

    def allocate(self) -> None:
        """Make sure that there are the devices for the entries, whose memory comes later."""
        for kind in {*self._manifest.kinds}:
            new((1,), torch.uint8, kind, False)

    def parts(self) -> dict[str, Block | None]:
        """Return nothing: all of every entry arrives."""
        return {}

    def buffer(self, packet: Packet, there: torch.device) -> torch.Tensor:
        """Return the memory in which a packet arrives, after allocating that of its entries."""
        for part in packet.parts:
            if not self.destinations.spans[part.entry]:
                self.make(part.entry, self._manifest.dtypes[part.entry])
        return super().buffer(packet, there)

    def take(self, packet: Packet, buffer: torch.Tensor) -> None:
        """Write a packet, and note which entries it completes."""
        super().take(packet, buffer)
        for part in packet.parts:
            self._missing[part.entry] -= part.block.numel
            if not self._missing[part.entry]:
                self._complete.append(part.entry)

    def complete(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that are complete, under all their names, and forget them."""
        while self._complete:
            yield from self._named(self._complete.popleft())

    def rest(self, only: Container[str] | None) -> Iterator[tuple[str, Any]]:
        """Yield the tensors without elements, and the entries that are not tensors."""
        for i, entry in enumerate(self._manifest.entries):
            if not self._manifest.boxes[i].numel and (only is None or entry.name in only):
                self.make(i, entry.dtype)
                yield from self._named(i)
        yield from self.extra().items()

    def _named(self, i: int) -> Iterator[tuple[str, Any]]:
        names = self._names.get(self._manifest.entries[i].name)
        if names is None:  # a tensor inside of an entry, which needs it at the end
            return
        (span,) = self.destinations.spans[i]
        self.destinations.spans[i] = []
        for name in names:
            yield name, span.tensor
