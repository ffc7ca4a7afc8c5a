"""Ranks of this machine, started by ``torch.distributed.run``, and the report of their failures."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import click
import psutil
from torch.distributed import DistNetworkError, run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from easydist import settings
from easydist.cli import on_ray, on_slurm, options, rank, survivor
from easydist.cli.failures import report
from easydist.cli.home import PIPE, home
from easydist.cli.lines import show_whole_lines

_PR_SET_CHILD_SUBREAPER = 36
_SECONDS = 5.0
_TOGETHER = 0.2
"""The seconds within which further signals count as one: ``timeout``, for example, sends each to a process and to its
group."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def launch(arguments: Sequence[str]) -> int:
    """Run a script on several ranks, and return when all have ended.

    Args:
        arguments: The arguments of torchrun, ``-n`` for ``--nproc-per-node``, ``--survivors`` and ``--job-key``.

    Returns:
        0, the exit status of the rank that failed first, or 128 and the number of the signal that ended the ranks.
        With ``--survivors``: 0 if any rank of this machine has succeeded.

    Raises:
        click.UsageError: There is no such option or script, an option's value is malformed, or a variable of easydist
            or the job's key is.

    Source: ``torch.distributed.run``
    """
    args = options.parsed(arguments)
    if args.job_key is not None:
        os.environ[settings.JOB_KEY] = options.job_key(args.job_key)
    options.check_settings()
    if args.on is not None:
        return on_ray.launch(args) if args.on == "ray" else on_slurm.launch(args, _command(args))
    with home() as folder:
        args.log_dir = args.log_dir or os.path.join(folder, "logs")  # without one, torch makes a folder that stays
        options.check_values(args)
        if args.survivors:
            _let_survivors_go_on(args, folder)
        _tie(args, folder)
        _prepare()
        status = 1
        try:
            with _killing_at_second_signal():
                status = _run(args) or (_of_survivors(folder) if args.survivors else 0)
        finally:
            if status:
                with _undisturbed():
                    _kill_children()
    return status


def leave(status: int) -> NoReturn:
    """End this process without waiting for its threads: torch's, which copy output, may never end after a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(args: argparse.Namespace) -> int:
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        return report(error.failures, Path(args.log_dir))
    except SignalException as error:
        click.echo(f"easydist run: ended by {error.sigval.name}", err=True)
        return 128 + error.sigval
    return 0


def _let_survivors_go_on(args: argparse.Namespace, folder: str) -> None:
    """Start each rank below a process that succeeds even if its rank fails."""
    ended = os.path.join(folder, "ended")
    os.mkdir(ended)
    pipe = os.path.join(folder, PIPE)
    _replace(args, [sys.executable, "-u", "-m", "easydist.cli.survivor", ended, pipe, *_command(args)])


def _tie(args: argparse.Namespace, folder: str) -> None:
    """Let each rank end with this process, however this process ends."""
    _replace(args, rank.command_of(os.path.join(folder, PIPE), _command(args)))


def _command(args: argparse.Namespace) -> list[str]:
    """Return the command line of a rank."""
    python = (
        [] if args.no_python else [os.getenv("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if args.module else [])]
    )
    return [*python, args.training_script, *args.training_script_args]


def _replace(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Set the command line of a rank."""
    args.no_python, args.module, args.run_path = True, False, False
    args.training_script, *args.training_script_args = command


def _of_survivors(folder: str) -> int:
    """Return 0 if any rank has succeeded, else the status of the first."""
    ended = list(survivor.statuses(os.path.join(folder, "ended")).values())
    return 0 if 0 in ended or not ended else survivor.shell_status(ended[0])


def _prepare() -> None:
    """Show the lines of ranks at once, prefixed with the rank, and silence torchrun's report of failures."""
    show_whole_lines()
    os.environ.setdefault(_PREFIX, "[rank ${rank}] ")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it, too, but prints five lines about it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").addFilter(_is_not_about_an_ended_store)
    if sys.platform == "linux":  # orphaned processes become our children
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _is_not_about_an_ended_store(record: logging.LogRecord) -> bool:
    """False for torch's traceback if the agent that serves the store has ended before this one, after all ranks."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.funcName == "_exit_barrier" and isinstance(error, DistNetworkError))


@contextlib.contextmanager
def _killing_at_second_signal() -> Iterator[None]:
    """Kill the ranks as soon as a second signal is to end this process: torchrun would wait 30 seconds once more."""
    if threading.current_thread() is not threading.main_thread():  # then torchrun does not handle signals, either
        yield
        return
    pipe, end = os.pipe()
    os.set_blocking(end, False)
    before = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    threading.Thread(target=_kill_at_second, args=(pipe,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(end)


def _kill_at_second(pipe: int) -> None:
    """Read the numbers of the signals that arrive; at the second one that ends processes, kill the children."""
    first = None
    while numbers := os.read(pipe, 64):
        if not any(number in _ENDING for number in numbers):
            continue
        first = first or time.monotonic()
        if time.monotonic() - first > _TOGETHER:
            _kill_children()
    os.close(pipe)


def _kill_children() -> None:
    """Kill everything that was started and still runs, including the children of ranks that have ended."""
    until = time.monotonic() + 2 * _SECONDS
    seen: set[psutil.Process] = set()
    while (left := set(psutil.Process().children(recursive=True)) - seen) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_SECONDS)
        seen |= left


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C: what is quick must not stop halfway and leave processes behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
