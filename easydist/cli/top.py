"""``easydist top``: a live table of the ranks on this host."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from easydist.cli.ranks import Rank, Ranks

_EXAMPLE = """\b
Example:
  easydist top                  all your jobs on this host, until Ctrl-C
  easydist top 4711             the job of a rank or of a launcher
  easydist top --once --stack   once, with the Python stacks of ranks that are late
"""
_NOBODY = "None of your processes on this host is a rank that easydist knows. A rank appears with its first call."
_MEASURED = 0.2
"""Seconds for which ``--once`` measures the CPU."""

_PATIENCE = 1.0
"""Seconds after which a rank for which others wait counts as late."""


@click.command(epilog=_EXAMPLE)
@click.argument("pid", type=int, required=False)
@click.option(
    "--once", is_flag=True, help="Print the table once and exit; the default if the output is not a terminal."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and exit.")
@click.option("--stack", is_flag=True, help="Add the Python stacks of the ranks that are late.")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between updates.")
def top(pid: int | None, once: bool, as_json: bool, stack: bool, interval: float) -> None:
    """Show the state of the ranks on this host.

    You see their current calls, how long these take, and the ranks for which they wait. The table is made from the
    status that each process publishes in memory, so it also works on a job that hangs. PID is a rank's process or a
    launcher's. Only your own processes are shown.
    """
    from easydist.cli.ranks import Ranks

    ranks = Ranks(pid)
    if once or as_json or not sys.stdout.isatty():
        _show_once(ranks, as_json, stack)
    else:
        _show_live(ranks, interval, stack)


def _show_once(ranks: Ranks, as_json: bool, stack: bool) -> None:
    from rich.console import Console

    from easydist.cli import ranks as room

    ranks.look()
    time.sleep(_MEASURED)
    groups = ranks.look()
    stacks = _stacks(groups) if stack else {}
    if as_json:
        found: dict[str, Any] = {"groups": room.as_json(groups)}
        click.echo(json.dumps(found | {"stacks": stacks} if stack else found, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(screen(groups, stacks))


def _show_live(ranks: Ranks, interval: float, stack: bool) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                groups = ranks.look()
                live.update(screen(groups, _stacks(groups) if stack else {}), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def screen(groups: list[list[Rank]], stacks: dict[int, str]) -> RenderableType:
    """Return the display: a table for each group, with stacks below.

    Args:
        groups: The ranks of each group.
        stacks: The stacks by pid.
    """
    from rich.console import Group
    from rich.text import Text

    if not groups:
        return Text(_NOBODY)
    shown = [Text(f"pid {pid}\n{text}") for pid, text in stacks.items()]
    return Group(*(_table(ranks) for ranks in groups), *shown)


def _table(ranks: list[Rank]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from easydist.cli.ranks import awaited

    waits, late = awaited(ranks), {rank.membership.rank for rank in late_ranks(ranks)}
    told = ranks[0].membership
    title = f"group {told.group or '(unnamed)'} of {told.size} ranks, started by process {ranks[0].parent}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "pid", "CPU %", "memory", "call"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("operation", "at", "waits for"):
        table.add_column(name, overflow="fold")
    table.add_column("for", justify="right", no_wrap=True)
    for rank in ranks:
        number = rank.membership.rank
        table.add_row(*map(escape, _cells(rank, waits[number])), style="bold red" if number in late else None)
    return table


def late_ranks(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks of a group for which others have waited a second or longer, and that wait for none themselves.

    Args:
        ranks: The visible ranks of the group.
    """
    from easydist.cli.ranks import awaited

    waits = awaited(ranks)
    patient = [waits[rank.membership.rank] for rank in ranks if rank.seconds >= _PATIENCE]
    missing = {rank for ranks_awaited in patient for rank in ranks_awaited}
    return [rank for rank in ranks if rank.membership.rank in missing and not waits[rank.membership.rank]]


def _cells(rank: Rank, waits_for: list[int]) -> list[str]:
    from easydist.cli.ranks import placed

    told = rank.membership
    operation, _, site = placed(told.place)
    if not told.is_in_call:
        operation = f"not in a call, last: {operation}" if operation else "has made no call yet"
    if rank.status == "stopped":
        operation = f"stopped (SIGSTOP); {operation}"
    waited = _numbers(waits_for) if told.is_in_call else ""
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


def _numbers(ranks: list[int]) -> str:
    """Return ranks as text: ``1, 3–5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _time(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.1f} s" if minutes < 2 else f"{minutes:.1f} min" if hours < 2 else f"{hours:.1f} h"


def _stacks(groups: list[list[Rank]]) -> dict[int, str]:
    from easydist.cli.stacks import stack_of

    return {rank.pid: stack_of(rank.pid) for ranks in groups for rank in late_ranks(ranks)}
