"""The group of all commands."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

import click

from easydist.base.version import VERSION
from easydist.cli.bench import bench
from easydist.cli.check import check
from easydist.cli.env import env
from easydist.cli.run import run
from easydist.cli.top import top

_COMPLETION = """\b
To complete commands and options in bash (zsh and fish work alike):
  eval "$(_EASYDIST_COMPLETE=bash_source easydist)"
"""


class _Commands(click.Group):
    """The commands, with output that never fails because of a terminal or a file that cannot encode a character."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # In the C locale Python's way is surrogateescape, which refuses what is no byte of a file's name.
            if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
                stream.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # while torch loads; click would make an exit status of 1 of it
            ctx.exit(128 + signal.SIGINT)


@click.group(cls=_Commands, epilog=_COMPLETION, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION)
def main() -> None:
    """Launch, observe and check distributed PyTorch programs."""


for _command in (run, top, check, bench, env):
    main.add_command(_command)
