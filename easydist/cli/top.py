"""``easydist top``: a live table of the ranks on this host."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from easydist.base.wording import numbers
from easydist.cli.ranks import LocalRanks, Rank, as_json as json_of, awaited, jobs, placed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from easydist.cli.nodes import ClusterRanks

_EXAMPLE = """\b
Example:
  easydist top                  all your jobs on this host, until Ctrl-C
  easydist top 4711             the job of a rank or of a launcher
  easydist top train.py         the jobs with this text in their command line
  easydist top --once --stack   once, with the Python stacks of ranks that are late
  easydist top --on ray         the ranks on all nodes of a Ray cluster
"""
_NOBODY = "None of your processes here is a rank{} that easydist knows. A rank appears with its first call."
_MEASURED = 0.2
"""Seconds for which ``--once`` measures the CPU."""

_PATIENCE = 1.0
"""Seconds after which a rank for which others wait counts as late."""


@click.command(epilog=_EXAMPLE)
@click.argument("job", metavar="[JOB|PID]", required=False)
@click.option(
    "--once",
    is_flag=True,
    help="Print the table once and exit; the default if the output is no terminal, or a dumb one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and exit.")
@click.option("--stack", is_flag=True, help="Add the Python stacks of the ranks that are late.")
@click.option("--on", type=click.Choice(["ray"]), help="Show the ranks on all nodes of a Ray cluster.")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between updates.")
def top(job: str | None, once: bool, as_json: bool, stack: bool, on: str | None, interval: float) -> None:
    """Show the state of the ranks on this host.

    You see their current calls, how long these take, and the ranks for which they wait. The table is made from the
    status that each process publishes in memory, so it also works on a job that hangs. A job that hangs comes first.
    PID is a rank's process or a launcher's; JOB is a part of the ranks' command line, such as a script's name. Only
    your own processes are shown. With --on ray an actor on each node looks for them, and there is no JOB.
    """
    if on and job:
        raise click.UsageError("--on ray shows all jobs: the processes of Ray do not tell which script they run")
    ranks = _on_ray() if on else LocalRanks(int(job) if job is not None and job.isdecimal() else job)
    try:
        if once or as_json or not _can_rewrite():
            _show_once(ranks, as_json, stack, job)
        else:
            _show_live(ranks, interval, stack, job)
    except ConnectionError as error:
        raise click.ClickException(
            f"the connection to the cluster is lost: {str(error).partition(chr(10))[0]}"
        ) from None
    finally:
        ranks.close()


def _can_rewrite() -> bool:
    """True if the output is a terminal that can show a table in place of the one before."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _on_ray() -> ClusterRanks:
    from easydist.cli.nodes import ClusterRanks

    try:
        return ClusterRanks()
    except (ConnectionError, ImportError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _show_once(ranks: LocalRanks | ClusterRanks, as_json: bool, stack: bool, job: str | None) -> None:
    from rich.console import Console

    ranks.look()
    time.sleep(_MEASURED)
    groups = ranks.look()
    stacks = _stacks(ranks, groups) if stack else {}
    if as_json:
        found: dict[str, Any] = {"groups": json_of(groups)} | ({"silent": ranks.silent} if ranks.silent else {})
        click.echo(json.dumps(found | {"stacks": stacks} if stack else found, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(screen(groups, stacks, ranks.silent, job))


def _show_live(ranks: LocalRanks | ClusterRanks, interval: float, stack: bool, job: str | None) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                groups = ranks.look()
                stacks = _stacks(ranks, groups) if stack else {}
                live.update(screen(groups, stacks, ranks.silent, job), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def screen(
    groups: list[list[Rank]], stacks: dict[str, str], silent: Sequence[str] = (), job: str | None = None
) -> RenderableType:
    """Return the display: for each job its groups, and stacks below.

    The job whose ranks have waited longest for one that is late comes first. A group without a call in progress takes
    no table, unless only one job is shown and none of its groups has one.

    Args:
        groups: The ranks of each group.
        stacks: The stacks by process.
        silent: The hosts that did not answer, with the reasons.
        job: The job that was asked for.
    """
    from rich.console import Group
    from rich.text import Text

    notes = [Text(one) for one in silent]
    if not groups:
        return Group(Text(_NOBODY.format(f" of {job}" if job else "")), *notes)
    found = sorted(jobs(groups), key=_hung_for, reverse=True)
    shown = [part for job in found for part in _job(job, is_alone=len(found) == 1)]
    return Group(*shown, *notes, *(Text(f"pid {process}\n{text}") for process, text in stacks.items()))


def _hung_for(job: list[list[Rank]]) -> float:
    """Return the seconds for which a rank of a job has waited for others, also for some not visible here; 0 if none."""
    return max((rank.seconds for ranks in job for rank in ranks if awaited(ranks)[rank.entry.rank]), default=0.0)


def _job(groups: list[list[Rank]], is_alone: bool) -> list[RenderableType]:
    """Return the lines and tables of a job: those with late ranks first."""
    from rich.text import Text

    ranks = max(groups, key=len)
    busy = [group for group in groups if any(rank.entry.is_in_call for rank in group)] or [ranks] * is_alone
    idle = [group for group in groups if group not in busy]
    head = f"job {ranks[0].parent}: {_command(ranks[0])}"
    shown: list[RenderableType] = [Text(head, no_wrap=True, overflow="ellipsis")]
    shown += map(_table, sorted(busy, key=lambda group: bool(late_ranks(group)), reverse=True))
    if idle:
        names = ", ".join(_title(group[0]) for group in idle)
        shown.append(Text(f"no call in progress: {names}\n", no_wrap=True, overflow="ellipsis"))
    return shown


def _command(rank: Rank) -> str:
    """Return a command line without the settings of a notebook's rank."""
    return rank.command.partition(" {")[0]


def _title(rank: Rank) -> str:
    told = rank.entry
    return f"group {told.group or '(unnamed)'} of {told.size} ranks"


def _table(ranks: list[Rank]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    waits, late = awaited(ranks), {rank.entry.rank for rank in late_ranks(ranks)}
    table = Table(title=escape(_title(ranks[0])), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    has_hosts = any(rank.host for rank in ranks)
    for name in ("rank", *["host"] * has_hosts, "pid", "CPU %", "memory", "call"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("operation", "at", "waits for"):
        table.add_column(name, overflow="fold")
    table.add_column("for", justify="right", no_wrap=True)
    for rank in ranks:
        number = rank.entry.rank
        first, *cells = _cells(rank, waits[number])
        cells = [first, *[rank.host] * has_hosts, *cells]
        table.add_row(*map(escape, cells), style="bold red" if number in late else None)
    return table


def late_ranks(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks of a group for which others have waited a second or longer, and that wait for none themselves.

    Args:
        ranks: The visible ranks of the group.
    """
    waits = awaited(ranks)
    patient = [waits[rank.entry.rank] for rank in ranks if rank.seconds >= _PATIENCE]
    missing = {rank for ranks_awaited in patient for rank in ranks_awaited}
    return [rank for rank in ranks if rank.entry.rank in missing and not waits[rank.entry.rank]]


def _cells(rank: Rank, waits_for: list[int]) -> list[str]:
    told = rank.entry
    operation, _, site = placed(told.place)
    if not told.is_in_call:
        operation = f"not in a call, last: {operation}" if operation else "has made no call yet"
    if rank.status == "stopped":
        operation = f"stopped (SIGSTOP); {operation}"
    waited = numbers(waits_for) if told.is_in_call else ""
    return [
        str(told.rank),
        str(rank.pid),
        f"{rank.cpu:.0f}",
        f"{rank.memory / 2**20:.0f} MiB",
        str(told.number),
        operation,
        site,
        waited,
        _time(rank.seconds) if told.place else "",
    ]


def _time(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.1f} s" if minutes < 2 else f"{minutes:.1f} min" if hours < 2 else f"{hours:.1f} h"


def _stacks(ranks: LocalRanks | ClusterRanks, groups: list[list[Rank]]) -> dict[str, str]:
    late = [rank for group in groups for rank in late_ranks(group)]
    return {f"{rank.pid} on {rank.host}" if rank.host else str(rank.pid): ranks.stack(rank) for rank in late}
