"""The process of a rank: a reduced IPython kernel; ``python -m easydist.notebook.kernel``.

It has no history, completion, debugger or user profile: with them a rank would start later, and several ranks would
write to the same files.
"""

from __future__ import annotations

import gc
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
"""Milliseconds between two checks of the parent. Its end closes the pipe, unless one of its children has it, too."""


def watch(lifeline: int, parent: int, folder: str) -> None:
    """End this process, and everything that it has started, once the notebook's process has ended.

    Args:
        lifeline: The read end of a pipe whose other end only that process has.
        parent: The pid of that process.
        folder: The folder to remove then.
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
    gc.disable()  # all that is loaded stays: looking for garbage among it would take a quarter of the time
    settings = json.loads(sys.argv.pop())  # cells find no arguments
    watch(settings["lifeline"], settings["parent"], settings["folder"])
    sys.path[:] = settings["path"]
    sys.modules["tqdm.autonotebook"] = _BarsAsText("tqdm.autonotebook")
    from easydist.notebook.application import start  # after the path is set

    app = start(settings["connection_file"], settings["folder"])
    from easydist.notebook.own_rank import OwnRank  # loads torch, while the notebook connects

    own_rank = OwnRank(settings["rank"], settings["size"], settings["folder"], app.shell.user_ns)
    own_rank.join(**settings["meeting"])
    app.shell.user_ns_hidden.update(app.shell.user_ns)
    app.kernel.own_rank = own_rank
    gc.freeze()
    gc.enable()
    app.start()


class _BarsAsText(types.ModuleType):
    """A module in place of the one that chooses widgets in a kernel, as a rank's widgets cannot reach the notebook."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tqdm.std"), name)


if __name__ == "__main__":
    main()
