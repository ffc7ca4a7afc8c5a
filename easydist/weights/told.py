"""What ranks tell one another besides a call: JSON, where any of them has something to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from easydist.groups.communicators import Communicators


def _as_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode(errors="backslashreplace") if value else b""


def nbytes_of(value: Mapping[str, Any]) -> int:
    """How much a rank has to say in ``told``: nothing, where this is empty."""
    return len(_as_bytes(value))


def told(comms: Communicators, nbytes: Sequence[int], mine: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What the ranks say to each other, by rank, of those that say something.

    Args:
        comms: The group.
        nbytes: What ``nbytes_of`` gives on each rank.
        mine: What this rank says, as JSON.

    Cost: one all-gather, if any rank says something.
    """
    if not any(nbytes):
        return {}
    every = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in nbytes]
    data = torch.frombuffer(bytearray(_as_bytes(mine)), dtype=torch.uint8) if mine else every[comms.rank]
    comms.control.all_gather_v(every, data, async_op=False)
    return {rank: json.loads(bytes(one.numpy())) for rank, one in enumerate(every) if one.numel()}
