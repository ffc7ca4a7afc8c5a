"""Failure reports: a rank that leaves its group's exchanges posts one for the other ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from easydist.errors import CollectiveTimeout, DisagreementError, EasydistError, PeerLostError, RemoteError, WireError
from easydist.liveness.stored import damaged, decoded

EXCEPTION = "exception"
"""The kind of the report that a process posts when it ends with an exception."""

LEAVING = "leaving"
"""The kind of the report of a rank that has left the group. It is logged, and read as ``Peer.left``."""

INTERRUPT = "interrupt"
"""The kind of a report about Ctrl-C, which may have reached other ranks, too, outside of the call."""

_KINDS: dict[str, type[EasydistError]] = {
    "late": CollectiveTimeout,
    "lost": PeerLostError,
    "remote": RemoteError,
    "damaged": WireError,
    "different": DisagreementError,
    INTERRUPT: RemoteError,
}
_LONGEST, _LONGEST_JSON = 20_000, 32_000
"""The most characters in the text of a report, and in a report as JSON; one that does not fit a page is unreadable."""

_CHECKED: dict[str, Callable[[Any], bool]] = {
    "call": lambda value: type(value) is int and 0 <= value < 1 << 53,
    "circle": lambda value: isinstance(value, list) and all(_is_row(row) for row in value),
    "is_unreachable": lambda value: isinstance(value, bool),
}
"""The attributes on which the reader acts, and whether it may."""

_FORM = {
    "kind": str,
    "text": str,
    "by": int,
    "entry": int,
    "phase": int,
    "number": float,
    "time": float,
    "is_final": bool,
    "fields": {str: object},
    "peer": int | None,
    "turn": (int, int | None),
    "meetings": int,
    "left": float | None,
}
_FIELDS = ("rank", "pid", "host", "exit_status", "missing", "call", "circle", "is_unreachable")


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) == 4 and all(type(number) is int for number in row)


class Turn(NamedTuple):
    """The number that a rank gives to a call with a partner, to which the partner gives the same.

    A message may be sent before a call of all ranks and received after it, so that on one of the two ranks it is a call
    since the last call of all ranks, and on the other one a message before that.

    Attributes:
        since: The calls of the two since the last call of all ranks.
        before: The messages that the two had begun before that, since the ranks were connected; None if the rank had
            lost its connections before that call, in which case only ``since`` counts.
    """

    since: int = 0
    before: int | None = 0

    def after(self, other: Turn) -> int:
        """Return by how much this call is later than another one of the same two ranks."""
        if self.before is None or other.before is None:
            return self.since - other.since
        return self.since + self.before - other.since - other.before


NO_TURN = Turn()


@dataclasses.dataclass(frozen=True)
class Report:
    """A rank's report about the end of its process, or of its group's exchanges.

    Attributes:
        kind: One of ``_KINDS``, or ``EXCEPTION``.
        text: The text of the error, or of the exception that ended the process.
        by: The rank that posts the report.
        entry: The group's entry on that rank's page.
        phase: That rank's ``Monitor.phase``.
        number: Its ``Monitor.at``; outside of calls, a number between its last call and the next one.
        time: The time of posting, by the monotonic clock of the posting process, which cannot be set.
        is_final: True if the group cannot be connected again.
        fields: The other attributes of the error, by name.
        peer: The only other rank of that call; None if all ranks take part.
        turn: The number of that call among the calls between the two ranks.
        meetings: The number of times that the rank has begun to meet the others.
        left: The call in which the rank left the group's exchanges, without having come back; None if it has not left.

    Example:
        >>> error = Report("late", "gather: …", 0, 0, 0, 2.0, 0.0, fields={"missing": [1]}).error()
        >>> error, error.missing
        (CollectiveTimeout('gather: …'), (1,))
    """

    kind: str
    text: str
    by: int
    entry: int
    phase: int
    number: float
    time: float
    is_final: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    peer: int | None = None
    turn: Turn = NO_TURN
    meetings: int = 0
    left: float | None = None

    def to_json(self) -> str:
        """Return the report as JSON; an error text that is too long for a page is cut and ends with "…"."""
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]} …"
        # JSON needs two characters for a quote or a line break, and six or twelve for one that is not ASCII.
        while len(report := json.dumps({**vars(self), "text": text})) > _LONGEST_JSON and len(text) > 2:
            text = f"{text[: len(text) // 2 - 2]} …"
        return report

    @classmethod
    def from_page(cls, text: str) -> Report | None:
        """Return the report of a page; None if the text is empty or incomplete."""
        try:
            return cls._of(json.loads(text)) if text else None
        except (ValueError, TypeError, KeyError):  # read while it was written, or from another version of easydist
            return None

    @classmethod
    def from_store(cls, what: str, text: bytes | None) -> Report | None:
        """Return the report of a text from a store; None if there is none.

        Raises:
            WireError: The text is no report; the error names it by ``what``.
        """
        if text is None:
            return None
        report = cls._of(decoded(what, text, _FORM))
        if report.kind not in _KINDS and report.kind not in (EXCEPTION, LEAVING):
            raise damaged(what, text)
        return report

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Report:
        return cls(**{**fields, "turn": Turn(*fields["turn"])})

    def is_about(self, number: int) -> bool:
        """True if the posting rank left this call or an earlier one before its end, or left the group for good.

        The report itself may be about a later call, in which the rank has not come back to the others, either.
        """
        if self.left is not None and self.left <= number:
            return True
        return self.kind != EXCEPTION and (self.is_final or self.number <= number)

    def error(self) -> EasydistError:
        """Return the error for the reader to raise."""
        error = _KINDS[self.kind](self.text)
        error.is_final, error.is_interrupt = self.is_final, self.kind == INTERRUPT
        for name, value in self.fields.items():
            if name not in _CHECKED or _CHECKED[name](value):
                setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error


def kind_of(error: EasydistError) -> str:
    """Return the kind of a report about an error; a relayed interrupt of another rank stays an interrupt."""
    return INTERRUPT if error.is_interrupt else next(kind for kind, cls in _KINDS.items() if isinstance(error, cls))


def fields_of(error: EasydistError) -> dict[str, Any]:
    """Return the attributes of an error that the readers of its report need, too."""
    return {name: value for name, value in vars(error).items() if name in _FIELDS}
