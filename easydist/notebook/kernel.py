"""The process of a rank: a reduced IPython kernel; ``python -m easydist.notebook.kernel``.

It has no history, completion, debugger or user profile: with them a rank would start later, and several ranks would
write to the same files.
"""

from __future__ import annotations

import ctypes
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

_PR_SET_PDEATHSIG = 1
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
    if sys.platform == "linux":  # a stopped process (SIGSTOP) has to go on to notice it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main() -> None:
    """Become the rank that the first argument describes."""
    gc.disable()  # all that is loaded stays: looking for garbage among it would take a quarter of the time
    settings = json.loads(sys.argv.pop())  # cells find no arguments
    watch(settings["lifeline"], settings["parent"], settings["folder"])
    sys.path[:] = settings["path"]
    from easydist.notebook.application import start  # after the path is set

    app = start(settings["connection_file"], settings["folder"])
    _join(app, settings["rank"], settings["size"], settings["folder"], settings["meeting"])
    gc.freeze()
    gc.enable()
    app.start()


def _join(app: Any, rank: int, size: int, folder: str, meeting: dict[str, Any]) -> None:
    from easydist.notebook.own_rank import OwnRank  # loads torch, while the notebook connects

    sys.modules["tqdm.autonotebook"] = _BarsAsText("tqdm.autonotebook")
    own_rank = OwnRank(rank, size, folder, app.shell.user_ns)
    own_rank.join(**meeting)
    app.shell.define(own_rank.first_names)
    app.kernel.own_rank = own_rank


def attend(rank: int, size: int, meeting: dict[str, Any], folder: str, connection_file: str) -> None:
    """Run the kernel in this process, which is a rank on Ray already, until the notebook lets it go.

    Args:
        rank: The rank.
        size: The number of ranks.
        meeting: The first meeting that it joins.
        folder: The folder of the kernel, which is removed at the end.
        connection_file: The file with the addresses to listen at.
    """
    import ray

    from easydist.cluster.world import enter

    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    from easydist.notebook.application import started

    del sys.argv[1:]  # cells find no arguments
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # an interrupt reaches the programs that cells run, too, and nothing else
    enter(meeting["variables"], ray.util.get_node_ip_address())
    try:
        with started(connection_file, folder) as app:
            _join(app, rank, size, folder, meeting)
            app.start()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _BarsAsText(types.ModuleType):
    """A module in place of the one that chooses widgets in a kernel, as a rank's widgets cannot reach the notebook."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tqdm.std"), name)


if __name__ == "__main__":
    main()
