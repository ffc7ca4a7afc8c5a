"""The errors that concern more than one process, as one tree.

    EasydistError
    ├── DisagreementError                  the operations or trees of the ranks do not match
    │   ├── UnequalError                   values differ in ``assert_equal``; an AssertionError
    │   └── comms.CommDisagreement         the same in an operation of a communicator
    ├── RemoteError                        another rank raised; the text contains its error
    │   ├── comms.CommRemoteError          the same in an operation of a communicator
    │   ├── comms.objcol.RemoteFault       the same in an object collective of a communicator
    │   └── notebook.CellError             a cell failed on a rank
    ├── PeerLostError                      a process ended or left while others waited for it
    │   ├── comms.CommPeerLost             the same in an operation of a communicator
    │   └── notebook.RankLostError         the process of a notebook's rank ended
    ├── CollectiveTimeout                  some ranks did not come in time; it lists them
    │   └── comms.CommTimeout              the same in an operation of a communicator
    ├── LeftOutError                       the others recovered the group without this rank
    │   └── comms.CommLeftOut              the same for a communicator
    ├── OverlappingCallError               another thread of this process is in a call
    ├── WireError                          bytes that are not a valid message
    └── UnsafeObjectError                  decoding met a global that is not allow-listed
        └── comms.objcol.WeightsOnlyError  the same in an object collective of a communicator

The modules are those of easydist. The classes in ``comms`` are also ``RuntimeError``, except ``WeightsOnlyError``,
which is also a ``pickle.UnpicklingError``.

``DisagreementError`` and ``RemoteError`` are raised on every rank of the group, with the same text, before any target
is written; the next call of the group works. ``PeerLostError`` and ``CollectiveTimeout`` end all calls of the group, on
every rank that waits or comes later; after a timeout the next call reconnects.

A wrong argument on every rank raises a plain ``TypeError`` or ``ValueError``. One such error has its own class, because
torch, and with it accelerate, raises another class there:

    ShapeError  a ValueError and a RuntimeError: tensors that ``concatenate`` cannot join
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from easydist.base import html

_PACKAGE = str(Path(__file__).parent)


class Mark:
    """A mark that means something in this process only: its copy in another process is None."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce it to None, so that an error that bears it can be sent, whatever its class."""
        return type(None), ()


class EasydistError(Exception):
    """The base of all errors that concern more than one process.

    In IPython and Jupyter the traceback ends at the call of easydist and omits the frames inside. ``%xmode Verbose``
    shows all of it, as ``traceback.print_exc`` does.
    """

    # These are easydist's own. The mark of the group's communicators, if all of its ranks raise this error:
    raised_in: Mark | None = None
    # True if the group cannot be connected again.
    is_final = False
    # True if it ended a call that this rank had left before: then the group only has to reconnect.
    is_earlier = False
    # True if another rank has reported it.
    is_reported = False
    # True if Ctrl-C on another rank is the reason.
    is_interrupt = False
    # True if an operation, or a wait, of a communicator has raised it.
    is_told = False
    # True if the host of the lost rank does not answer.
    is_unreachable = False
    # The call of all ranks that it ends, for ranks that wait for a message instead: they count that call as made.
    call: int | None = None
    # The waits that it ends, if ranks wait for one another in a circle: each rank, its partner, and the kind and the
    # number of the message.
    circle: Sequence[Sequence[int]] = ()

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows."""
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
    """Return the traceback down to the last frame outside easydist; the whole of it if all frames are inside."""
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
    """The error of ranks that called different operations, or one operation with trees that do not match.

    Example:
        >>> import easydist
        >>> easydist.DistributedOperationException is easydist.DisagreementError
        True
    """


class UnequalError(DisagreementError, AssertionError):
    """The error of ``assert_equal`` if ranks have different values; the text says where, and which ranks have which."""


DistributedOperationException = DisagreementError
"""accelerate's name for ``DisagreementError``."""


class RemoteError(EasydistError):
    """The error of every rank of the group if one rank failed before the exchange, with that rank's text.

    On the rank that failed, ``__cause__`` is the original exception. It is also raised if a rank's process ended with
    an exception, was interrupted, or has left the group to recover it, while this one waited for it.

    Args:
        *args: Its text.
        rank: The rank that failed.

    Attributes:
        rank: The rank that failed, in the group; the lowest one if several did; None if it is not known.
    """

    def __init__(self, *args: object, rank: int | None = None) -> None:
        super().__init__(*args)
        self.rank = rank


class PeerLostError(EasydistError, ConnectionError):
    """The error of a wait for a rank if its process ended, its connection broke, or it has left the group.

    Attributes:
        rank: The lost rank, in the group.
        pid: Its process id; None if it is not known.
        host: The name of its host; None if it is not known.
        exit_status: Its exit status, negative for a signal; None if its parent has collected it before it could be
            read.
    """

    is_final = True
    rank: int | None = None
    pid: int | None = None
    host: str | None = None
    exit_status: int | None = None


class CollectiveTimeout(EasydistError, TimeoutError):
    """The error if some ranks did not come in time; the text lists the missing ranks, and each rank's last call.

    Attributes:
        missing: The ranks in the group that are known not to have begun the call. Ranks that could not be observed,
            because the process that serves the group's store is stopped, are named only in the text.
    """

    missing: tuple[int, ...] = ()


class LeftOutError(EasydistError):
    """The error of a rank that came too late, or had given up, when the survivors of a group recovered it.

    Attributes:
        members: The survivors that continued, by their ranks in the old group.
    """

    is_final = True
    members: tuple[int, ...] = ()


class OverlappingCallError(EasydistError, RuntimeError):
    """The error of a call that begins while another one of its group is under way in this process.

    The other one runs in another thread, or was interrupted by the signal whose handler makes this call. Only this
    call raises, without waiting, and does not disturb the other one. The text names both threads and lines.
    """


class WireError(EasydistError, ValueError):
    """The error for bytes that are not a valid message; no object was made of them."""


class UnsafeObjectError(EasydistError):
    """The error if decoding finds a global that is not allow-listed, or pickle is requested but denied.

    No code of the message has run. The text names the global and tells how to allow it.
    """


class ShapeError(ValueError, RuntimeError):
    """The error for tensors with shapes that do not fit together.

    It is also a ``RuntimeError``, because ``torch.cat`` raises that, and scripts written for accelerate catch it.
    """


def drop_frames(error: BaseException | None) -> None:
    """Drop the traceback of an error that is kept, and of its causes: they have the frames of the call and its data."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__  # its context may be an exception of the caller


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error without its traceback: the one to keep, or to raise if the error itself is kept."""
    try:
        kept = copy.copy(error)
    except Exception:  # its class takes other arguments than those that it has
        return error
    vars(kept).update(vars(error))  # ``raised_in``, too
    if error.__cause__ is not None:
        kept.__cause__ = without_frames(error.__cause__)
    return kept
