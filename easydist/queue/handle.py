"""What a reader has to know to find its writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Handle:
    """What ``MessageQueue.create_from_handle`` takes; to be pickled, or sent as ``plain()``.

    It holds the key of the queue: whoever has it can become a reader. A handle serves each rank once.

    Attributes:
        local_reader_ranks: The readers that are expected to share memory with the writer.
        n_reader: How many readers there are in all.
        ring: Name and shape of the shared memory; None where there is none.
        address: Host and port for readers that do not share it; None where there are none.
        key: By which such readers and the writer know each other.
        writer: What the writer tells of its process.
        weights_only: Whether readers decode with the restricted decoder.
    """

    local_reader_ranks: tuple[int, ...]
    n_reader: int
    ring: tuple[str, tuple[int, int, int]] | None
    address: tuple[str, int] | None
    key: bytes = field(repr=False)
    writer: bytes = field(repr=False)
    weights_only: bool

    def plain(self) -> tuple[Any, ...]:
        """The same as plain data, which every decoder takes: ``Handle(*plain)`` is the handle again."""
        return tuple(vars(self).values())
