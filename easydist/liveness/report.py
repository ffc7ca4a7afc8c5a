"""Failure reports: a rank that leaves its group's exchanges posts one for the other ranks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from easydist.errors import CollectiveTimeout, EasydistError, PeerLostError, RemoteError

EXCEPTION = "exception"
"""The kind of a report that a process leaves when it ends with an exception."""

INTERRUPT = "interrupt"
"""The kind of a report about Ctrl-C; other ranks may have got it too, outside of the call."""

_KINDS: dict[str, type[EasydistError]] = {
    "late": CollectiveTimeout,
    "lost": PeerLostError,
    "remote": RemoteError,
    INTERRUPT: RemoteError,
}
_LONGEST = 20_000
"""Characters of a text: a page has room for them, and a report that is cut is none."""

_FIELDS = ("rank", "pid", "host", "exit_status", "missing")


@dataclasses.dataclass(frozen=True)
class Report:
    """The end of a process, or of its group's exchanges, as one rank reports it.

    Attributes:
        kind: One of ``_KINDS``, or ``EXCEPTION``.
        text: The text of the error; of the exception that ended the process.
        by: The rank that posts it.
        entry: The group's on that rank's page.
        phase: That rank's ``Monitor.phase``.
        number: Its ``Monitor.at``; outside of calls, between its last call and the next one.
        time: When it was left, by the monotonic clock of the process that left it, which nobody sets.
        is_final: True if the group cannot be connected again.
        fields: The other attributes of the error, by name.
        peer: The only other rank of that call; None: all take part.
        turn: Of that call among those between the two ranks since the last one of all ranks.
        attempt: How often that rank has begun to meet the others.
        left: The call in which it has left the group's exchanges, to which it has not come back; None: it has not left.

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
    turn: int = 0
    attempt: int = 0
    left: float | None = None

    def to_json(self) -> str:
        """The report as text; that of the error ends with … where it is too long for a page."""
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]} …"
        return json.dumps({**vars(self), "text": text})

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Report | None:
        """The report of a text; None if there is none, or only a part of it."""
        try:
            return cls(**json.loads(text)) if text else None
        except ValueError:  # read while it was being written
            return None

    def is_about(self, number: int) -> bool:
        """True if its author has left this call, or an earlier one, in the middle; or for ever.

        Its report may be about a later call all the same: one in which it has not come back to the others, either.
        """
        if self.left is not None and self.left <= number:
            return True
        return self.kind != EXCEPTION and (self.is_final or self.number <= number)

    def error(self) -> EasydistError:
        """The error that the reader raises."""
        error = _KINDS[self.kind](self.text)
        error.is_final, error.is_interrupt = self.is_final, self.kind == INTERRUPT
        for name, value in self.fields.items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error


def kind_of(error: EasydistError) -> str:
    """The kind of a report about an error; who passes on that another rank was interrupted says so, too."""
    return INTERRUPT if error.is_interrupt else next(kind for kind, cls in _KINDS.items() if isinstance(error, cls))


def fields_of(error: EasydistError) -> dict[str, Any]:
    """The attributes of an error that readers need, too."""
    return {name: value for name, value in vars(error).items() if name in _FIELDS}
