"""One exchange of headers before the data: do all ranks make the same call, and is every rank well?

Each rank sends five 64-bit numbers: its status; fingerprints of its call (operation and arguments), of the structure
that has to be equal (paths, dtypes, shapes without their free dimension) and of what may differ (full shapes, which
leaves are the same object); the bytes that it is going to send. Where fingerprints differ that must not, or a rank
reports a fault, descriptions are exchanged, and every rank raises the same error before any data has moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from easydist.comms import Communicators
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.leaves import Leaves, Row
from easydist.plan import fingerprint

_WELL, _ABSENT, _FAULT = range(3)
_SHOWN = 10
_SAME = "Pass the same structure, dtypes and shapes on every rank."


@dataclass(slots=True)
class Call:
    """What one rank is about to do.

    Attributes:
        arguments: Those that every rank has to give alike, by name.
        leaves: The data.
        dim: The dimension whose size may differ between ranks; None where there is no such dimension.
        nbytes: What this rank will send, where the others have to know.
        absent: This rank has no data of its own and takes what comes.
        advice: What to do where shapes differ; ``{dim}`` stands for the first dimension in which they do.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    leaves: Leaves | None = None
    dim: int | None = None
    nbytes: int = 0
    absent: bool = False
    advice: str = _SAME

    def title(self, operation: str) -> str:
        """The call as it would be written: ``gather(dst=None, dim=0)``."""
        return f"{operation}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def rows(self, dim: int | None = None) -> list[Row]:
        """The leaves as (path, dtype, shape), with -1 for the size along ``dim``."""
        return self.leaves.layout.rows(dim) if self.leaves else []

    def structure(self) -> int:
        """The fingerprint of what has to be equal on all ranks."""
        if self.leaves is None:
            return 0
        layout = self.leaves.layout
        return layout.fingerprint if self.dim is None else layout.free(self.dim)[1]

    def variations(self) -> int:
        """The fingerprint of what may differ: all sizes, which leaves are the same object."""
        if self.leaves is None:
            return 0
        layout, ties = self.leaves.layout, self.leaves.ties
        return layout.fingerprint if ties is None else fingerprint((layout.fingerprint, ties))


@dataclass(slots=True, frozen=True)
class Agreement:
    """What the ranks told each other.

    Attributes:
        nbytes: What each rank will send.
        uniform: All ranks that have data have the same shapes and the same leaves tied.
        absent: The ranks that have no data of their own.
    """

    nbytes: list[int]
    uniform: bool
    absent: list[int]


def agree(comms: Communicators, operation: str, prepare: Callable[[], Call]) -> tuple[Call, Agreement]:
    """Make this rank's call known to all ranks, learn theirs, and compare.

    Args:
        comms: The group.
        operation: The verb.
        prepare: Checks and describes this rank's call; what it raises reaches all ranks.

    Returns:
        This rank's call, and what the ranks told each other.

    Raises:
        DisagreementError: The calls do not match; the same text on every rank.
        RemoteError: ``prepare`` raised on some ranks; the same text on every rank. Where it raised the same error on
            every rank, that error itself.

    Cost: one all-gather of 40 bytes per rank.
    """
    if comms.size == 1:
        call = prepare()
        return call, Agreement([call.nbytes], True, [0] if call.absent else [])
    fault: Exception | None = None
    try:
        call = prepare()
        mine = _header(operation, call)
    except Exception as error:
        call, fault, mine = Call(), error, _Header(_FAULT, 0, 0, 0, 0)
    headers = _exchange_headers(comms, mine)
    present = [header for header in headers if header.status == _WELL]
    if (
        any(header.status == _FAULT for header in headers)
        or len({header.call for header in headers}) > 1
        or len({header.structure for header in present}) > 1
    ):
        _raise_together(comms, operation, call, fault)
    absent = [rank for rank, header in enumerate(headers) if header.status == _ABSENT]
    uniform = len({header.variations for header in present}) == 1
    return call, Agreement([header.nbytes for header in headers], uniform, absent)


def report(comms: Communicators, operation: str, fault: BaseException | None = None) -> None:
    """Meet all ranks in ``operation``, and tell them of a fault where there is one.

    Raises:
        RemoteError: A rank reported a fault.
        DisagreementError: A rank called something else.
    """
    if isinstance(fault, EasydistError) and fault.raised_in is comms:
        raise fault  # the others have it already

    def prepare() -> Call:
        if fault is not None:
            raise _Reported(_text(fault)) from fault
        return Call()

    agree(comms, operation, prepare)


class _Reported(Exception):
    """Carries the text of an exception that is not an ``Exception`` (SystemExit, KeyboardInterrupt) to all ranks."""


class _Header(NamedTuple):
    status: int
    call: int
    structure: int
    variations: int
    nbytes: int


def _header(operation: str, call: Call) -> _Header:
    status = _ABSENT if call.absent else _WELL
    return _Header(status, fingerprint(call.title(operation)), call.structure(), call.variations(), call.nbytes)


def _exchange_headers(comms: Communicators, mine: _Header) -> list[_Header]:
    output = torch.empty((comms.size, len(mine)), dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(output, torch.tensor(mine, device="cpu"), async_op=False)
    return [_Header(*row) for row in output.tolist()]


def _raise_together(comms: Communicators, operation: str, call: Call, fault: Exception | None) -> NoReturn:
    """Exchange the descriptions and raise the same error on every rank."""
    mine = {
        "fault": _text(fault) if fault else None,
        "title": "" if fault else call.title(operation),
        "operation": operation,
        "in_body": isinstance(fault, _Reported),
        "rows": call.rows(),
        "fixed": call.rows(call.dim),
        "absent": call.absent,
        "advice": call.advice,
    }
    every = _exchange_json(comms, mine)
    faults = {rank: one["fault"] for rank, one in enumerate(every) if one["fault"]}
    if fault is not None and len(faults) == comms.size and len(set(faults.values())) == 1:
        raise fault
    error: EasydistError
    if faults:
        error = RemoteError(_fault_text(every, faults))
    elif len({one["title"] for one in every}) > 1:
        error = DisagreementError(_calls_text(every))
    else:
        error = DisagreementError(_trees_text([(rank, one) for rank, one in enumerate(every) if not one["absent"]]))
    error.raised_in = comms
    raise error from fault


def _exchange_json(comms: Communicators, value: dict[str, Any]) -> list[dict[str, Any]]:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.empty(comms.size, dtype=torch.int64, device="cpu")
    comms.control.all_gather_single(sizes, torch.tensor([data.numel()], device="cpu"), async_op=False)
    outputs = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
    comms.control.all_gather_v(outputs, data, async_op=False)
    return [json.loads(bytes(output.numpy())) for output in outputs]


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # an error without a text must not keep this rank from the others
        text = ""
    if isinstance(error, _Reported):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _fault_text(every: list[dict[str, Any]], faults: dict[int, str]) -> str:
    first = every[min(faults)]
    ranks = f"{'rank' if len(faults) == 1 else 'ranks'} {', '.join(map(str, faults))}"
    lines = [f"  rank {rank}: {text}" for rank, text in faults.items()]
    if first["in_body"]:
        return "\n".join([f"{first['operation']}: the body raised on {ranks}", *lines])
    advice = "No data has moved; mend that rank, the group works on."
    return "\n".join([f"{first['operation']}: {ranks} failed before the exchange", *lines, advice])


def _calls_text(every: list[dict[str, Any]]) -> str:
    lines = [f"  rank {rank}: {one['title']}" for rank, one in enumerate(every)]
    advice = "Every rank of the group has to make the same calls in the same order."
    return "\n".join(["ranks made different calls", *lines, advice])


def _trees_text(present: list[tuple[int, dict[str, Any]]]) -> str:
    """The leaves that differ, one line each, with what every rank has there."""
    fixed_rows = {rank: {path: row for path, *row in one["fixed"]} for rank, one in present}
    full_rows = {rank: {path: row for path, *row in one["rows"]} for rank, one in present}
    paths = sorted(set().union(*fixed_rows.values()))
    differing = [
        path
        for path in paths
        if any(rows.get(path) != fixed_rows[present[0][0]].get(path) for rows in fixed_rows.values())
    ]
    lines = [
        f"  {path or 'the value'}  "
        + "   ".join(f"rank {rank}: {_leaf_text(rows.get(path))}" for rank, rows in full_rows.items())
        for path in differing[:_SHOWN]
    ]
    if len(differing) > _SHOWN:
        lines.append(f"  … and {len(differing) - _SHOWN} more")
    first = present[0][1]
    head = f"{first['operation']}: ranks disagree on {len(differing)} of {len(paths)} leaves"
    dim = _differing_dim([rows.get(differing[0]) for rows in fixed_rows.values()])
    return "\n".join([head, *lines, _SAME if dim is None else first["advice"].format(dim=dim)])


def _leaf_text(row: list[Any] | None) -> str:
    return f"{row[0]} {tuple(row[1])}" if row else "missing"


def _differing_dim(rows: list[list[Any] | None]) -> int | None:
    """The first dimension in which shapes differ that agree in dtype and number of dimensions."""
    known = [row for row in rows if row]
    if len(known) < len(rows) or len({row[0] for row in known}) > 1 or len({len(row[1]) for row in known}) > 1:
        return None
    sizes = zip(*(row[1] for row in known), strict=True)
    return next((dim for dim, column in enumerate(sizes) if len(set(column)) > 1), None)
