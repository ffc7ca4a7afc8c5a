"""Headers that go before an operation over gloo, with ``hints={"check": "1"}``: the ranks compare its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from easydist.comms.failures import CommDisagreement
from easydist.shm.calls import ABSENT, EQUAL, Call, Dispute
from easydist.transport.backends.c10d import Gloo
from easydist.transport.described import GOES_ON, OWN, PAIRS, Described, text
from easydist.transport.work import wait


def is_asked(hints: Mapping[str, str] | None) -> bool | None:
    """Return what the hints say about headers; None if they say nothing.

    Example:
        >>> is_asked({"check": "1"}), is_asked({"check": "0"}), is_asked({"other": "1"}), is_asked(None)
        (True, False, None, None)
    """
    return hints["check"] == "1" if hints and "check" in hints else None


def compare(backend: Gloo, name: str, call: Described, peer: int | None, limit: timedelta | None, who: str) -> None:
    """Exchange the description of an operation with the ranks that take part in it, and wait for theirs.

    Args:
        backend: The backend.
        name: The name of the operation.
        call: Its description.
        peer: The other rank, if there is only one.
        limit: The time limit of the wait.
        who: The communicator.

    Raises:
        CommDisagreement: They differ; all ranks raise the same error before any data moves.
    """
    mine = torch.tensor(call, dtype=torch.int64)
    if name in PAIRS and peer is not None:
        calls = [Call(ABSENT, 0)] * backend.size
        theirs = torch.empty_like(mine)
        wait(backend.batch([(mine, peer)], [(theirs, peer)]), limit)
        calls[backend.rank], calls[peer] = Call(*call), Call(*theirs.tolist())
        pair = [calls[backend.rank], calls[peer]]
    else:
        backend.call = call
        backend.announce()
        backend.call = OWN
        rows = mine.new_empty(backend.size, 2)
        wait(backend.all_gather_single(rows.view(-1), mine), limit)
        calls = pair = [Call(*row) for row in rows.tolist()]
    if _differ(pair, name in PAIRS):
        raise CommDisagreement(text(Dispute(calls, None), f"{who} {GOES_ON}"))


def _differ(calls: Sequence[Call], is_message: bool) -> bool:
    if is_message:  # one sends what the other one receives
        names = {call.code & _NAME for call in calls}
        return len(names) < len(calls) or len({(call.code & _DTYPE, call.numel) for call in calls}) > 1
    return len({(call.code, call.numel * bool(call.code & EQUAL)) for call in calls}) > 1


_NAME, _DTYPE = 0x3F, 0x3FC0
"""The bits of a code that stand for the name of the operation, and for the dtype."""
