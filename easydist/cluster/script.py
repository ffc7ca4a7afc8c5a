"""A script as the main program of a rank."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence

from easydist.cluster.output import sent


def main(sink: str, folder: str, is_module: bool, name: str, arguments: Sequence[str]) -> None:
    """Run a script or a module in the process of a rank.

    Args:
        sink: The name of the actor to which its output goes.
        folder: The working directory; empty if this process is there.
        is_module: True if ``name`` is that of a module, else it is a path from the working directory.
        name: The script or the module.
        arguments: Its arguments.

    Raises:
        SystemExit: The script has ended with a status other than 0.
    """
    if folder:
        os.chdir(folder)
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)))
    sys.argv = [name, *arguments]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # Ray's own handler exits with 1
    with sent(sink, int(os.environ["RANK"])):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, int) or end.code is None:
                if not end.code:
                    return
                raise
            print(end.code, file=sys.stderr)
            raise SystemExit(1) from None
