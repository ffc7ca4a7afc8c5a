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

from easydist import settings
from easydist.cli.rank import PR_SET_PDEATHSIG

_LABEL = re.compile(rb" *(\d+): ")
_LONGEST = 1024
"""The bytes after which srun begins another line with the label; a line of just these is followed by an empty one."""

_ENDED = re.compile(
    r"srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+?)(?: \(core dumped\))?)$"
)
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}
_ABORTED = "srun: Job step aborted"
_CUT_OFF = re.compile(rb"slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ DUE TO (TIME LIMIT|PREEMPTION)")
_WHY = {
    b"TIME LIMIT": "the job has reached its time limit",
    b"PREEMPTION": "a job of higher priority has preempted theirs",
}


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
    options, more = _options(args), _split(args.slurm or "")
    step = ["srun", *_step(args.survivors), "--label", *options]
    if args.dry_run:
        job = ["--no-kill"] * args.survivors + [shlex.join(more)] * bool(more)
        click.echo(_script(args, [*options, *job], [*step, *command]))
        return 0
    if shutil.which("srun") is None:
        raise click.UsageError("--on slurm needs srun; run this on a node of the cluster, or in a job")
    status, failed = _run([*step, *more, *command], _threads(args))
    return 0 if args.survivors and failed < int(args.nproc_per_node) else status


def _split(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise click.UsageError(f"--slurm={options!r}: {error}") from None


def _step(goes_on: bool) -> list[str]:
    """Return the options that say what happens when a task fails or a node is lost."""
    return ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"] if goes_on else ["--kill-on-bad-exit=1"]


def _threads(args: argparse.Namespace) -> int:
    """Return the number of threads of a rank."""
    return int(args.cpus_per_rank or 1)


def _script(args: argparse.Namespace, options: Sequence[str], command: Sequence[str]) -> str:
    """Return the same as a script for ``sbatch``."""
    lines = [f"#SBATCH {option}" for option in options]
    lines += [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{_threads(args)}}} PYTHONUNBUFFERED=1"]
    if args.job_key is not None:
        lines += [f'export {settings.JOB_KEY}="$(cat {shlex.quote(os.path.abspath(args.job_key))})"']
    return "\n".join(["#!/bin/bash", *lines, shlex.join(command)])


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
    """Tasks that have failed, as a line of ``srun`` reports them.

    Attributes:
        report: The text for the user.
        status: The exit status; None if only ``srun`` knows it.
        ranks: The number of tasks.
    """

    report: str
    status: int | None
    ranks: float


_ALL = _Failure("", None, math.inf)
"""The failure of a step that SLURM has ended."""


def _run(command: Sequence[str], threads: int) -> tuple[int, float]:
    """Run ``srun``, show the lines of the tasks with their ranks, and report the first failure.

    Returns:
        The status, and the number of ranks that failed.
    """
    process = _started(command, threads)
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
    own = status if status >= 0 else 128 - status
    first = max((one for one in ended if one.report), key=lambda one: one.ranks == math.inf, default=None)
    if first is None or not (own or first.ranks == math.inf):
        return own, math.inf if own else 0
    click.echo(f"\n{first.report}", err=True)
    # srun returns 0 if SLURM had to kill the ranks after a SIGTERM that they ignored.
    return first.status or own or 128 + signal.SIGTERM, sum(one.ranks for one in ended)


def _started(command: Sequence[str], threads: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)} | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone: srun would ask for a second one
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """Let the kernel end ``srun``, and so the tasks, when this process has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _signals_end(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
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


def _show(pipe: IO[bytes] | None, to: TextIO, ended: list[_Failure]) -> None:
    """Show the lines of the tasks with their ranks, and note which tasks have failed."""
    begun: dict[bytes, bytes] = {}
    for line in pipe or ():
        if (label := _LABEL.match(line)) is None:
            text = line.decode(errors="replace")
            ended += filter(None, [_failure(text)])
            to.write(text)
        else:
            rank, piece = label[1], line[label.end() :]
            ended += filter(None, [_cut_off(piece)])
            begun[rank] = begun.get(rank, b"") + (piece[:_LONGEST] if len(piece) > _LONGEST else piece)
            if len(piece) <= _LONGEST:
                to.write(f"[rank {rank.decode()}] {begun.pop(rank).decode(errors='replace')}")
        to.flush()
    for rank, rest in begun.items():
        to.write(f"[rank {rank.decode()}] {rest.decode(errors='replace')}\n")


def _cut_off(line: bytes) -> _Failure | None:
    """Return the failure of a step that SLURM has ended, if a line of its daemon says why.

    Example:
        >>> _cut_off(b"slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-28T14:19:43 DUE TO TIME LIMIT ***")
        _Failure(report='SLURM ended the ranks: the job has reached its time limit.', status=None, ranks=inf)
    """
    found = _CUT_OFF.match(line)
    return None if found is None else _Failure(f"SLURM ended the ranks: {_WHY[found[1]]}.", None, math.inf)


def _failure(line: str) -> _Failure | None:
    """Return the failure that a line of ``srun`` reports; None if it reports none.

    Example:
        >>> _failure("srun: error: n1: task 1: Exited with exit code 3")
        _Failure(report='Rank 1 failed first, on n1: exit status 3.', status=3, ranks=1)
        >>> _failure("srun: error: n2: tasks 0,2-4: Killed")
        _Failure(report='Ranks 0,2-4 failed first, on n2: killed by SIGKILL.', status=137, ranks=4)
        >>> _failure("srun: error: n2: task 0: Out Of Memory")
        _Failure(report='Rank 0 failed first, on n2: Out Of Memory.', status=None, ranks=1)
    """
    if line.startswith(_ABORTED):
        return _ALL
    if not (found := _ENDED.match(line.rstrip())):
        return None
    node, tasks, code, name = found.groups()
    number = _SIGNALS.get(name)
    how = f"exit status {code}" if code else name if number is None else f"killed by {signal.Signals(number).name}"
    spans = [[int(end) for end in span.split("-")] for span in tasks.split(",")]
    count = sum(span[-1] - span[0] + 1 for span in spans)
    report = f"Rank{'' if count == 1 else 's'} {tasks} failed first, on {node}: {how}."
    return _Failure(report, int(code) if code else None if number is None else 128 + number, count)
