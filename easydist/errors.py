"""What can go wrong between processes, as one tree.

    EasydistError
    ├── DisagreementError   ranks called different operations, or with trees that do not match
    ├── RemoteError         another rank failed before the exchange; its text is inside
    ├── PeerLostError       a rank's process ended, or its connection broke, while others waited for it
    ├── CollectiveTimeout   nobody died, but not all came in time: who is missing, where each rank was last seen
    ├── LeftOutError        the others have recovered the group without this rank
    ├── WireError           bytes that are not a valid message
    └── UnsafeObjectError   decoding met a global that is not allow-listed

The first two are raised on every rank of the group, with the same text, before any target was written; the next call on
the group works. The next two end what the group has under way, on every rank that waits or comes later;
after a timeout the next call reconnects. Misuse that every rank commits alike stays a plain
``TypeError`` or ``ValueError``. One kind has a name, as torch, and accelerate with it, raises another class there:

    ShapeError              a ValueError and a RuntimeError: tensors that ``concatenate`` cannot join
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from easydist import html

_PACKAGE = str(Path(__file__).parent)


class EasydistError(Exception):
    """Any error that concerns more than one process.

    In IPython and Jupyter its traceback ends at the call of easydist: what lies inside is left out. ``%xmode Verbose``
    shows all of it, as ``traceback.print_exc`` does.

    Attributes:
        raised_in: The communicators of the group, all of whose ranks raise this error.
        is_final: Whether the group cannot be connected again.
        is_reported: Whether another rank has reported it.
        is_earlier: Whether it ended a call that this rank had left before: the group need but be connected again.
        is_interrupt: Whether Ctrl-C on another rank is the reason.
    """

    raised_in: object = None
    is_final = False
    is_earlier = False
    is_reported = False
    is_interrupt = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what only this process knows, so that the error can go to the process that started it."""
        return type(self), self.args, {name: value for name, value in vars(self).items() if name != "raised_in"}

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None:
            return traceback.format_exception(self)
        shown = shell.InteractiveTB
        frames = self.__traceback__ if shown.mode == "Verbose" else _outside(self.__traceback__)
        lines: list[str] = shown.structured_traceback(type(self), self, frames)
        return lines

    def _repr_html_(self) -> str:
        return html.text(str(self), f"{type(self).__name__}:")


def _outside(frames: TracebackType | None) -> TracebackType | None:
    """The traceback down to the last frame that is not easydist's; the whole of it where all are."""
    chain = []
    while frames is not None:
        chain.append(frames)
        frames = frames.tb_next
    outside = [not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE) for frame in chain]
    kept = chain[: len(chain) - outside[::-1].index(True)] if any(outside) else chain
    shown: TracebackType | None = None
    for frame in reversed(kept):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


class DisagreementError(EasydistError):
    """The ranks of a group called different operations, or one operation with trees that do not match.

    Example:
        >>> import easydist
        >>> easydist.DistributedOperationException is easydist.DisagreementError
        True
    """


DistributedOperationException = DisagreementError
"""accelerate's name."""


class RemoteError(EasydistError):
    """One rank failed before the exchange; every rank of the group raises this, with that rank's text.

    On the rank that failed, ``__cause__`` is the original exception. Also raised where a rank's process ended with an
    exception, or was interrupted, while this one waited for it.
    """


class PeerLostError(EasydistError, ConnectionError):
    """A rank's process ended, or its connection broke, while this rank waited for it.

    Attributes:
        rank: The lost rank, in the group.
        pid: Its process; None where that is not known.
        host: Its host's name; None where that is not known.
        exit_status: Negative for a signal; None where its parent has collected it before it could be read.
    """

    is_final = True
    rank: int | None = None
    pid: int | None = None
    host: str | None = None
    exit_status: int | None = None


class CollectiveTimeout(EasydistError, TimeoutError):
    """Not all ranks came in time; the text says who is missing, and where each rank was last seen.

    Attributes:
        missing: The ranks that are known not to have begun the call, in the group. Ranks of which nothing could be
            heard, because the process that keeps the group's store is stopped, are named in the text alone.
    """

    missing: tuple[int, ...] = ()


class LeftOutError(EasydistError):
    """The survivors of a group have recovered it without this rank, which came too late, or had given up before.

    Attributes:
        members: Those that have gone on, by their ranks in the old group.
    """

    is_final = True
    members: tuple[int, ...] = ()


class WireError(EasydistError, ValueError):
    """Bytes that are not a valid message; nothing was made of them."""


class UnsafeObjectError(EasydistError):
    """Decoding met a global that is not allow-listed, or pickle was asked for where it is denied.

    Nothing of the message has run. The text names the global and says how to allow it.
    """


class ShapeError(ValueError, RuntimeError):
    """Tensors whose shapes do not fit together.

    ``torch.cat`` raises a ``RuntimeError`` for them, which scripts written for accelerate catch.
    """
