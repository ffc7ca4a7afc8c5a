"""An exchange of JSON in addition to a call, made only if any rank has something to report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from easydist.groups.communicators import Communicators


def _as_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode(errors="backslashreplace") if value else b""


def nbytes_of(value: Mapping[str, Any]) -> int:
    """Return the size of a rank's report in ``told``; 0 if it is empty."""
    return len(_as_bytes(value))


def told(comms: Communicators, nbytes: Sequence[int], mine: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the ranks' reports, by rank, without the empty ones.

    Args:
        comms: The group.
        nbytes: The result of ``nbytes_of`` on each rank.
        mine: This rank's report, to be sent as JSON.

    Cost: one all-gather, if any report is not empty.
    """
    if not any(nbytes):
        return {}
    every = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in nbytes]
    data = torch.frombuffer(bytearray(_as_bytes(mine)), dtype=torch.uint8) if mine else every[comms.rank]
    comms.control.all_gather_v(every, data, async_op=False)
    return {rank: json.loads(bytes(one.numpy())) for rank, one in enumerate(every) if one.numel()}
