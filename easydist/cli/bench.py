"""``easydist bench``: a comparison of easydist with accelerate and gloo on the user's machine."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from easydist.cli.loading import loading

if TYPE_CHECKING:
    from easydist.cli.measure import BenchRow

_EXAMPLE = """\b
Example:
  easydist bench                        2 ranks, about a minute
  easydist bench -n 2 -n 4 --plot bench.svg
  easydist bench --only gather --json
"""


@click.command(epilog=_EXAMPLE)
@click.option(
    "-n", "sizes", type=click.IntRange(2), multiple=True, default=[2], show_default=True, help="Number of ranks."
)
@click.option(
    "--seconds", type=click.FloatRange(0.01), default=0.5, show_default=True, help="Approximate seconds per row."
)
@click.option("--only", default="", help="Measure the rows whose name contains this text.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True), help="Draw the ratios to this file; needs matplotlib."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(sizes: Sequence[int], seconds: float, only: str, plot: str | None, as_json: bool) -> None:
    """Compare the speed of easydist with accelerate and gloo.

    They take turns with the same data on the same ranks of this machine. Times are medians of seven rounds. The ratio
    is the peer's time over easydist's: above 1, easydist is faster.
    """
    draw = _drawing(plot) if plot else None  # before measuring, which takes long
    rows = [row for size in sizes for row in _measured(size, seconds, only)]
    if not rows:
        raise click.BadParameter(f"no row has {only!r} in its name", param_hint="--only")
    if as_json:
        click.echo(json.dumps({"cores": os.cpu_count(), "rows": rows}))
    else:
        _print(rows)
    if draw is not None:
        draw(rows)


def _measured(size: int, seconds: float, only: str) -> list[dict[str, Any]]:
    with loading():
        from easydist.cli.measure import measure
        from easydist.testing import Pool

    with Pool(timeout=600) as pool:
        return [_summary(size, row) for row in pool.run(measure, size, seconds=seconds, only=only)[0]]


def _summary(size: int, row: BenchRow) -> dict[str, Any]:
    work, peer, rounds = row
    ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(their / our for our, their in rounds)
    spread = {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return {"ranks": size, "work": work, "peer": peer, "easydist": ours, "theirs": theirs, **spread}


def _print(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{os.cpu_count()} cores", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("ranks", "work", "easydist", "peer", "", "peer / easydist", "least–most"):
        table.add_column(name, justify="left" if name in ("work", "") else "right", no_wrap=True)
    for row in rows:
        times = [f"{row[name] * 1e6:,.0f} µs" for name in ("easydist", "theirs")]
        spread = f"{row['least']:.1f}–{row['most']:.1f}"
        style = "yellow" if row["ratio"] < 1 else None
        table.add_row(str(row["ranks"]), row["work"], *times, row["peer"], f"{row['ratio']:.1f}", spread, style=style)
    console = Console()
    console.print(table) if console.is_terminal else Console(width=140).print(table)


def _drawing(path: str) -> Callable[[list[dict[str, Any]]], None]:
    """Return the function that draws a bar for each row: the peer's time divided by easydist's.

    Raises:
        click.ClickException: matplotlib is missing.
        click.BadParameter: It draws no such file, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    folder, ending = os.path.dirname(path) or ".", os.path.splitext(path)[1][1:].lower()
    if not os.access(folder, os.W_OK):
        raise click.BadParameter(f"there is no folder {folder} in which you may write", param_hint="--plot")
    if ending and ending not in (known := figure.canvas.get_supported_filetypes()):
        raise click.BadParameter(f"matplotlib draws no .{ending}, but {', '.join(known)}", param_hint="--plot")

    def draw(rows: list[dict[str, Any]]) -> None:
        figure.set_size_inches(8, 1 + 0.3 * len(rows))
        names = [f"{row['work']} ({row['ranks']} ranks, {row['peer']})" for row in reversed(rows)]
        axes.barh(names, [row["ratio"] for row in reversed(rows)])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="peer's time / easydist's")
        figure.savefig(path)

    return draw
