"""The options of ``easydist run`` for clusters, and what each kind of cluster takes."""

from __future__ import annotations

import argparse

import click

_OF_SLURM = {"slurm": "slurm", "dry_run": "dry-run"}
_OF_ALL = {"nodes": "nodes", "cpus_per_rank": "cpus-per-rank", "gpus_per_rank": "gpus-per-rank"}
_OWN = _OF_ALL | _OF_SLURM
_TAKES = {"on", *_OF_ALL, "nproc_per_node", "job_key", "module", "no_python", "training_script", "training_script_args"}
_ALSO = {"ray": set[str](), "slurm": {*_OF_SLURM, "survivors"}}
_INSTEAD = {"nnodes": "; use --nodes", "survivors": ": a lost rank ends the command there"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for a cluster."""
    parser.add_argument("--on", choices=[*_ALSO])
    parser.add_argument("--nodes", "-N", type=int)
    parser.add_argument("--cpus-per-rank", type=float)
    parser.add_argument("--gpus-per-rank", type=float)
    parser.add_argument("--slurm", metavar="OPTIONS")
    parser.add_argument("--dry-run", action="store_true")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that the options go together.

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
