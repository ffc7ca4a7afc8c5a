"""Tracebacks of cells, without the frames of the code that runs them."""

from __future__ import annotations

import os
import sys
import types

INNER = "<easydist>"
"""The file name of requests that have no source."""


def cut_causes(error: BaseException) -> None:
    """Remove causes of an error that lie inside easydist and torch; of the others, keep the user's frames."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return
    cause.__traceback__ = users_part(cause.__traceback__)
    if cause.__traceback__ is None:
        error.__cause__, error.__suppress_context__ = None, True
    else:
        cut_causes(cause)


def users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of easydist, torch and IPython; None if no frames are left."""
    frames = []
    part = trace
    while part is not None:
        frames.append(part)
        part = part.tb_next
    users = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_inner())]
    shorter: types.TracebackType | None = None
    for frame in reversed(users):
        shorter = types.TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter


def _inner() -> tuple[str, ...]:
    names = ("torch", "IPython", "ipykernel", "asyncio")
    loaded = [sys.modules[name].__file__ for name in names if name in sys.modules]
    folders = [os.path.dirname(file) + os.sep for file in loaded if file]
    return (*folders, INNER, os.path.dirname(os.path.dirname(__file__)) + os.sep)
