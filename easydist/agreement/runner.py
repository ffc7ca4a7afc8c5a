"""The runner of all verbs' calls.

A verb states its arguments, its leaves and the properties that may differ (``prepare``), the checks that need all
ranks' headers (``validate``), the exchange of data (``exchange``), and the building of the result (``result``).
``run`` does the rest: the call's number and clock, the agreement, and keeping track of whether the others wait for this
rank. So if a rank fails alone, at whatever point, the others do not wait for it until the time is over.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from easydist.agreement.agree import Reported, agree, text_of, trust
from easydist.agreement.call import Call
from easydist.agreement.calling import calling
from easydist.agreement.frames import Agreement
from easydist.base import modes
from easydist.errors import DisagreementError, EasydistError
from easydist.groups.communicators import Communicators
from easydist.typing import Timeout

R = TypeVar("R")
T = TypeVar("T")


class Verb(ABC, Generic[R]):
    """One call of a verb; ``run`` calls the methods in this order.

    Attributes:
        operation: The name of the verb.
        peer: The only other rank that takes part; None if all ranks do.
        peer_name: The argument that holds it.
        needs_headers: True if the data cannot move without the header exchange, so that ``check=False`` keeps it.
        needs_data: True if it moves data, and so cannot be called while tensors have none.
        refusal: The error if it cannot be called here; it is raised in place of ``prepare``, so all ranks learn of it.
        site: The file and line of the call; None for those of the caller.
    """

    operation: str
    peer: int | None = None
    peer_name = "peer"
    needs_headers = True
    needs_data = True
    refusal: Exception | None = None
    site: str | None = None

    @abstractmethod
    def prepare(self, comms: Communicators) -> Call:
        """Return this rank's call; an exception here is raised on all ranks."""

    def agree(self, comms: Communicators, check: bool | None) -> Agreement:
        """Exchange the calls of all ranks, and check that they are the same."""
        prepare = functools.partial(self.prepare if self.refusal is None else self._refuse, comms)
        trusted = None if self.needs_headers else trust(comms, prepare, check)
        comms.monitor.is_one_way = trusted is not None
        return trusted or agree(comms, self.operation, prepare, check)

    def _refuse(self, comms: Communicators) -> NoReturn:
        assert self.refusal is not None
        raise type(self.refusal)(*self.refusal.args)  # a copy: the refusal itself and this call would hold each other

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        """Raise errors that follow from all ranks' headers, and so are the same on every rank."""

    def exchange(self, comms: Communicators, agreed: Agreement) -> Any:
        """Move the data that has not come with the headers; all others wait for this rank until it returns."""
        return None

    @abstractmethod
    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> R:
        """Build the result from that of ``exchange``; no other rank waits for this one any more."""


class StreamingVerb(Verb[R], Generic[R, T]):
    """A verb whose exchange hands over values on the way, to whoever calls ``stream``."""

    @abstractmethod
    def values(self, comms: Communicators, agreed: Agreement) -> Iterator[T]:
        """Move the data, and yield the values as they arrive; all others wait for this rank until the end."""

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        """Move the data without handing anything over."""
        for _ in self.values(comms, agreed):
            pass


def run(verb: Verb[R], comms: Communicators, timeout: Timeout | None = None, check: bool | None = None) -> R:
    """Make one call of a verb.

    Args:
        verb: The verb.
        comms: The group.
        timeout: The time limit of the call; None is the group's.
        check: True to compare the calls; None to do as ``EASYDIST_CHECK`` says.

    Raises:
        TypeError: The call is made under ``FakeTensorMode`` or inside a transform of ``torch.func``.
        ValueError: ``timeout`` is not positive.
        EasydistError: ``agree`` raised it, or a rank was lost, late or interrupted, or failed before the end.

    Cost: that of ``agree``, and of ``verb.exchange``.
    """
    if where := modes.without_data():
        # Raised in place of ``prepare``: the other ranks may be in no such mode, and hear of it.
        if verb.needs_data:
            verb.refusal = modes.refusal(verb.operation, where)
        with modes.left():
            return run(verb, comms, timeout, check)
    with calling(comms, verb.operation, timeout, verb.peer, verb.site, verb.peer_name):
        agreed = _agreed(verb, comms, check)
        arrived = verb.exchange(comms, agreed)
        # A failure in ``result`` concerns this rank alone.
        comms.monitor.is_awaited = False
        return verb.result(comms, agreed, arrived)


def stream(
    verb: StreamingVerb[Any, T], comms: Communicators, timeout: Timeout | None = None
) -> Generator[T, None, None]:
    """Make one call of a verb, and yield its values as they arrive. The call ends with the iteration.

    If the iterator is closed or dropped before its end, all other ranks raise a ``RemoteError``.

    Args:
        verb: The verb.
        comms: The group.
        timeout: The time limit of the call, with all that the loop over the values does; None is the group's.

    Raises:
        EasydistError: As for ``run``.
    """
    if modes.without_data():
        run(verb, comms, timeout)  # raises; the modes must not be left while the loop runs
    with calling(comms, verb.operation, timeout, site=verb.site):
        agreed = _agreed(verb, comms, None)
        try:
            yield from verb.values(comms, agreed)
        except GeneratorExit:
            comms.monitor.failed(RuntimeError("the loop over the stream was left before its end"))
            raise
        comms.monitor.is_awaited = False
        verb.result(comms, agreed, None)


def _agreed(verb: Verb[Any], comms: Communicators, check: bool | None) -> Agreement:
    """Agree on a call; after that, the others wait for this rank's data."""
    monitor = comms.monitor
    monitor.is_awaited = verb.peer is None
    agreed = verb.agree(comms, check)
    # ``validate`` raises the same on all ranks, so nobody has to be told.
    monitor.is_awaited = False
    verb.validate(comms, agreed)
    # A failure in the exchange is reported.
    monitor.is_awaited = True
    return agreed


class _Comparison(Verb[R]):
    needs_data = False

    def __init__(self, operation: str, open_: Callable[[Communicators], tuple[R, dict[str, Any]]]) -> None:
        self.operation, self._open = operation, open_

    def prepare(self, comms: Communicators) -> Call:
        self._result, arguments = self._open(comms)
        return Call(arguments)

    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> R:
        return self._result


def compare(
    comms: Communicators,
    operation: str,
    open_: Callable[[Communicators], tuple[R, dict[str, Any]]],
    timeout: Timeout | None = None,
) -> R:
    """Let all ranks compare arguments; no data moves.

    Args:
        comms: The group.
        operation: The name of the call.
        open_: Returns the result on this rank, and the arguments on which all ranks have to agree. If it raises, all
            ranks raise.
        timeout: The time limit of the call; None is the group's.

    Raises:
        RemoteError: ``open_`` has raised on another rank.
        DisagreementError: A rank has other arguments, or made a different call.
    """
    return run(_Comparison(operation, open_), comms, timeout)


def meet(
    comms: Communicators, operation: str, fault: BaseException | None = None, timeout: Timeout | None = None
) -> None:
    """Meet all ranks in ``operation``, and report a fault to them if there is one.

    Args:
        comms: The group.
        operation: The name of the call.
        fault: The fault of this rank.
        timeout: The time limit of the meeting; None is the group's.

    Raises:
        RemoteError: A rank reported a fault.
        DisagreementError: A rank made a different call.
    """
    is_known = isinstance(fault, EasydistError) and fault.raised_in is comms.mark
    if fault is not None and (is_known or comms.size == 1):
        raise fault  # all other ranks raise it already, or there are none
    _meet(comms, operation, fault, timeout)


def _meet(
    comms: Communicators, operation: str, fault: BaseException | None, timeout: Timeout | None, body: int = -1
) -> None:
    def report(_: Communicators) -> tuple[None, dict[str, Any]]:
        if fault is not None:
            raise Reported(text_of(fault), body) from fault
        return None, {}

    compare(comms, operation, report, timeout)


@contextlib.contextmanager
def reported(comms: Communicators, operation: str, timeout: Timeout | None = None) -> Iterator[None]:
    """Report an exception of the body to all ranks, which meet in ``operation``, and raise it here.

    The others are not in such a body: they wait for its end in a meeting, which any error of all ranks ends.
    """
    comms.awaited_bodies += 1
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the others raise RemoteError; here the body's own exception is raised
            meet(comms, operation, error, timeout)
        raise
    finally:
        comms.awaited_bodies -= 1


@contextlib.contextmanager
def jointly(comms: Communicators, operation: str, timeout: Timeout | None = None) -> Iterator[None]:
    """Run a body that all ranks run, after which they meet in ``operation``: all raise, or none does.

    Each rank comes to exactly one meeting of a body, at its end or with its exception. That holds for an error that all
    ranks raise, too, since some may catch it. A rank that hears in the body that others have left it raises that error
    in its further calls, and at the end (``Communicators.left``), since they come to no other exchange of this body.
    """
    if comms.awaited_bodies:  # the others wait for the end of that body; they raise once, and come to no second meeting
        yield
        meet(comms, operation, timeout=timeout)
        return
    comms.bodies += 1
    is_at_end = False
    try:
        yield
        is_at_end = True
        meet(comms, operation, timeout=timeout)
    except BaseException as error:
        # Of the errors of the meeting only a disagreement means that it has not taken place, and still will.
        if comms.size > 1 and (not is_at_end or isinstance(error, DisagreementError)):
            _leave(comms, operation, error, timeout)
        raise
    finally:
        comms.bodies -= 1
        if comms.left is not None and comms.left[0] > comms.bodies:
            comms.left = None


def _leave(comms: Communicators, operation: str, error: BaseException, timeout: Timeout | None) -> None:
    """Meet the others in the body with an exception; again if a message that they wait for comes in between.

    This does nothing if this rank has heard of others that have left or are not in the body: they do not meet it.
    """
    with contextlib.suppress(Exception):  # the others raise RemoteError; here the body's own exception is raised
        while comms.left is None:
            with contextlib.suppress(DisagreementError):
                _meet(comms, operation, error, timeout, comms.bodies)
