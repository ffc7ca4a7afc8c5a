"""The process of a rank: an IPython kernel without what only a person needs; ``python -m easydist.notebook.kernel``.

History, completion, the debugger and the user's profile are left out: with them a rank starts later, and several ranks
would write to the same files.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import types
from typing import Any

_ALIVE = 1000
"""Milliseconds between two looks at the parent, whose end closes the pipe in any case but one: a child has it too."""


def watch(lifeline: int, parent: int, folder: str) -> None:
    """Begin to end this process, and all that it has started, once the notebook's process is gone.

    Args:
        lifeline: The read end of a pipe whose other end only that process has.
        parent: That process.
        folder: Removed then.
    """

    def wait() -> None:
        pipe = select.poll()
        pipe.register(lifeline, select.POLLIN)
        while not pipe.poll(_ALIVE) and os.getppid() == parent:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="easydist-lifeline", daemon=True).start()


def main() -> None:
    """Become the rank that the first argument describes."""
    settings = json.loads(sys.argv.pop())  # cells find no arguments
    watch(settings["lifeline"], settings["parent"], settings["folder"])
    sys.path[:] = settings["path"]
    sys.modules["tqdm.autonotebook"] = _BarsAsText("tqdm.autonotebook")
    from easydist.notebook.application import start  # after the path is set

    app = start(settings["connection_file"], settings["folder"])
    from easydist.notebook.member import Member  # loads torch, while the notebook connects

    member = Member(settings["rank"], settings["size"], settings["folder"], app.shell.user_ns)
    member.join(settings["epoch"])
    app.shell.user_ns_hidden.update(app.shell.user_ns)
    app.kernel.member = member
    app.start()


class _BarsAsText(types.ModuleType):
    """In place of the module that chooses widgets in a kernel: a rank's have no way to the notebook's page."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tqdm.std"), name)


if __name__ == "__main__":
    main()
