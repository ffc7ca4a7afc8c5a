"""A script on the ranks of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any, NoReturn

import click

from easydist import settings
from easydist.cli.survivor import shell_status
from easydist.cluster import script
from easydist.cluster.connection import connect, disconnect, is_here
from easydist.cluster.ranks import Ranks
from easydist.errors import EasydistError, PeerLostError, RemoteError


def launch(args: argparse.Namespace) -> int:
    """Run a script on ranks of a Ray cluster, and return when all have ended.

    Args:
        args: The parsed arguments.

    Returns:
        0, the exit status of the rank that failed first, 1 if Ray does not know it, 130 after Ctrl-C, or 143 after
        SIGTERM.

    Raises:
        click.UsageError: The script is not one of Python.
    """
    if args.no_python:
        raise click.UsageError("--on ray runs a Python script, or a module (-m)")
    came: list[int] = []
    try:
        _run(args, came)
    except KeyboardInterrupt:
        number = signal.SIGTERM if came else signal.SIGINT
        click.echo(f"easydist run: ended by {number.name}", err=True)
        return 128 + number
    except (RemoteError, PeerLostError) as error:
        click.echo(_report(error), err=True)
        return _status(error)
    except (EasydistError, ConnectionError, ImportError, RuntimeError, ValueError) as error:
        click.echo(f"easydist run: {error}", err=True)
        return 1
    return 0


def _run(args: argparse.Namespace, came: list[int]) -> None:
    """Run a script on ranks; SIGTERM, which is noted, ends them as Ctrl-C does."""

    def end(number: int, frame: object) -> NoReturn:
        came.append(number)
        raise KeyboardInterrupt  # Ray's waits raise one, whatever a handler raises

    size, cpus = int(args.nproc_per_node), 1.0 if args.cpus_per_rank is None else args.cpus_per_rank
    resources = {"CPU": cpus, "GPU": args.gpus_per_rank}
    asked = {name: amount for name, amount in resources.items() if amount}
    connection = connect(None, size * cpus)
    before = signal.signal(signal.SIGTERM, end)  # Ray's handler prints stacks of C++
    try:
        here = is_here(args.nodes or 1, {name: size * amount for name, amount in asked.items()})
        while not _is_done(args, asked, here):
            here = False
    finally:
        disconnect(connection)
        signal.signal(signal.SIGTERM, before)


def _is_done(args: argparse.Namespace, asked: dict[str, float], here: bool) -> bool:
    """Run the script on new ranks; False if it did not start.

    Args:
        args: The parsed arguments.
        asked: The resources of each rank.
        here: True if all ranks are expected on this machine, and need no copy of the working directory. They do not
            start the script if nodes have joined while they waited for resources.
    """
    folder = os.getcwd()
    name = args.training_script if args.module else os.path.relpath(args.training_script)
    if not here and not args.module and name.startswith(os.pardir + os.sep):
        raise ValueError(f"{name} is not in the working directory {folder}, which the nodes get")
    own = {name: os.environ[name] for name in settings.SETTINGS if name in os.environ and name != settings.JOB_KEY}
    env: dict[str, Any] = {"env_vars": own} | ({} if here else {"working_dir": folder})
    with Ranks(int(args.nproc_per_node), resources=asked, nodes=args.nodes, runtime_env=env) as ranks:
        if here and not is_here():
            return False
        with script.printed() as sink:
            ranks.run(script.main, sink, folder if here else "", args.module, name, args.training_script_args)
    return True


def _report(error: RemoteError | PeerLostError) -> str:
    """Return the text of an error without the last line of ``run``, which is for a driver that goes on."""
    if isinstance(error.__cause__, SystemExit):  # for which Python itself shows no traceback
        return str(error).partition(":\nTraceback")[0]
    *lines, last = str(error).splitlines()
    return "\n".join(lines if lines and lines[0].startswith("run:") else [*lines, last])


def _status(error: RemoteError | PeerLostError) -> int:
    """Return the exit status of the rank that failed first."""
    if isinstance(error, PeerLostError):
        return 1 if error.exit_status is None else shell_status(error.exit_status)
    code = error.__cause__.code if isinstance(error.__cause__, SystemExit) else 1
    return code % 256 if isinstance(code, int) else 1
