"""The options of a communicator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import Store

_DEFAULT_SECONDS = 600.0
_RESOLUTION = timedelta(milliseconds=1)


class Milliseconds(timedelta):
    """A time limit in whole milliseconds: a ``timedelta`` that also equals their number.

    Example:
        >>> limit = Milliseconds.of(timedelta(seconds=5))
        >>> limit == 5000, limit == timedelta(seconds=5), int(limit), limit.total_seconds()
        (True, True, 5000, 5.0)
    """

    @classmethod
    def of(cls, limit: timedelta | float) -> Milliseconds:
        """Convert a time limit.

        Args:
            limit: A ``timedelta``, or milliseconds.
        """
        return cls(milliseconds=limit // _RESOLUTION if isinstance(limit, timedelta) else int(limit))

    def __int__(self) -> int:
        return self // _RESOLUTION

    def __eq__(self, other: object) -> bool:
        return int(self) == other if isinstance(other, int | float) else super().__eq__(other)

    __hash__ = timedelta.__hash__


def default_timeout() -> Milliseconds:
    """Return the default time limit of an operation: 600 s, or ``TORCHCOMM_TIMEOUT_SECONDS``.

    Raises:
        RuntimeError: The variable is not a number.
    """
    text = os.environ.get("TORCHCOMM_TIMEOUT_SECONDS") or _DEFAULT_SECONDS
    try:
        return Milliseconds(seconds=float(text))
    except ValueError:
        raise RuntimeError(f"Invalid value for environment variable TORCHCOMM_TIMEOUT_SECONDS: {text}") from None


def checked_hints(hints: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Check hints, and return them.

    Raises:
        TypeError: They are neither None nor a mapping of strings to strings.
    """
    if hints is not None and not _are_texts(hints):
        raise TypeError(f"hints must be a mapping of str to str, got {hints!r}")
    return hints


def _are_texts(hints: object) -> bool:
    return isinstance(hints, Mapping) and all(isinstance(text, str) for pair in hints.items() for text in pair)


def limited(timeout: timedelta | None, otherwise: timedelta) -> timedelta:
    """Return the time limit; None and less than a millisecond select the other one."""
    return otherwise if timeout is None or timeout < _RESOLUTION else timeout


class CommOptions:
    """Options of a communicator.

    Attributes:
        abort_process_on_timeout_or_error: True: a failed operation ends the process. None and False: it raises.
        hints: Texts for a backend.
        store: The store in which the ranks have met.

    Example:
        >>> from easydist.comms import CommOptions
        >>> CommOptions().timeout == 600_000
        True
    """

    def __init__(self) -> None:
        self.abort_process_on_timeout_or_error: bool | None = None
        self.hints: Mapping[str, str] = {}
        self.store: Store | None = None
        self._timeout = default_timeout()

    @property
    def timeout(self) -> Any:
        """The limit of operations in milliseconds, as a ``timedelta`` that equals their number. Assign either kind."""
        return self._timeout

    @timeout.setter
    def timeout(self, limit: timedelta | float) -> None:
        self._timeout = Milliseconds.of(limit)

    @property
    def time_limit(self) -> Milliseconds:
        """The same limit as ``timeout``, typed for type checkers."""
        return self._timeout

    def __repr__(self) -> str:
        return (
            f"CommOptions(timeout={int(self._timeout)} ms, hints={dict(self.hints)}, "
            f"abort_process_on_timeout_or_error={self.abort_process_on_timeout_or_error})"
        )
