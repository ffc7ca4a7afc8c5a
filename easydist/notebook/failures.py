"""The failure of a cell on several ranks: one error, shown once, with the rank's own traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

from easydist.base.wording import named
from easydist.errors import PeerLostError, RemoteError

if TYPE_CHECKING:
    from easydist.notebook.rank import RankHandle

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class _Short:
    """An error that a notebook shows as its text, without the frames of easydist between the cell and the ranks."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class CellError(_Short, RemoteError):
    """A cell failed on a rank: it raised there, or was released because other ranks would not join its collective.

    Attributes:
        ranks: The ranks that raised the same.
        ename: The exception's class on the rank; empty if none has raised.
        evalue: Its text.
        traceback: The rank's traceback, as lines with colours. A plain program shows it below the error.
        note: Information about other ranks: the released ones, and what to do.
    """

    def __init__(
        self, ranks: Sequence[int], ename: str, evalue: str, traceback: Sequence[str] = (), note: str = ""
    ) -> None:
        self.ranks, self.ename, self.evalue = tuple(ranks), ename, evalue
        self.traceback, self.note = list(traceback), note
        raised = [f"{named(ranks)}: {ename}: {evalue}"] if ename else []
        super().__init__("\n".join([*raised, *filter(None, [note])]), rank=self.ranks[0] if self.ranks else None)
        if traceback:  # which a notebook renders, and Python shows as a note
            vars(self)["__notes__"] = [_COLOUR.sub("", "\n".join(traceback))]

    def __reduce__(self) -> tuple[object, ...]:
        return CellError, (self.ranks, self.ename, self.evalue, self.traceback, self.note)

    def _render_traceback_(self) -> list[str]:
        trace = "\n".join(self.traceback).rstrip("\n").split("\n")
        shown = [f"{named(self.ranks)} raised", *trace] if self.ename else ["CellError"]
        return [*shown, *filter(None, [self.note])]


class RankLostError(_Short, PeerLostError):
    """The process of a rank has ended. The attributes are those of the first one."""

    @classmethod
    def of(cls, text: str, process: RankHandle) -> RankLostError:
        """Return the error for the loss of a rank.

        Args:
            text: The text of the error.
            process: The rank.
        """
        error = cls(text)
        error.rank, error.pid, error.exit_status = process.rank, process.pid, process.status()
        error.host = process.host
        return error


class UnsendableError(_Short, TypeError):
    """A value cannot be pickled or unpickled, so it cannot be sent between the notebook and its ranks."""


class CellInterrupted(_Short, KeyboardInterrupt):
    """The user has interrupted a cell of several ranks."""


def fitting(ranks: Sized, one: str, several: str) -> str:
    """Return the word that fits one rank, or several.

    Example:
        >>> fitting([1], "is", "are"), fitting([0, 2], "is", "are")
        ('is', 'are')
    """
    return one if len(ranks) == 1 else several
