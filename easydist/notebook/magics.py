"""``%%ranks``, ``%push`` and ``%pull``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from easydist.notebook.cluster import Cluster


@magics_class
class RankMagics(Magics):
    """The magics of the running cluster.

    Args:
        shell: The running IPython.
        running: Returns the cluster; None if none runs.
    """

    def __init__(self, shell: Any, running: Callable[[], Cluster | None]) -> None:
        super().__init__(shell)
        self._running = running

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on all ranks, or on those that the line names: ``%%ranks 0,2`` or ``%%ranks 1-3``."""
        cluster = self._cluster()
        cluster.execute(_with_first_line(line, cell), chosen(line, cluster.size))

    @line_magic
    def push(self, line: str) -> None:
        """Send values of the notebook to all ranks: ``%push model batch_size``."""
        names, cluster, own = line.replace(",", " ").split(), self._cluster(), self.shell.user_ns
        if not names:
            raise UsageError("%push: name the variables to send, as in %push model batch_size")
        if missing := [name for name in names if name not in own]:
            raise UsageError(f"%push: the notebook has no {', '.join(missing)}")
        cluster.push_all({name: own[name] for name in names})

    @line_magic
    def pull(self, line: str) -> Any:
        """Get the values of a name on the ranks, as a list: ``losses = %pull loss``; a dict for several names."""
        names, cluster = line.replace(",", " ").split(), self._cluster()
        if not names:
            raise UsageError("%pull: name the variable to get, as in losses = %pull loss")
        values = {name: cluster.pull(name) for name in names}
        return values if len(names) > 1 else values[names[0]]

    def _cluster(self) -> Cluster:
        if (cluster := self._running()) is None:
            raise UsageError("no ranks are running; start them: cluster = easydist.notebook.start(4)")
        return cluster


def _with_first_line(line: str, cell: str) -> str:
    """Return the cell with the notebook's line numbers. A magic of the cell's own must stay the first line."""
    return cell if cell.lstrip().startswith("%%") else f"# %%ranks {line}".rstrip() + f"\n{cell}"


def chosen(line: str, size: int) -> list[int] | None:
    """Return the ranks that a line names; None means all.

    Example:
        >>> chosen("0,2", 4), chosen("1-3", 4), chosen("", 4)
        ([0, 2], [1, 2, 3], None)

    Raises:
        UsageError: It names none, or ranks that do not exist.
    """
    if not line.strip():
        return None
    ranks: set[int] = set()
    for part in line.replace(",", " ").split():
        first, _, last = part.partition("-") if "-" in part else (part, "", part)
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < size):
            raise _refused(line, size)
        ranks |= set(range(int(first), int(last) + 1))
    if not ranks:
        raise _refused(line, size)
    return sorted(ranks)


def _refused(line: str, size: int) -> UsageError:
    return UsageError(f"%%ranks {line}: give ranks between 0 and {size - 1}, as in %%ranks 0,2 or %%ranks 1-3")


def register(running: Callable[[], Cluster | None]) -> None:
    """Register the magics with the running IPython, if there is one.

    Args:
        running: As for ``RankMagics``.
    """
    if (shell := get_ipython()) is not None:
        shell.register_magics(RankMagics(shell, running))
