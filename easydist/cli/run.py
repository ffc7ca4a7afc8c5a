"""``easydist run``: a script on several ranks of this machine, over ``torch.distributed.run``."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

_EXAMPLE = """\b
Example:
  easydist run train.py --lr 0.1            one rank per GPU, or 2 without GPUs
  easydist run -n 4 -m package.train        a module
  easydist run -n 2 -- ./train --lr 0.1     everything after -- or the script goes to it
  easydist run --nnodes 2 --rdzv-endpoint node1:29400 --rdzv-backend c10d train.py
  easydist run --on ray -n 16 --nodes 2 --gpus-per-rank 1 train.py
  easydist run --on slurm -n 16 -N 2 --slurm="--partition=gpu --time=60" train.py
"""


def _files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command(
    epilog=_EXAMPLE,
    options_metavar="[-n N] [-m] [--survivors] [--job-key FILE] [--on ray|slurm] [TORCHRUN OPTIONS]",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
    },
)
@click.argument(
    "arguments", metavar="SCRIPT [ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED, required=True, shell_complete=_files
)
def run(arguments: tuple[str, ...]) -> None:
    """Run a script on N ranks of this machine.

    Each line of their output begins with its rank. -n N is the number of ranks on this machine, and -m means that
    SCRIPT is a module. All options of torchrun are accepted, including those for several machines. If ranks fail, the
    traceback of the first one is printed at the end. With --survivors a rank that fails does not end the others, which
    continue with easydist.recover(). With --job-key the ranks sign what they write to the store; FILE is made if there
    is none, and every host needs it. With --on ray the ranks run on a Ray cluster, which gets the working directory: -n
    of them, on --nodes nodes, with --cpus-per-rank and --gpus-per-rank; torchrun's own options are refused there. With
    --on slurm they are the tasks of one srun, in the job of this shell or in one of its own; --slurm has further
    options for it, and --dry-run prints a script for sbatch instead.
    Ctrl-C ends everything that was started; a second one does not wait for it.
    """
    from easydist.cli.launch import launch, leave

    status = launch(arguments)
    if status > 128:
        leave(status)
    raise SystemExit(status)
