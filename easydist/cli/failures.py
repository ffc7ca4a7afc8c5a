"""The first rank that failed, and the reason."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from easydist.cli.survivor import end_of, shell_status

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_BEGINNING = "Traceback (most recent call last):"
_IN_GROUP = "  | "
"""The beginning of a line of a group of exceptions; those of its members are indented further."""

_CHAINED = ("During handling of the above", "The above exception was")
_BECAUSE_OF_OTHERS = ("easydist.errors.RemoteError", "easydist.errors.PeerLostError")
_LINES = 20
_LONGEST = 1 << 22
"""The most bytes of a rank's output to read: a rank may have written gigabytes."""

_OF_TORCH = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""The prefix that torch writes before each line of an exception if there is a process group."""


def report(failures: Mapping[int, ProcessFailure], logs: Path) -> int:
    """Print the failed ranks, the first one with its traceback, and return the exit status of that one.

    Args:
        failures: The failures by rank.
        logs: The folder in which torchrun has kept the ranks' output.
    """
    said = {rank: _said(failure, logs) for rank, failure in failures.items()}
    noticed = next(iter(failures))  # torchrun names those that ended by themselves before those that it then ended
    first, *others = sorted(failures, key=lambda rank: _order(failures[rank], said[rank], rank == noticed))
    when = "because of another rank" if _is_because_of_others(said[first][1]) else "first"
    click.echo(f"\nRank {first} failed {when}: {_how(failures[first], said[first][1])}.", err=True)
    click.echo(traceback_in(said[first][1]) or _nothing(failures[first]), err=True)
    if _is_full(logs):  # then a rank's own words are lost
        click.echo(f"No space is left in {logs}, where the ranks' output is kept: set TMPDIR or --log-dir.", err=True)
    for rank in others:
        how = _how(failures[rank], said[rank][1])
        click.echo(f"Rank {rank}: {how}. {_last_line(said[rank][1])}".rstrip(), err=True)
    return _status(failures[first], said[first][1])


def _is_full(folder: Path) -> bool:
    """True if no space is left for a folder's files; False if it has been removed."""
    try:
        return not shutil.disk_usage(folder).free
    except OSError:
        return False


def _status(failure: ProcessFailure, said: str) -> int:
    return 1 if _was_ending(failure, said) else shell_status(failure.exitcode)


def _said(failure: ProcessFailure, logs: Path) -> tuple[float, str]:
    """Return the time of a rank's last output to its stderr, and the end of that output."""
    found = [(path.stat().st_mtime, path) for path in logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")]
    if not found:
        return float(failure.timestamp), ""
    time, path = max(found)
    with path.open(errors="replace") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST))
        return time, file.read()


def _order(failure: ProcessFailure, said: tuple[float, str], is_noticed: bool) -> tuple[bool, bool, float]:
    """Sort failures caused by other ranks last, and ranks that the launcher ended after those that ended themselves."""
    was_ended = failure.exitcode == -signal.SIGTERM and not is_noticed
    is_no_cause = _is_because_of_others(said[1]) or (was_ended and not _was_ending(failure, said[1]))
    return is_no_cause, was_ended, said[0]


def _is_because_of_others(said: str) -> bool:
    return _last_line(said).startswith(_BECAUSE_OF_OTHERS)


def _was_ending(failure: ProcessFailure, said: str) -> bool:
    """True if a rank had raised before the launcher ended it, because ranks that waited for it had ended first."""
    return failure.exitcode == -signal.SIGTERM and _BEGINNING in said and not _is_because_of_others(said)


def _how(failure: ProcessFailure, said: str) -> str:
    if _was_ending(failure, said):
        return f"process {failure.pid} was terminated by SIGTERM after its exception"
    return end_of(failure.pid, failure.exitcode)


def _nothing(failure: ProcessFailure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "It left no traceback. The system sends SIGKILL if memory runs out: see dmesg."
    return "It left no traceback."


def _last_line(text: str) -> str:
    """Return the last unindented line of the last traceback, which names the exception."""
    lines = [line.removeprefix(_IN_GROUP) for line in traceback_in(text).splitlines()]
    lines = [line for line in lines if line and not line[0].isspace()]
    named = [line for line in lines if line.partition(":")[0].replace(".", "").isidentifier()]
    return named[-1] if named else ""


def _is_in_group(line: str) -> bool:
    """True if a line belongs to a member of a group of exceptions."""
    return line.lstrip().startswith("|")


def traceback_in(text: str) -> str:
    r"""Return the last traceback in the output of a process, with those that led to it.

    If there is none, return the last lines.

    Args:
        text: The output.

    Example:
        >>> first = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: b'
        >>> traceback_in(f"a warning\n{first}") == first
        True
    """
    lines = _OF_TORCH.sub("", text).rstrip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(_BEGINNING) and not _is_in_group(line)]
    if not starts:
        return "\n".join(lines[-_LINES:])
    start = starts.pop()
    while starts and lines[start - 2].startswith(_CHAINED):
        start = starts.pop()
    return "\n".join(lines[start:])
