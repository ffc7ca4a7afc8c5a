"""The description of one rank's call for the other ranks."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from easydist.agreement.disagreement import SAME
from easydist.data.arithmetic import fingerprint
from easydist.data.leaves import Layout, LeafType, Leaves

PlainValue = tuple[str, str, None]
"""A value that is not a leaf: path, text, no shape."""


@dataclass(slots=True)
class Call:
    """A verb's prepared call on one rank.

    Attributes:
        arguments: The arguments that have to be the same on every rank, by name.
        leaves: The data; None if there is none, or if it is not a tree of tensors.
        dim: The dimension along which sizes may differ between ranks; None if there is none.
        any_size: True if the sizes along all other dimensions may differ, too.
        nbytes: The number of bytes that this rank will send, if the others have to know it.
        payload: The data that this rank will send, ``nbytes`` in total; it goes with the header if it is small.
        text: The same as bytes, in place of ``payload``; at most ``frames.room``, so that it goes with the header.
        absent: True if this rank has no data of its own and takes the others'.
        aliases: The leaves that share memory, if that must not differ between ranks.
        devices: For each leaf the type of the devices between which it travels; empty if all travel between CPUs.
        advice: The advice if shapes differ; ``{dim}`` stands for the first dimension in which they differ.
        numbers: 64-bit numbers for the other ranks, equally many on each unless the first is the count of the others;
            they travel with the header.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    leaves: Leaves | None = None
    dim: int | None = None
    nbytes: int = 0
    payload: Sequence[torch.Tensor] = ()
    text: bytes = b""
    absent: bool = False
    aliases: list[int] | None = None
    advice: str = SAME
    devices: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    any_size: bool = False

    @property
    def tree(self) -> Leaves:
        """The leaves of a verb that has leaves."""
        assert self.leaves is not None
        return self.leaves

    def title(self, operation: str) -> str:
        """Return the call as source code: ``gather(dst=None, dim=0)``."""
        return f"{operation}({', '.join([f'{name}={value!r}' for name, value in self.arguments.items()])})"

    def types(self, fixed: bool = False) -> list[LeafType | PlainValue]:
        """Return leaves as (path, dtype, shape), -1 for free sizes if ``fixed``; plain values as (path, text, None)."""
        if self.leaves is None:
            return []
        plain = [(path, shortened(text), None) for path, text in self.leaves.plain]
        leaves = self.leaves.layout.types(self.dim if fixed else None, fixed and self.any_size)
        if self.devices:
            leaves = [(p, f"{d} on {there}", s) for (p, d, s), there in zip(leaves, self.devices, strict=True)]
        return [*leaves, *plain]

    def structure(self) -> int:
        """Return the fingerprint of the properties that have to be equal on all ranks."""
        if self.leaves is None:
            return 0
        layout = self.leaves.layout
        structure = layout.fingerprint if self.dim is None else layout.free(self.dim)[1]
        if self.any_size:
            structure = layout.of_any_size
        return self._whole(structure) if self.leaves.plain or self.devices else structure

    def variations(self) -> int:
        """Return the fingerprint of the properties that may differ: sizes, and shared objects or memory."""
        if self.leaves is None:
            return 0
        sizes, ties = self.leaves.layout.fingerprint, self.leaves.ties
        if self.leaves.plain or self.devices:
            sizes = self._whole(sizes)
        return sizes if ties is None and self.aliases is None else fingerprint((sizes, ties, self.aliases))

    def _whole(self, layout: int) -> int:
        """Return the fingerprint of layout, plain values and devices."""
        return fingerprint((layout, self.tree.plain, self.devices))

    def sizes(self) -> bytes:
        """Return the size of each leaf along ``dim``, as 64-bit numbers."""
        return b"" if self.leaves is None or self.dim is None else _sizes(self.leaves.layout, self.dim)


_LONGEST = 100


def shortened(text: str) -> str:
    """Return a text of at most 100 characters, or its beginning with its length and a fingerprint."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters, {fingerprint(text):x})"


@functools.lru_cache(maxsize=256)
def _sizes(layout: Layout, dim: int) -> bytes:
    sizes = [shape[dim] for shape, dim in zip(layout.shapes, layout.free(dim)[0], strict=True)]
    return struct.pack(f"<{len(sizes)}q", *sizes)
