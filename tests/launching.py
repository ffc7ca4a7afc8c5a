"""Processes that a test starts, and how long it waits for them: limits grow with the load of the machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def patience():
    """How many times as long as on an idle machine a step may take; EASYDIST_TEST_PATIENCE sets it."""
    told = os.environ.get("EASYDIST_TEST_PATIENCE")
    return float(told) if told else 2 + os.getloadavg()[0] / (os.cpu_count() or 1)


def examples(count):
    """How many random calls or values a test draws: EASYDIST_STRESS is what it makes of 1200."""
    return max(1, count * int(os.environ.get("EASYDIST_STRESS", "1200")) // 1200)


def within(seconds):
    """The limit for a step that may take so long on an idle machine; only a step that hangs reaches it."""
    return seconds * patience()


def start(*command, env=os.environ, **options):
    """A process whose output is kept, in a session of its own."""
    return subprocess.Popen(
        [str(part) for part in command],
        env={name: str(value) for name, value in env.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finished(*processes, seconds=60):
    """The output and the errors of each process, once all have ended; nothing that they started goes on."""
    began = time.monotonic()
    try:
        return [_output(process, began, seconds) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _output(process, began, seconds):
    while True:
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            if time.monotonic() > began + within(seconds):  # asked now: the load may have grown since
                raise


def python(*arguments, status=0, seconds=60, **environment):
    """What a Python process prints and its errors; easydist and the tests are on its path, and it ends as expected."""
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    process = start(sys.executable, *arguments, env=os.environ | own | environment)
    ((out, err),) = finished(process, seconds=seconds)
    assert process.returncode == status, err
    return out, err


def launched(script, cases):
    """Of each case what every rank met, by rank, and how the ranks ended; and all that went to stderr.

    The script launches ranks of its own, for many cases at once.
    """
    out, err = python(script, *cases, seconds=90, GLOO_SOCKET_IFNAME="lo")
    found = {}
    for row in [json.loads(line) for line in out.splitlines() if line.startswith("{")]:
        rows, statuses = found.setdefault(row["case"], ({}, []))
        if "rank" in row:
            rows[row["rank"]] = row
        else:
            statuses += row["statuses"]
    return found, err
