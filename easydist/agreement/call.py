"""What one rank is about to do, as the other ranks have to know it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from easydist.agreement.disagreement import SAME
from easydist.data.leaves import Layout, LeafType, Leaves
from easydist.data.plan import fingerprint

PlainValue = tuple[str, str, None]
"""What is no leaf: path, text, no shape."""


@dataclass(slots=True)
class Call:
    """A verb's call on one rank, made ready.

    Attributes:
        arguments: Those that every rank has to give alike, by name.
        leaves: The data; None where there is none, or where it is no tree of tensors.
        dim: The dimension whose size may differ between ranks; None where there is no such dimension.
        nbytes: How much this rank will send, where the others have to know.
        payload: What this rank will send, ``nbytes`` in all; it travels with the header if it is small.
        absent: This rank has no data of its own and takes what comes.
        aliases: Which leaves are the same memory, where that must not differ between ranks.
        advice: What to do where shapes differ; ``{dim}`` stands for the first dimension in which they do.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    leaves: Leaves | None = None
    dim: int | None = None
    nbytes: int = 0
    payload: Sequence[torch.Tensor] = ()
    absent: bool = False
    aliases: list[int] | None = None
    advice: str = SAME

    @property
    def tree(self) -> Leaves:
        """The data of a verb that has leaves."""
        assert self.leaves is not None
        return self.leaves

    def title(self, operation: str) -> str:
        """The call as it would be written: ``gather(dst=None, dim=0)``."""
        return f"{operation}({', '.join([f'{name}={value!r}' for name, value in self.arguments.items()])})"

    def types(self, dim: int | None = None) -> list[LeafType | PlainValue]:
        """The leaves as (path, dtype, shape), -1 for the size along ``dim``; plain values as (path, text, None)."""
        if self.leaves is None:
            return []
        plain = [(path, _shortened(text), None) for path, text in self.leaves.plain]
        return [*self.leaves.layout.types(dim), *plain]

    def structure(self) -> int:
        """The fingerprint of what has to be equal on all ranks."""
        if self.leaves is None:
            return 0
        layout, plain = self.leaves.layout, self.leaves.plain
        structure = layout.fingerprint if self.dim is None else layout.free(self.dim)[1]
        return fingerprint((structure, plain)) if plain else structure

    def variations(self) -> int:
        """The fingerprint of what may differ: all sizes, which leaves are the same object or the same memory."""
        if self.leaves is None:
            return 0
        layout, plain, ties = self.leaves.layout, self.leaves.plain, self.leaves.ties
        sizes = fingerprint((layout.fingerprint, plain)) if plain else layout.fingerprint
        return sizes if ties is None and self.aliases is None else fingerprint((sizes, ties, self.aliases))

    def sizes(self) -> bytes:
        """The size of each leaf along the free dimension, as 64-bit numbers."""
        return b"" if self.leaves is None or self.dim is None else _sizes(self.leaves.layout, self.dim)


_LONGEST = 100


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters, {fingerprint(text):x})"


@functools.lru_cache(maxsize=256)
def _sizes(layout: Layout, dim: int) -> bytes:
    sizes = [shape[dim] for shape, dim in zip(layout.shapes, layout.free(dim)[0], strict=True)]
    return struct.pack(f"<{len(sizes)}q", *sizes)
