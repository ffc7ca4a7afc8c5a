"""The one place where a verb's call is run.

A verb states its arguments and leaves and what may differ (``prepare``), what all ranks find wrong once they know of
each other (``validate``), how data moves (``exchange``), and how the result is built (``result``). ``run`` owns the
rest: the call's number and clock, the agreement, and whether the others still wait for this rank, so that a rank that
fails alone, wherever it fails, is never waited for until the time is over.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from easydist import modes
from easydist.agreement.agree import Reported, agree, text_of, trust
from easydist.agreement.call import Call
from easydist.agreement.calling import calling
from easydist.agreement.frames import Agreement
from easydist.errors import EasydistError
from easydist.groups.communicators import Communicators
from easydist.typing import Timeout

R = TypeVar("R")


class Verb(ABC, Generic[R]):
    """What a verb states of one call; ``run`` calls the methods in this order.

    Attributes:
        operation: Its name.
        peer: The only other rank that takes part; None: all do.
        needs_headers: Whether the data cannot move without the header exchange, so that ``check=False`` keeps it.
        needs_data: Whether it moves data, and so cannot be called where tensors have none.
        refusal: Why it cannot be called here; it is raised in place of ``prepare``, so that all ranks learn of it.
    """

    operation: str
    peer: int | None = None
    needs_headers = True
    needs_data = True
    refusal: Exception | None = None

    @abstractmethod
    def prepare(self, comms: Communicators) -> Call:
        """State arguments, leaves and what may differ; an exception is raised on all ranks."""

    def agree(self, comms: Communicators, check: bool | None) -> Agreement:
        """Learn what the others are about to do, and that it is the same."""
        prepare = functools.partial(self.prepare if self.refusal is None else self.refuse, comms)
        trusted = None if self.needs_headers else trust(comms, prepare, check)
        return trusted or agree(comms, self.operation, prepare, check)

    def refuse(self, comms: Communicators) -> Call:
        """Raise the refusal, if there is one."""
        if self.refusal is not None:
            raise self.refusal
        return Call()

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        """Raise what every rank finds wrong alike, now that it knows of the others."""

    def exchange(self, comms: Communicators, agreed: Agreement) -> Any:
        """Move what has not come with the headers; all others wait for this rank until it returns."""
        return None

    @abstractmethod
    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> R:
        """Build the result of what ``exchange`` has returned; nobody waits for this rank any more."""


def run(verb: Verb[R], comms: Communicators, timeout: Timeout | None = None, check: bool | None = None) -> R:
    """Make one call of a verb.

    Args:
        verb: What it does.
        comms: The group.
        timeout: How long the call may take; None is the group's.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says.

    Raises:
        TypeError: The call is made under ``FakeTensorMode`` or inside a transform of ``torch.func``.
        ValueError: ``timeout`` leaves no time.
        EasydistError: What ``agree`` raises; and a rank was lost, late, interrupted, or failed in the middle.

    Cost: that of ``agree``, and of ``verb.exchange``.
    """
    if where := modes.without_data():
        if verb.needs_data:
            verb.refusal = TypeError(f"{verb.operation}: called {where}; call it outside, with tensors that have data")
        with modes.left():
            return run(verb, comms, timeout, check)
    with calling(comms, verb.operation, timeout, verb.peer):
        monitor = comms.monitor
        monitor.is_awaited = verb.peer is None
        agreed = verb.agree(comms, check)
        monitor.is_awaited = False
        verb.validate(comms, agreed)
        monitor.is_awaited = True
        arrived = verb.exchange(comms, agreed)
        monitor.is_awaited = False
        return verb.result(comms, agreed, arrived)


class _Meeting(Verb[None]):
    """All ranks meet, and learn of a fault where there is one."""

    needs_data = False

    def __init__(self, operation: str, fault: BaseException | None) -> None:
        self.operation, self._fault = operation, fault

    def prepare(self, comms: Communicators) -> Call:
        if self._fault is not None:
            raise Reported(text_of(self._fault)) from self._fault
        return Call()

    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> None:
        return None


def meet(comms: Communicators, operation: str, fault: BaseException | None = None) -> None:
    """Meet all ranks in ``operation``, and tell them of a fault where there is one.

    Raises:
        RemoteError: A rank reported a fault.
        DisagreementError: A rank called something else.
    """
    is_known = isinstance(fault, EasydistError) and fault.raised_in is comms
    if fault is not None and (is_known or comms.size == 1):
        raise fault  # the others have it already, or there are none
    run(_Meeting(operation, fault), comms)
