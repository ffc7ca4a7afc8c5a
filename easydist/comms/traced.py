"""Communicator operations as calls that ``trace()`` records."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from easydist.agreement.notes import Notes, listeners, note_data
from easydist.groups.meeting import site
from easydist.transport.checked import Checked

_NOTHING = nullcontext()


def traced(comm: Checked, name: str, number: int, outputs: Sequence[torch.Tensor]) -> Any:
    """Return a context manager for an operation, which does nothing unless a trace is running."""
    return _Traced(comm, name, number, outputs) if listeners else _NOTHING


class _Traced:
    """The trace notes of one operation, as for a call of a verb."""

    def __init__(self, comm: Checked, name: str, number: int, outputs: Sequence[torch.Tensor]) -> None:
        monitor = SimpleNamespace(number=number + 1)
        who = {"name": comm.get_name(), "rank": comm.get_rank(), "size": comm.get_size()}
        comms: Any = SimpleNamespace(**who, monitor=monitor)
        self._comms = comms
        self._notes = Notes(comms, name, None, site())
        note_data(sum(tensor.nbytes for tensor in outputs))

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._notes.tell(self._comms, error)
