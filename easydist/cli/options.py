"""The options of ``easydist run``: torchrun's, those for clusters, and the file with the job key.

All of them are checked before any rank starts.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import resource
import secrets
import stat
import tempfile
import uuid
from collections.abc import Sequence
from typing import NoReturn

import click
import torch
from torch.distributed import run as torchrun

from easydist import settings
from easydist.cli import rendezvous

_OF_SLURM = {"slurm": "slurm", "dry_run": "dry-run"}
_OF_ALL = {"nodes": "nodes", "cpus_per_rank": "cpus-per-rank", "gpus_per_rank": "gpus-per-rank"}
_OWN = _OF_ALL | _OF_SLURM
_TAKES = {"on", *_OF_ALL, "nproc_per_node", "job_key", "module", "no_python", "training_script", "training_script_args"}
_ALSO = {"ray": set[str](), "slurm": {*_OF_SLURM, "survivors"}}
_INSTEAD = {"nnodes": "; use --nodes", "survivors": ": a lost rank ends the command there"}
_FILES, _FILES_OF_RANK = 20, 6
"""The descriptors that torchrun uses, and those for each rank: its output's files and its connections to the store."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, the script and its arguments.

    Args:
        arguments: The arguments of torchrun, ``-n`` for ``--nproc-per-node``, and easydist's own.

    Raises:
        click.UsageError: There is no such option or script, or the options for a cluster do not go together.
    """
    parser = torchrun.get_args_parser()
    parser.add_argument("-n", dest="nproc_per_node")
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--job-key")
    _add_for_clusters(parser)
    parser.error, parser.print_help = _fail, _print_help  # type: ignore[method-assign]
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=str(torch.cuda.device_count() or 2))
    if "PET_TEE" not in os.environ:
        parser.set_defaults(tee="3")
    if "PET_MASTER_ADDR" not in os.environ:
        parser.set_defaults(master_addr=None)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        raise click.NoSuchOption(unknown[0], possibilities=difflib.get_close_matches(unknown[0], known))
    _check_cluster(args, parser)
    if not args.module and not args.no_python:
        args.no_python = _has_own_interpreter(args.training_script)
    if args.no_python and os.path.isfile(args.training_script):
        args.training_script = os.path.abspath(args.training_script)  # PATH is searched for a bare name
    if args.standalone or _is_alone(args):
        _meet_on_loopback(args)
    return args


def _print_help(file: object = None) -> None:
    click.echo(click.get_current_context().get_help())


def _fail(message: str) -> NoReturn:
    if message.endswith("required: training_script, training_script_args"):  # the names of torchrun
        raise click.UsageError("Missing argument 'SCRIPT [ARGUMENTS]...'.")
    hint = ': write --slurm="--time=60"' if message.startswith("argument --slurm:") else ""
    raise click.UsageError(message + hint)


def _add_for_clusters(parser: argparse.ArgumentParser) -> None:
    """Add the options for a cluster."""
    parser.add_argument("--on", choices=[*_ALSO])
    parser.add_argument("--nodes", "-N", type=int)
    parser.add_argument("--cpus-per-rank", type=float)
    parser.add_argument("--gpus-per-rank", type=float)
    parser.add_argument("--slurm", metavar="OPTIONS")
    parser.add_argument("--dry-run", action="store_true")


def _check_cluster(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that the options for a cluster go together.

    Args:
        args: The parsed arguments.
        parser: Their parser: an option that a cluster does not take must have its default.

    Raises:
        click.UsageError: They do not.
    """
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    if args.on is None:
        for name, option in _OWN.items():
            if name in given:
                hint = "; did you mean --nnodes?" if name == "nodes" else ""
                raise click.UsageError(
                    f"--{option} needs --on {'slurm' if name in _OF_SLURM else 'ray or slurm'}{hint}"
                )
        return
    for name in given:
        if name not in _TAKES | _ALSO[args.on]:
            raise click.UsageError(f"--on {args.on} does not take --{name.replace('_', '-')}{_INSTEAD.get(name, '')}")
    if not args.nproc_per_node.isdigit():
        raise click.UsageError(f"--on {args.on} takes a number of ranks, got -n {args.nproc_per_node}")
    if not int(args.nproc_per_node) or (args.nodes is not None and args.nodes < 1):
        raise click.UsageError(f"--on {args.on} takes at least one rank and one node")
    if args.nodes and int(args.nproc_per_node) % args.nodes:
        raise click.UsageError(f"{args.nproc_per_node} ranks cannot be divided evenly among {args.nodes} nodes")
    amounts = (args.cpus_per_rank or 1.0, args.gpus_per_rank or 1.0)
    if args.on == "slurm" and not all(amount.is_integer() and amount > 0 for amount in amounts):
        raise click.UsageError("--on slurm takes whole numbers of CPUs and GPUs for each rank")


def _has_own_interpreter(script: str) -> bool:
    """True if a script's first line names an interpreter that is not Python.

    Raises:
        click.UsageError: There is no such file.
    """
    try:
        with open(script, "rb") as file:
            first = file.readline(256)
    except OSError as error:
        hint = (
            " (if it is a module, put -m before its name)" if "/" not in script and not script.endswith(".py") else ""
        )
        raise click.UsageError(f"cannot read {script}: {error.strerror}{hint}") from None
    return first.startswith(b"#!") and b"python" not in first and b"easydist" not in first


def _is_alone(args: argparse.Namespace) -> bool:
    """True if there are no other machines, and no address at which they could reach this one."""
    return (
        args.nnodes in ("1", "1:1")
        and args.rdzv_backend == "static"
        and not args.rdzv_endpoint
        and args.master_addr in (None, *_LOOPBACK)
    )


def _meet_on_loopback(args: argparse.Namespace) -> None:
    """Open the store where no other machine can reach it; at any free port, unless one is given."""
    port = 0 if args.standalone else args.master_port or 0
    args.standalone, args.rdzv_backend, args.rdzv_id = False, rendezvous.BACKEND, uuid.uuid4().hex
    args.rdzv_endpoint = f"127.0.0.1:{port}"
    rendezvous.register()


def check_settings() -> None:
    """Check the variables of all ranks.

    Raises:
        click.UsageError: One is malformed.
    """
    if malformed := settings.fault():
        raise click.UsageError(settings.text_of(malformed))


def check_values(args: argparse.Namespace) -> None:
    """Check the values of torchrun's options.

    Raises:
        click.UsageError: One is malformed.
    """
    logging.disable()  # torchrun warns once more when it runs
    try:
        config, _, _ = torchrun.config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        text = str(error).replace(
            "Unsupported nproc_per_node value:", "-n takes a number of ranks, cpu, gpu or auto, got"
        )
        raise click.UsageError(text) from None
    finally:
        logging.disable(logging.NOTSET)
    if args.rdzv_backend == "static" and not (args.rdzv_endpoint or args.master_addr):  # torchrun waits in silence
        raise click.UsageError(
            f"--nnodes {args.nnodes}: name the rendezvous on each machine: --rdzv-backend c10d --rdzv-endpoint "
            "HOST:PORT, or --node-rank N --master-addr HOST, with the host of node 0"
        )
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < config.max_nodes:  # nobody serves the store
        raise click.UsageError(
            f"--node-rank: {args.node_rank} is outside of --nnodes {config.max_nodes}; nodes count from 0"
        )
    least = {"-n": config.nproc_per_node >= 1, "--monitor-interval": config.monitor_interval > 0}
    if too_small := [option for option, is_enough in least.items() if not is_enough]:
        raise click.UsageError(f"{', '.join(too_small)}: give a number above 0")
    if not 0 <= (args.master_port or 0) < 1 << 16:
        raise click.UsageError(f"--master-port: {args.master_port} is no port")
    _warn_of_few_files(config.nproc_per_node)


def _warn_of_few_files(ranks: int) -> None:
    """Say that a limit is too low, because the errors of torch that follow do not."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_OF_RANK * ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        click.echo(
            f"easydist run: only {limit} files may be open, and {ranks} ranks need about {needed}: "
            f"raise the limit, such as by ulimit -n {max(1024, 2 * needed)}",
            err=True,
        )


def job_key(path: str) -> str:
    """Return the job key in a file; if there is no such file, make one with a random key.

    Args:
        path: The file. It must belong to this user, who alone may read it.

    Raises:
        click.UsageError: Others may read the file, or it has no key.
    """
    try:
        if not os.path.exists(path):
            _make_key(path)
        with open(path, encoding="ascii") as file:
            _check_owner(path, os.fstat(file.fileno()))
            key = file.read().strip()
    except OSError as error:
        raise click.UsageError(f"--job-key: cannot read or make {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if settings.fault({settings.JOB_KEY: key}):
        expected = settings.SETTINGS[settings.JOB_KEY].expects
        raise click.UsageError(
            f"--job-key: {path} has no key, which is {expected}. Remove the file, and easydist run makes a new one"
        )
    return key


def _check_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise click.UsageError(f"--job-key: {path} belongs to another user. Copy it to a file of your own")
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise click.UsageError(
            f"--job-key: other users may open {path} (mode {mode:04o}). Run chmod 600 {path}; if they may have read "
            "it, remove it instead, and easydist run makes a new one"
        )


def _make_key(path: str) -> None:
    """Make the file at once with its content, because other hosts may be starting with it, too."""
    descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))  # mode 0600
    try:
        with open(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        with contextlib.suppress(FileExistsError):  # another host was faster
            os.link(draft, path)
            click.echo(f"easydist run: made {path}; every host of the job needs this file", err=True)
    finally:
        os.unlink(draft)
