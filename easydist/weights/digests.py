"""Digests of the sent and the received bytes, entry by entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from easydist.agreement.disagreement import listed
from easydist.base.wording import needs
from easydist.groups.communicators import Communicators
from easydist.weights.schedule import Packet

_NBYTES = 16


class Digests:
    """XXH3 with 128 bits over the bytes of each entry, as each of its sources sends them.

    Raises:
        ImportError: xxhash is not installed.

    Source: https://xxhash.com
    """

    def __init__(self) -> None:
        try:
            from xxhash import xxh3_128
        except ImportError as error:
            raise ImportError(needs("verify=True", "xxhash", "weights")) from error
        self._new = xxh3_128
        self._digests: dict[tuple[int, int], Any] = {}

    def update(self, packet: Packet, buffer: torch.Tensor) -> None:
        """Add the bytes of a packet."""
        parts = buffer.cpu().split([part.nbytes for part in packet.parts])
        for part, piece in zip(packet.parts, parts, strict=True):
            self._digests.setdefault((packet.root, part.entry), self._new()).update(piece.numpy())

    def differing(self, comms: Communicators, packets: Sequence[Packet]) -> list[int]:
        """Return the entries whose bytes differ from those that their sources have sent.

        Cost: one broadcast of 16 bytes per entry from each source.
        """
        found: set[int] = set()
        for root in sorted({packet.root for packet in packets}):
            keys = sorted({(root, part.entry) for one in packets if one.root == root for part in one.parts})
            mine = b"".join(self._digests[key].digest() for key in keys)
            theirs = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            comms.control.broadcast(theirs, root, async_op=False)
            sent = bytes(theirs.numpy())
            rows = range(0, len(mine), _NBYTES)
            found |= {
                key[1] for key, at in zip(keys, rows, strict=True) if mine[at : at + _NBYTES] != sent[at : at + _NBYTES]
            }
        return sorted(found)


def damaged(operation: str, names: Mapping[int, Sequence[str]]) -> str:
    """Say that received bytes differ from the sent ones."""
    lines = [f"  {name}  on rank {rank}" for rank, found in names.items() for name in found]
    return "\n".join(
        [
            f"{operation}: {len(lines)} tensors arrived with bytes that differ from those sent",
            *listed(lines),
            "A source may have changed them in the meantime, or the connection is faulty. The targets have been "
            "overwritten.",
        ]
    )
