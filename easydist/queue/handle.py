"""The facts that a reader needs to find its writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Handle:
    """The argument of ``MessageQueue.create_from_handle``, to be pickled, or sent as ``plain()``.

    It contains the key of the queue: any process that has it can become a reader. A handle serves each rank once.

    Attributes:
        local_reader_ranks: The readers that are expected to share memory with the writer.
        n_reader: The number of all readers.
        ring: The name and shape of the shared memory; None if there is none.
        address: The host and port for readers that do not share memory; None if there are none.
        key: The key with which such readers and the writer authenticate each other.
        writer: The record of the writer's process.
        weights_only: True if readers decode with the restricted decoder.
    """

    local_reader_ranks: tuple[int, ...]
    n_reader: int
    ring: tuple[str, tuple[int, int, int]] | None
    address: tuple[str, int] | None
    key: bytes = field(repr=False)
    writer: bytes = field(repr=False)
    weights_only: bool

    def plain(self) -> tuple[Any, ...]:
        """Return the handle as plain data, which every decoder accepts. ``Handle(*plain)`` restores it."""
        return tuple(vars(self).values())
