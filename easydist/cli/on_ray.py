"""A script on the ranks of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import click

from easydist import settings
from easydist.cli.survivor import shell_status
from easydist.cluster import output, script
from easydist.cluster.connection import connect, disconnect, is_here
from easydist.cluster.ranks import Ranks
from easydist.errors import EasydistError, PeerLostError, RemoteError


def launch(args: argparse.Namespace) -> int:
    """Run a script on ranks of a Ray cluster, and return when all have ended.

    Args:
        args: The parsed arguments.

    Returns:
        0, the exit status of the rank that failed first, 1 if Ray does not know it, or 130 after Ctrl-C.

    Raises:
        click.UsageError: The script is not one of Python.
    """
    if args.no_python:
        raise click.UsageError("--on ray runs a Python script, or a module (-m)")
    try:
        return _run(args)
    except KeyboardInterrupt:
        click.echo("easydist run: ended by SIGINT", err=True)
        return 128 + signal.SIGINT
    except (RemoteError, PeerLostError) as error:
        *lines, _ = str(error).splitlines()  # the last one is for a driver that goes on
        click.echo("\n".join(lines), err=True)
        return _status(error)
    except (EasydistError, ConnectionError, ImportError, RuntimeError, ValueError) as error:
        click.echo(f"easydist run: {error}", err=True)
        return 1


def _run(args: argparse.Namespace) -> int:
    size, cpus = int(args.nproc_per_node), 1.0 if args.cpus_per_rank is None else args.cpus_per_rank
    has_connected = connect(None, size * cpus)
    try:
        folder, here = os.getcwd(), is_here(args.nodes or 1)
        name = args.training_script if args.module else os.path.relpath(args.training_script)
        if not here and not args.module and name.startswith(os.pardir + os.sep):
            raise ValueError(f"{name} is not in the working directory {folder}, which the nodes get")
        own = {name: os.environ[name] for name in settings.SETTINGS if name in os.environ and name != settings.JOB_KEY}
        env: dict[str, Any] = {"env_vars": own} | ({} if here else {"working_dir": folder})
        resources = {"CPU": cpus, "GPU": args.gpus_per_rank}
        asked = {name: amount for name, amount in resources.items() if amount}
        with Ranks(size, resources=asked, nodes=args.nodes, runtime_env=env) as ranks, output.printed() as sink:
            ranks.run(script.main, sink, folder if here else "", args.module, name, args.training_script_args)
    finally:
        if has_connected:
            disconnect()
    return 0


def _status(error: RemoteError | PeerLostError) -> int:
    """Return the exit status of the rank that failed first."""
    if isinstance(error, PeerLostError):
        return 1 if error.exit_status is None else shell_status(error.exit_status)
    code = error.__cause__.code if isinstance(error.__cause__, SystemExit) else 1
    return code % 256 if isinstance(code, int) else 1
