"""A script on the tasks of a SLURM job: one ``srun``, in the job of this shell or in one of its own."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple, TextIO

import click

from easydist.cli.rank import PR_SET_PDEATHSIG

_LABEL = re.compile(r" *(\d+): ?")
_ENDED = re.compile(
    r"srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+?)(?: \(core dumped\))?)$"
)
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


def launch(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Run a command in the tasks of a step, and return when all have ended.

    Args:
        args: The parsed arguments.
        command: The command line of a rank.

    Returns:
        0, the exit status of the rank that failed first, or 128 and the number of the signal that ended it or this
        process. With ``--survivors``: 0 if any rank has succeeded.

    Raises:
        click.UsageError: There is no ``srun`` here.
    """
    options, more = _options(args), shlex.split(args.slurm or "")
    step = ["srun", f"--kill-on-bad-exit={0 if args.survivors else 1}"]
    if args.dry_run:
        lines = [f"#SBATCH {option}" for option in [*options, shlex.join(more)] if option]
        click.echo("\n".join(["#!/bin/bash", *lines, shlex.join([*step, *command])]))
        return 0
    if shutil.which("srun") is None:
        raise click.UsageError("--on slurm needs srun; run this on a node of the cluster, or in a job")
    status, failed = _run([*step, "--label", *options, *more, *command])
    return 0 if args.survivors and failed < int(args.nproc_per_node) else status


def _options(args: argparse.Namespace) -> list[str]:
    """Return the options for the resources, which ``sbatch``, ``salloc`` and ``srun`` take alike."""
    size = int(args.nproc_per_node)
    given = {
        "nodes": args.nodes,
        "ntasks": size,
        "ntasks-per-node": size // args.nodes if args.nodes else None,
        "cpus-per-task": args.cpus_per_rank,
        "gpus-per-task": args.gpus_per_rank,
    }
    return [f"--{name}={value:g}" for name, value in given.items() if value is not None]


class _Failure(NamedTuple):
    """What a line of ``srun`` says about tasks that have failed."""

    report: str
    status: int
    ranks: int


def _run(command: Sequence[str]) -> tuple[int, float]:
    """Run ``srun``, show the lines of the tasks with their ranks, and report the first failure.

    Returns:
        The status, and the number of ranks that failed.
    """
    process = _started(command)
    ended: list[_Failure] = []
    errors = threading.Thread(target=_show, args=(process.stderr, sys.stderr, ended))
    with _signals_end(process) as got:
        errors.start()
        _show(process.stdout, sys.stdout, [])
        errors.join()
        status = process.wait()
    if got:
        click.echo(f"easydist run: ended by {signal.Signals(got[0]).name}", err=True)
        return 128 + got[0], math.inf
    if status and ended:
        click.echo(f"\n{ended[0].report}", err=True)
        return ended[0].status, sum(one.ranks for one in ended)
    return status if status >= 0 else 128 - status, math.inf if status else 0


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone: srun would ask for a second one
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Let the kernel end ``srun``, and so the tasks, when this process has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _signals_end(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM end ``srun``, which ends the tasks; yield the signals that have come."""
    got: list[int] = []

    def end(number: int, frame: object) -> None:
        got.append(number)
        process.send_signal(signal.SIGTERM if len(got) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        process.terminate()  # if it still runs
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(lines: IO[str] | None, to: TextIO, ended: list[_Failure]) -> None:
    """Show the lines of the tasks with their ranks, and note which tasks have failed."""
    for line in lines or ():
        if failure := _failure(line):
            ended.append(failure)
        label = _LABEL.match(line)
        to.write(line if label is None else f"[rank {label[1]}] {line[label.end() :]}")
        to.flush()


def _failure(line: str) -> _Failure | None:
    """Return what a line of ``srun`` says about tasks that have failed; None if it says nothing about them.

    Example:
        >>> _failure("srun: error: n1: task 1: Exited with exit code 3")
        _Failure(report='Rank 1 failed first, on n1: exit status 3.', status=3, ranks=1)
        >>> _failure("srun: error: n2: tasks 0,2-4: Killed")
        _Failure(report='Ranks 0,2-4 failed first, on n2: killed by SIGKILL.', status=137, ranks=4)
    """
    if not (found := _ENDED.match(line.rstrip())):
        return None
    node, tasks, code, name = found.groups()
    number = _SIGNALS.get(name, signal.SIGTERM)
    how = f"exit status {code}" if code else f"killed by {signal.Signals(number).name}"
    spans = [[int(end) for end in span.split("-")] for span in tasks.split(",")]
    count = sum(span[-1] - span[0] + 1 for span in spans)
    report = f"Rank{'' if count == 1 else 's'} {tasks} failed first, on {node}: {how}."
    return _Failure(report, int(code) if code else 128 + number, count)
