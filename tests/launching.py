"""Processes that tests start, and time limits for them that grow with the load of the machine."""

import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
OWN = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}

MOST = 12
"""The highest patience: on a machine that is busier than that, nobody waits for the tests any more."""

crashes = []
"""What launched processes have written before they crashed or were killed as too slow; a failing test shows it."""


def patience():
    """Return the factor by which a step may take longer than on an idle machine, or EASYDIST_TEST_PATIENCE if set."""
    told = os.environ.get("EASYDIST_TEST_PATIENCE")
    return float(told) if told else min(MOST, 2 + os.getloadavg()[0] / (os.cpu_count() or 1))


def examples(count):
    """Return the number of random calls or values for a test: EASYDIST_STRESS scales it, relative to 1200.

    ``make quick`` draws a quarter of them.
    """
    return max(1, count * int(os.environ.get("EASYDIST_STRESS", "1200")) // 1200)


IS_STRESS = int(os.environ.get("EASYDIST_STRESS", "0")) >= 1200
"""True under ``make stress``, which also runs all the cases and tests of which ``make test`` runs a sample."""


def sampled(cases, every=2):
    """Return each second of these cases, or another share of them; under ``make stress`` all."""
    return cases if IS_STRESS else cases[::every]


def within(seconds):
    """Return the limit for a step that may take this long on an idle machine. Only a step that hangs reaches it."""
    return seconds * patience()


def start(*command, env=os.environ, **options):
    """Start a process in a session of its own, and capture its output."""
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
    """Return the output and the errors of each process once all have ended, and kill everything they started."""
    began = time.monotonic()
    is_late = True
    try:
        written = [_output(process, began, seconds) for process in processes]
        is_late = False
        return written
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            written = process.communicate()
            crashes.extend([f"{process.args}\n{text[-8000:]}" for text in written] if is_late else [])


def _output(process, began, seconds):
    limit = 0
    while True:
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            limit = max(limit, within(seconds))  # the load may have grown; what began under it has limits like that
            if time.monotonic() > began + limit:
                raise


def python(*arguments, status=0, seconds=60, interpreter=sys.executable, **environment):
    """Run Python with easydist and the tests on its path, check its exit status, and return its output and errors."""
    process = start(interpreter, *arguments, env=os.environ | OWN | environment)
    ((out, err),) = finished(process, seconds=seconds)
    assert process.returncode == status, err
    return out, err


def forked(*arguments, **options):
    """As ``python``, in a fork of a process that has torch loaded: for all that is not about how Python starts."""
    return python(*arguments, interpreter=fork(), **options)


@functools.cache
def fork(*modules):
    """Return the path of an interpreter that runs Python's arguments in a fork of the fork server of these tests.

    The server has torch loaded, or one of its own has these modules, too, which several processes need.
    It is a small process that passes on its environment, its streams and the signals that it gets, and ends as the
    fork does. The fork has a pid and a parent of its own, and its process group ends with it.
    """
    folder = Path(tempfile.mkdtemp(prefix="fork-"))  # short, because the paths of sockets must be
    with socket.socket(socket.AF_UNIX) as listener, (folder / "stderr").open("w") as errors:
        listener.bind(f"{folder}/socket")
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, SCRIPTS / "fork_server.py", str(listener.fileno()), *modules],
            env={name: value for name, value in (os.environ | OWN).items() if name != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    atexit.register(_end, server, folder, os.getpid())
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {SCRIPTS}/forked.py {folder} "$@"\n')
    interpreter.chmod(0o700)
    return interpreter


def in_a_child(call):
    """Return the text of the error that a call raises in a forked child; empty if it raises none."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gloo has threads
        child = os.fork()
    if not child:
        try:
            call()
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def free_port():
    """Return a port that nobody else is given while this process and its forks live.

    The system hands out higher ones, also to the process that connects next, so one that was free may be taken before
    it is used. An abstract socket holds the port among the tests.
    """
    for port in random.sample(range(20_000, 29_000), 100):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as holder, socket.socket() as probe:
            holder.bind(f"\0easydist-port-{port}")
            probe.bind(("127.0.0.1", port))
            os.dup(holder.fileno())  # stays open
            return port
    raise AssertionError("no port is free")


def _end(server, folder, owner):
    """End the fork server and remove its folder, unless this is a fork of the process that has started it."""
    if os.getpid() == owner:
        server.kill()  # if this process is killed, it ends with its stdin
        server.communicate()
        shutil.rmtree(folder)


def launched(script, cases, **environment):
    """Return by case each rank's outcome, by rank, and the exit statuses; and everything written to stderr.

    The script launches ranks of its own, for many cases at once.
    """
    out, err = forked(script, *cases, seconds=90, GLOO_SOCKET_IFNAME="lo", **environment)
    found = {}
    for row in [json.loads(line) for line in out.splitlines() if line.startswith("{")]:
        rows, statuses = found.setdefault(row["case"], ({}, []))
        if "rank" in row:
            rows[row["rank"]] = row
        else:
            statuses += row["statuses"]
    if crashed := [case for case, (_, ends) in found.items() if {1, -signal.SIGABRT, -signal.SIGSEGV} & {*ends}]:
        lines = [line for line in err.splitlines() if not line.startswith("frame #")]
        crashes.append("\n".join([*crashed, *lines])[-20_000:])
    return found, err
