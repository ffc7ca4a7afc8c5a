"""The process of a rank: a reduced IPython kernel; ``python -m easydist.notebook.kernel``.

It has no history, completion, debugger or user profile: with them a rank would start later, and several ranks would
write to the same files.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import types
from typing import Any

_ALIVE = 1000
"""Milliseconds between two checks of the watcher whether the rank still runs."""


def watch(lifeline: int, parent: int, folder: str) -> None:
    """End this process, and everything that it has started, once the notebook's process has ended.

    A child does so, because this process may be stopped then, or stuck in C code that holds the GIL.

    Args:
        lifeline: The read end of a pipe whose other end only that process has.
        parent: The pid of that process.
        folder: The folder to remove then.
    """
    ends = [lifeline, *_end_of(parent)]
    rank = os.getpid()
    if os.fork():
        for end in ends:
            os.close(end)
        return
    try:
        os.setsid()  # not in the group that it kills, and that a cell's interruption reaches
        _close_all_but(ends)
        if _outlives(rank, ends):
            with contextlib.suppress(OSError):
                os.killpg(rank, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _end_of(process: int) -> list[int]:
    """Return a descriptor that reads the end of a process: the pipe does not, if one of its children has it, too."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return [os.pidfd_open(process)]
    return []


def _close_all_but(kept: list[int]) -> None:
    kept = sorted(kept)
    for first, end in zip([-1, *kept], [*kept, kept[-1] + 100], strict=True):
        os.closerange(first + 1, end)


def _outlives(rank: int, ends: list[int]) -> bool:
    """Wait for the notebook's end and return True, or for the rank's, and return False."""
    notebook = select.poll()
    for end in ends:
        notebook.register(end, select.POLLIN)
    is_there = True
    while is_there:
        is_there = os.getppid() == rank  # asked before: both may be killed, the rank a moment earlier
        if notebook.poll(_ALIVE):
            return True
    return False


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
