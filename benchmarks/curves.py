"""Measure the time of a gather by bytes and by leaves, and draw docs/performance.svg.

python benchmarks/curves.py [--ranks 2] [--output docs/performance.svg]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import easydist
from easydist.testing import Pool

NBYTES = [16 * 4**k for k in range(11)]
LEAVES = [1, 3, 10, 30, 100, 300, 1000]
INK = "#7d8590"
"""The colour of text and lines, to be read on light and on dark pages."""

PANELS = {"one leaf, bytes per rank": NBYTES, "leaves of 16 bytes": LEAVES}


def tree(panel: str, x: int) -> dict[str, torch.Tensor]:
    """Return the data of one point."""
    if panel == "leaves of 16 bytes":
        return {f"leaf{i}": torch.ones(4) for i in range(x)}
    return {"leaf": torch.ones(x // 4)}


def measure(rank: int, world_size: int, with_peer: bool) -> dict[str, dict[str, list[float]]]:
    """Return the best time of a call in seconds, per panel and library."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from easydist.cli.measure import agreed, timed

    libraries: dict[str, Any] = {"easydist": easydist.gather}
    if with_peer:
        from accelerate import PartialState
        from accelerate.utils import operations

        PartialState(cpu=True)
        libraries["accelerate"] = operations.gather
    found: dict[str, dict[str, list[float]]] = {panel: {name: [] for name in libraries} for panel in PANELS}
    for panel, points in PANELS.items():
        for x in points:
            data = tree(panel, x)
            for name, gather in libraries.items():
                repeats = max(1, min(100, int(0.05 / agreed(timed(lambda g=gather, d=data: g(d), 2)))))
                times = [timed(lambda g=gather, d=data: g(d), repeats) for _ in range(7)]
                found[panel][name].append(min(times))
    return found


def measured(ranks: int, shm: bool) -> dict[str, dict[str, list[float]]]:
    """Return the measurements of a separate process, with or without shared memory."""
    command = [sys.executable, __file__, "--ranks", str(ranks), "--measure"]
    environment = os.environ | {"EASYDIST_SHM": str(int(shm))}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def axes_for_both_themes() -> tuple[Any, Any]:
    """Return a figure and its two axes, whose ink can be read on light and on dark pages."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "easydist"  # the same drawing gives the same file
    plt.rcParams.update(dict.fromkeys(("text.color", *(f"{at}.color" for at in ("xtick", "ytick", "grid"))), INK))
    plt.rcParams.update({"axes.edgecolor": INK, "axes.labelcolor": INK})
    return plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)


def save(figure: Any, axes: Iterable[Any], output: Path) -> None:
    """Write a drawing whose vertical axes are times."""
    from matplotlib.ticker import EngFormatter

    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
        axis.yaxis.set_major_formatter(EngFormatter("s"))
        axis.legend(framealpha=0)
    figure.savefig(output, metadata={"Date": None}, transparent=True)


def draw(ranks: int, output: Path) -> None:
    """Measure, and draw."""
    from matplotlib.ticker import EngFormatter

    shared, gloo = measured(ranks, shm=True), measured(ranks, shm=False)
    curves = (
        ("accelerate", shared, "accelerate", "s--", "tab:red"),
        ("easydist on gloo", gloo, "easydist", "^-", "tab:orange"),
        ("easydist", shared, "easydist", "o-", "tab:blue"),
    )
    figure, axes = axes_for_both_themes()
    axes[1].sharey(axes[0])
    for axis, (panel, points) in zip(axes, PANELS.items(), strict=True):
        for label, found, library, line, color in curves:
            axis.loglog(points, found[panel][library], line, color=color, label=label)
        axis.set(xlabel=panel)
        axis.xaxis.set_major_formatter(EngFormatter("B" if "bytes per rank" in panel else ""))
    axes[0].set(ylabel=f"time of one gather, {ranks} ranks on {os.cpu_count()} cores")
    save(figure, axes, output)


def main() -> None:
    """Measure in this process, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("docs/performance.svg"))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.measure:
        draw(options.ranks, options.output)
        return
    with Pool(timeout=600) as pool:
        with_peer = os.environ.get("EASYDIST_SHM", "1") != "0"
        print(json.dumps(pool.run(measure, options.ranks, with_peer=with_peer)[0]))


if __name__ == "__main__":
    main()
