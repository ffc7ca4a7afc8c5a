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
    """XXH3 with 128 bits over the bytes of each entry, as each of its sources sends them to the same receivers.

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
        self._digests: dict[tuple[int, tuple[int, ...], int], Any] = {}

    def update(self, packet: Packet, buffer: torch.Tensor) -> None:
        """Add the bytes of a packet that this rank sends or receives."""
        parts = buffer.cpu().split([part.nbytes for part in packet.parts])
        for part, piece in zip(packet.parts, parts, strict=True):
            self._digests.setdefault((packet.root, packet.ranks, part.entry), self._new()).update(piece.numpy())

    def differing(self, comms: Communicators, packets: Sequence[Packet]) -> list[int]:
        """Return the entries whose bytes differ from those that their sources have sent.

        Cost: one broadcast from each source, of 16 bytes for each entry and each of the groups of ranks that receive
        parts of it together.
        """
        found: set[int] = set()
        every = dict.fromkeys((one.root, one.ranks, part.entry) for one in packets for part in one.parts)
        for root in sorted({key[0] for key in every}):
            keys = [key for key in every if key[0] == root]
            mine = [self._digests[key].digest() if key in self._digests else bytes(_NBYTES) for key in keys]
            theirs = torch.frombuffer(bytearray(b"".join(mine)), dtype=torch.uint8)
            comms.control.broadcast(theirs, root, async_op=False)
            sent = [bytes(one.numpy()) for one in theirs.split(_NBYTES)]
            pairs = zip(keys, mine, sent, strict=True)
            found |= {key[2] for key, one, other in pairs if one != other and key in self._digests}
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
