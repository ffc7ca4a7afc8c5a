"""Moving the data of tensor dicts, and the error text if ``into=`` differs from the sent tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from easydist.groups.communicators import Communicators
from easydist.messages.pair import Buffers
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork

_SHOWN = 10


def as_bytes(text: str) -> torch.Tensor:
    """Return a text as a uint8 tensor."""
    return torch.frombuffer(bytearray(text.encode(errors="backslashreplace")), dtype=torch.uint8)


def move(
    comms: Communicators,
    buffers: Buffers,
    choose: Callable[[int], Collectives],
    post: Callable[[Collectives, torch.Tensor], TorchWork],
) -> None:
    """Exchange the data; ``choose`` returns the communicator for a number of bytes on the CPU."""
    carried = [(comms.data(torch.device(kind)), buffer) for kind, buffer in buffers]
    cpu = choose(sum(buffer.numel() for comm, buffer in carried if comm is comms.control))
    works = [post(cpu if comm is comms.control else comm, buffer) for comm, buffer in carried]
    for work in works:
        work.wait()


def disagreement(operation: str, src: int, misfits: dict[int, dict[str, Any]]) -> str:
    """Return the text about differing leaves, one line each, with the leaf on the source and on the differing ranks."""
    lines: dict[str, str] = {}
    for rank, misfit in misfits.items():
        for path, theirs, mine in misfit["rows"]:
            start = lines.get(path, f"  {path or 'the value'}  rank {src}: {theirs}")
            lines[path] = f"{start}   into= of rank {rank}: {mine}"
    total = max(misfit["of"] for misfit in misfits.values())
    shown = [lines[path] for path in sorted(lines)[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"  … and {len(lines) - _SHOWN} more")
    advice = f"Pass into= the structure, dtypes and shapes that rank {src} sends, or leave it out."
    return "\n".join([f"{operation}: ranks disagree on {len(lines)} of {total} leaves", *shown, advice])
