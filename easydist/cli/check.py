"""``easydist check``: a check of this machine, or of the cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from easydist.cli.findings import Finding, surroundings
from easydist.cli.home import PIPE, home
from easydist.cli.loading import loading
from easydist.cli.rank import command_of

if TYPE_CHECKING:
    from easydist.state.environment import World

_EXAMPLE = """\b
Example:
  easydist check                             2 ranks on this machine
  srun -n 8 easydist check                   the ranks of a launcher
  torchrun --nnodes 2 … -m easydist check
  easydist check --on ray                    a rank on each node of a Ray cluster
"""
_MARKS = {"ok": "ok     ", "warning": "warning", "fault": "FAULT  "}
Results = dict[str, Any]
"""``findings`` and ``times``, as JSON."""


@click.command(epilog=_EXAMPLE)
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(2),
    help="Number of ranks without a launcher.  [default: 2; with --on ray one on each node]",
)
@click.option(
    "--timeout", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds to wait for the ranks."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--on", type=click.Choice(["ray"]), help="Check the nodes of a Ray cluster.")
def check(ranks: int | None, timeout: float, as_json: bool, on: str | None) -> None:
    """Check this machine, or the cluster under a launcher.

    It checks limits and the network, and runs all verbs. Each fault comes with a remedy, and makes the exit status 1.
    Under a launcher, rank 0 prints its results, and so does each rank that finds a fault. With --on ray, the ranks are
    actors, as many on each node, and this command prints their results.
    """
    results, rank = (_on_ray(ranks, timeout), 0) if on else _results(ranks or 2, timeout)
    has_fault = any(finding["state"] == "fault" for finding in results["findings"])
    if rank == 0 or has_fault:
        click.echo(json.dumps(results) if as_json else _text(results))
    raise SystemExit(has_fault)


def _results(ranks: int, timeout: float) -> tuple[Results, int]:
    with loading():
        from easydist.state.environment import launched

    found = surroundings()
    try:
        world = launched()
    except ValueError as error:
        advice = "Unset the variables that another launcher has left, or correct them."
        return _as_results([*found, Finding("variables", "fault", str(error), advice)]), 0
    if world.size > 1:
        return _as_rank(world, found, timeout), world.rank
    return _as_launcher(ranks, found, timeout), 0


def _as_results(found: list[Finding], times: list[dict[str, Any]] | None = None) -> Results:
    return {"findings": [finding.to_json() for finding in found], "times": times or []}


def _as_rank(world: World, found: list[Finding], timeout: float) -> Results:
    """Run the checks as one of the launched ranks."""
    import torch.distributed as dist

    from easydist.cli import trial

    met = trial.meet(world, timeout)
    found = [*found, met]
    if met.state == "fault":
        return _as_results(found)
    found += trial.verbs(world.rank, world.size)
    times = trial.times(world.size)
    dist.destroy_process_group()
    return _as_results(found, times)


def _on_ray(ranks: int | None, timeout: float) -> Results:
    """Run the checks on the nodes of a Ray cluster, and collect their findings."""
    from easydist.cli.nodes import called
    from easydist.errors import EasydistError

    try:
        return _collected([], called(_of_node, ranks, timeout))
    except (EasydistError, ConnectionError, ImportError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _of_node(timeout: float) -> Results:
    """Run the checks on a node, whose name is in each fault."""
    results, rank = _results(2, timeout)
    for row in results["findings"]:
        if row["state"] != "ok":
            row["said"] = f"rank {rank} on {socket.gethostname()}: {row['said']}"
    return results


def _as_launcher(ranks: int, found: list[Finding], timeout: float) -> Results:
    """Start ranks that run the checks, and collect their findings."""
    return _collected(found, _outcomes(ranks, timeout))


def _collected(found: list[Finding], outcomes: Iterable[Results]) -> Results:
    """Return findings with those of ranks: all of rank 0, and the faults of the others."""
    results = _as_results(found)
    seen = {finding["check"] for finding in results["findings"]}
    for rank, told in enumerate(outcomes):
        results["findings"] += [
            row for row in told["findings"] if row["check"] not in seen and (rank == 0 or row["state"] == "fault")
        ]
        results["times"] = results["times"] or told["times"]
    return results


def _outcomes(ranks: int, timeout: float) -> list[Results]:
    from easydist.liveness.timed_store import served

    # Served here, as torchrun does it: between a look for a free port and its use, another process could take it.
    store = served("127.0.0.1", 0, timeout)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [sys.executable, "-m", "easydist", "check", "--json", "--timeout", str(timeout)]
    env = {"OMP_NUM_THREADS": "1"} | os.environ | meeting | {"LOCAL_WORLD_SIZE": meeting["WORLD_SIZE"]}
    # A rank whose output nobody reads would stop at a full pipe, so each has a thread.
    with home() as folder, ThreadPoolExecutor(ranks) as threads:
        processes = [
            subprocess.Popen(
                command_of(os.path.join(folder, PIPE), command),
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        try:
            return list(threads.map(_outcome, range(ranks), processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _outcome(rank: int, process: subprocess.Popen[bytes]) -> Results:
    out, err = process.communicate()
    told = [line for line in out.splitlines() if line.startswith(b'{"findings"')]  # libraries print, too
    if not told and process.returncode == 0:
        return _as_results([])
    try:
        results: Results = json.loads(told[-1])
    except (IndexError, ValueError):
        said = f"rank {rank} ended with exit status {process.returncode}: {_end_of(err.decode(errors='replace'))}"
        advice = "Run python -c 'import easydist; easydist.ProcessState()' to see more."
        return _as_results([Finding("ranks", "fault", said, advice)])
    return results


def _end_of(text: str) -> str:
    """Return the last lines of a text, the first of them whole if there are several."""
    text = text.strip()
    end = text[-500:]
    return end.partition("\n")[2] if end != text and "\n" in end else end


def _text(results: Results) -> str:
    lines = []
    for row in results["findings"]:
        lines.append(f"{_MARKS[row['state']]}  {row['check']}: {row['said']}")
        if row["advice"]:
            lines.append(f"         {row['advice']}")
    for row in results["times"]:
        ours, theirs = row["easydist"] * 1e6, row["gloo"] * 1e6
        lines.append(f"time     {row['work']}: {ours:.0f} µs, gloo {theirs:.0f} µs")
    return "\n".join(lines)
