"""The group of all commands."""

from __future__ import annotations

import click

from easydist.cli.bench import bench
from easydist.cli.check import check
from easydist.cli.env import env
from easydist.cli.run import run
from easydist.cli.top import top

_COMPLETION = """\b
To complete commands and options in bash (zsh and fish work alike):
  eval "$(_EASYDIST_COMPLETE=bash_source easydist)"
"""


@click.group(epilog=_COMPLETION, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="easydist")
def main() -> None:
    """Launch, observe and check distributed PyTorch programs."""


for _command in (run, top, check, bench, env):
    main.add_command(_command)
