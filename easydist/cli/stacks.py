"""The Python stacks of another process, from py-spy or in answer to a signal that the process handles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from easydist.liveness import stacks
from easydist.liveness.page import PeerPage

_FAILED = "no stack: "
_NONE = f"{_FAILED}pip install py-spy, or start the job with {stacks.VARIABLE}=SIGUSR2"
_SECONDS = 10.0


def stack_of(pid: int) -> str:
    """Return the stacks of a process's threads, or the reason why there are none.

    py-spy stops the process for some milliseconds, if the system allows this user to trace it. Otherwise the process
    gets a signal, if it handles that one (``easydist.liveness.stacks``).

    Args:
        pid: The process.

    Source: https://github.com/benfred/py-spy
    """
    told = _by_spy(pid)
    if told.startswith(_FAILED) and (page := PeerPage.find(pid)) is not None and (agreed := page.stacks()) is not None:
        return stacks.ask(pid, *agreed, _SECONDS) or told
    return told


def _by_spy(pid: int) -> str:
    folder = os.path.dirname(sys.executable)  # the environment may not be activated
    spy = shutil.which("py-spy", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if spy is None:
        return _NONE
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{_FAILED}py-spy did not answer within {_SECONDS:.0f} s"
    return done.stdout if done.returncode == 0 else f"{_FAILED}{done.stderr.strip()}"
