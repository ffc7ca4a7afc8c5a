"""Reports: values that JSON can hold, exchanged inside a call by all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from easydist.groups.communicators import Communicators

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""The bytes of an empty report."""


def encoded(report: Any) -> torch.Tensor:
    """Return a report as bytes, so that its length can travel with a call; no bytes if it is empty."""
    return _as_json(report) if report else NOTHING


def _as_json(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def exchange_reports(comms: Communicators, nbytes: Sequence[int], mine: torch.Tensor) -> dict[int, Any]:
    """Return the ranks' reports, by rank, without the empty ones.

    Args:
        comms: The group.
        nbytes: The bytes of each rank's report.
        mine: This rank's report, ``encoded``.

    Cost: one all-gather, if any report is not empty.
    """
    if not any(nbytes):
        return {}
    every = [mine]
    if comms.size > 1:
        every = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in nbytes]
        comms.control.all_gather_v(every, mine, async_op=False)
    return {rank: json.loads(bytes(one.numpy())) for rank, one in enumerate(every) if one.numel()}


def exchange_json(comms: Communicators, value: Any) -> list[Any]:
    """Return the values of all ranks, none of which knows the length of another one's.

    Cost: two exchanges on the CPU: of the lengths, and of the texts.
    """
    mine, nbytes = _as_json(value), torch.empty(comms.size, dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(nbytes, torch.tensor([mine.numel()], device="cpu"), async_op=False)
    return [*exchange_reports(comms, nbytes.tolist(), mine).values()]
