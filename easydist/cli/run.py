"""``easydist run``: a script on several ranks of this machine, over ``torch.distributed.run``."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from easydist.cli.loading import loading

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
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument(
    "arguments", metavar="SCRIPT [ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED, required=True, shell_complete=_files
)
def run(arguments: tuple[str, ...]) -> None:
    """Run a script on several ranks, on this machine or a cluster.

    Each line of output begins with its rank. If ranks fail, the traceback of the first one is printed at the end.
    Ctrl-C ends everything that was started; a second one does not wait for it.

    \b
      -n N            the number of ranks (on this machine, without --on)
      -m              SCRIPT is a module
      --survivors     a rank that fails does not end the others, which
                      continue with easydist.recover()
      --job-key FILE  sign what the ranks write to the store; the file is made
                      if there is none, and every host needs it

    All options of torchrun are accepted, including those for several machines; torchrun --help lists them. With
    --on ray or --on slurm the following ones take their place:

    \b
      --on ray        run on a Ray cluster, which gets the working directory
      --on slurm      run as the tasks of one srun, in this shell's job or in
                      one of its own
      --nodes N       the same number of ranks on each of N nodes
                      (slurm: also -N)
      --cpus-per-rank N, --gpus-per-rank N
                      the resources of each rank
      --slurm OPTIONS further options for srun
      --dry-run       slurm: print a script for sbatch, and start nothing
    """  # noqa: D301 - click reads the control character
    with loading():
        from easydist.cli.launch import launch, leave

    status = launch(arguments)
    if status > 128:
        leave(status)
    raise SystemExit(status)
