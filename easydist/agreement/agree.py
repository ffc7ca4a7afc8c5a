"""The exchange of frames before the data, which checks that all ranks make the same call and that none has failed.

A rank that fails sends the text of its fault instead of its header. If fingerprints differ that must not, the ranks
exchange descriptions. In both cases every rank raises the same error before any target is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from easydist import settings
from easydist.agreement import frames
from easydist.agreement.call import Call
from easydist.agreement.disagreement import calls_text, fault_text, trees_text
from easydist.agreement.frames import ABSENT, FAULT, WELL, Agreement, Headers
from easydist.agreement.notes import listeners, note_data
from easydist.agreement.reports import NOTHING, encoded, exchange_json, exchange_reports
from easydist.data.leaves import Leaves
from easydist.errors import DisagreementError, RemoteError
from easydist.groups.communicators import Communicators

E = TypeVar("E", bound=BaseException)

CHECKED: bool = settings.read("EASYDIST_CHECK")
"""True if calls are compared by default; has to be the same on all ranks."""


def agree(comms: Communicators, operation: str, prepare: Callable[[], Call], check: bool | None = None) -> Agreement:
    """Exchange the calls of all ranks, and compare them.

    Args:
        comms: The group.
        operation: The verb's name.
        prepare: Makes the call; if it raises an exception, all ranks learn of it.
        check: True to compare the calls; None to do as ``EASYDIST_CHECK`` says.

    Returns:
        The calls' headers, and the data that came with them.

    Raises:
        DisagreementError: The calls do not match; the text is the same on every rank.
        RemoteError: ``prepare`` raised on some ranks; the text is the same on every rank. If it raised the same error
            on every rank, that error itself is raised.

    Cost: one all-gather of 64 bytes per rank, sizes and small payloads included; nothing in a single process.
    """
    if comms.size == 1:
        return alone(prepare)
    try:
        call = _noted(prepare())
        if call.leaves is not None and not call.leaves.is_cpu:
            call.devices = _devices(comms, call.leaves)
        sizes = call.sizes()
        mine = frames.header_of(operation, call)
    # Not an interrupt: the others hear of that from the monitor, when the call ends.
    except Exception as fault:
        _raise_together(comms, _exchange_fault(comms, operation, fault), fault)
    headers = frames.exchange(comms, mine, sizes, call)
    if not headers.are_alike():
        _compare(comms, operation, call, headers, check)
    return Agreement(call, headers, comms.frames)


def _devices(comms: Communicators, leaves: Leaves) -> tuple[str, ...]:
    """Return the type of the devices between which each leaf travels; nothing if all travel between CPUs.

    A rank whose leaf is on another one would wait for a message of another library.
    """
    kinds = tuple([comms.data(tensor.device).get_device().type for tensor in leaves.tensors])
    return kinds if {*kinds} != {"cpu"} else ()


def judged(comms: Communicators, operation: str, judge: Callable[[], Any]) -> dict[int, Any]:
    """Let each rank report what it objects to, or what others have to know, and return the reports by rank.

    Args:
        comms: The group.
        operation: The verb's name.
        judge: Makes this rank's report, empty if there is none; if it raises an exception, all ranks learn of it.

    Returns:
        The reports that are not empty, the same on every rank.

    Cost: that of ``agree``; one all-gather more, if any report is not empty.
    """
    mine = NOTHING

    def prepare() -> Call:
        nonlocal mine
        mine = encoded(judge())
        return Call(nbytes=mine.numel())

    return exchange_reports(comms, agree(comms, operation, prepare).nbytes, mine)


def trust(comms: Communicators, prepare: Callable[[], Call], check: bool | None) -> Agreement | None:
    """Return the result of ``agree`` without an exchange, if calls are not compared; else None.

    Raises:
        ValueError: This rank has no data of its own, and without an exchange it cannot know what will arrive.
    """
    if comms.size > 1 and (CHECKED if check is None else check):
        return None
    agreement = alone(prepare)
    if agreement.call.absent and comms.size > 1:
        raise ValueError("with check=False every rank has to pass its own tree, not None")
    return agreement


def alone(prepare: Callable[[], Call]) -> Agreement:
    """Return the result of ``agree`` for a single process."""
    call = _noted(prepare())
    status, zero = ABSENT if call.absent else WELL, [0]
    return Agreement(call, Headers([status], zero, zero, zero, [call.nbytes], zero, zero, zero))


def _noted(call: Call) -> Call:
    if listeners and (call.leaves is not None or call.nbytes):
        note_data(call.nbytes if call.leaves is None else call.leaves.layout.packing.nbytes)
    return call


def shared(comms: Communicators, error: E) -> E:
    """Mark an error that all ranks of the group raise, so that it is not reported to them, and return it."""
    vars(error)["raised_in"] = comms.mark
    return error


class Reported(Exception):
    """The carrier of another exception's text, also that of SystemExit or KeyboardInterrupt, to all ranks.

    Args:
        text: The text.
        body: The number of the body that this rank leaves with the exception, from the outermost one, which is 1;
            negative if it leaves none.
    """

    def __init__(self, text: str, body: int = -1) -> None:
        super().__init__(text)
        self.body = body


def text_of(error: BaseException) -> str:
    """Return the type and the text of an error."""
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not keep this rank from reporting to the others
        text = ""
    if isinstance(error, Reported):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _compare(comms: Communicators, operation: str, call: Call, headers: Headers, check: bool | None) -> None:
    """Raise on all ranks if a rank has failed, or if calls or structures differ that must not."""
    if FAULT in headers.status:
        _raise_together(comms, _faults(comms, headers), None)
    is_same_call = len({*headers.call}) == 1
    is_same_structure = len({*headers.of_well(headers.structure)}) <= 1
    if (CHECKED if check is None else check) and not (is_same_call and is_same_structure):
        _disagree(comms, operation, call)


def _exchange_fault(comms: Communicators, operation: str, fault: Exception) -> dict[int, dict[str, Any]]:
    """Send a fault of this rank to the others; return the faults of all ranks."""
    told = [operation, fault.body if isinstance(fault, Reported) else 0, comms.monitor.site]
    room = frames.room(comms) - len(json.dumps([*told, ""]))
    text = json.dumps([*told, text_of(fault)[: room // 12]])  # a character has up to 12 bytes
    return _faults(comms, frames.exchange_fault(comms, text.encode()))


def _faults(comms: Communicators, headers: Headers) -> dict[int, dict[str, Any]]:
    names = ("operation", "body", "site", "text")
    told = frames.faults(comms, headers)
    return {rank: dict(zip(names, json.loads(text), strict=True)) for rank, text in told.items()}


def _raise_together(comms: Communicators, faults: dict[int, dict[str, Any]], mine: Exception | None) -> NoReturn:
    """Raise the same error on every rank. No local may hold it, as its frames and their data would form a cycle."""
    is_common = len(faults) == comms.size and len({one["text"] for one in faults.values()}) == 1
    if mine is not None and is_common and not isinstance(mine, Reported):
        try:
            raise shared(comms, mine)
        finally:
            del mine
    bodies = [one["body"] for one in faults.values() if 0 < one["body"] <= comms.bodies]
    if bodies:  # some ranks have left a body that this one is in, and come to no other exchange in it
        comms.left = min(bodies), shared(comms, _remote(faults))
    raise shared(comms, _remote(faults)) from mine


def _remote(faults: dict[int, dict[str, Any]]) -> RemoteError:
    """Return the error about ranks that have failed; its ``rank`` is the lowest of them."""
    return RemoteError(fault_text(faults), rank=min(faults))


def _disagree(comms: Communicators, operation: str, call: Call) -> NoReturn:
    """Exchange the descriptions and raise the same error on every rank."""
    mine = {
        "title": call.title(operation),
        "operation": operation,
        "site": comms.monitor.site,
        "types": call.types(),
        "fixed": call.types(fixed=True),
        "absent": call.absent,
        "advice": call.advice,
        "bodies": comms.bodies,
    }
    every = exchange_json(comms, mine)
    same_call = len({one["title"] for one in every}) == 1
    text, common = trees_text(every) if same_call else calls_text(every), min(one["bodies"] for one in every)
    if common < comms.bodies:  # some ranks are not in a body that this one is in, and come to no other exchange in it
        comms.left = common + 1, shared(comms, DisagreementError(text))
    raise shared(comms, DisagreementError(text))
