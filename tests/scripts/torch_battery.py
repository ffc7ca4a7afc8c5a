"""Run tests of torch's own battery for process groups on a backend, each in forked ranks.

python tests/scripts/torch_battery.py BACKEND WORLD_SIZE SECONDS [TEST …]

It prints one row of JSON for each test: its name, and its outcome on the ranks ("passed", "skipped", or the error).
Without names, all tests that need no GPU are run. The battery is ``torch.testing._internal``'s, which needs the package
``expecttest``.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

BACKEND, SIZE, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
FOLDER = tempfile.mkdtemp()
# The battery reads these when it is imported.
os.environ.update(BACKEND=BACKEND, WORLD_SIZE=str(SIZE), TEMP_DIR=FOLDER, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
warnings.simplefilter("ignore")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import easydist.process_group  # noqa: E402, F401

BASE = distributed_test.DistributedTest._DistTestBase


class Battery(distributed_test.TestDistBackend, BASE):
    """All tests of the battery; this script forks their ranks, which saves the imports."""


def run(name, rank, folder):
    """Run a test on one rank; return its outcome."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), TEMP_DIR=folder)
    limit = distributed_test.CUSTOM_PG_TIMEOUT.get(name, SECONDS)
    test = Battery(name)
    test.rank, test.file_name = rank, f"{folder}/store"
    dist.init_process_group(
        BACKEND, f"file://{folder}/store", timedelta(seconds=min(limit, SECONDS)), world_size=SIZE, rank=rank
    )
    with contextlib.suppress(AttributeError):
        test._barrier()
    method = getattr(Battery, name)
    try:
        method.__wrapped__(test) if hasattr(method, "__wrapped__") else method(test)
        test._barrier()
        dist.destroy_process_group()
    except unittest.SkipTest as reason:
        return f"skipped: {reason}"
    except SystemExit as end:  # the decorators of tests skip by an exit status
        return f"skipped: {end.code}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "passed"


def forked(name):
    """Run a test in forked ranks; return the outcome of each."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir()
    pids = []
    for rank in range(SIZE):
        if (pid := os.fork()) == 0:
            outcome = "no outcome"
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
            try:
                outcome = run(name, rank, str(folder))
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"[:300]
            finally:
                (folder / f"outcome-{rank}").write_text(outcome)
                os._exit(0)
        pids.append(pid)
    until = time.monotonic() + 2 * SECONDS
    left = set(pids)
    while left and time.monotonic() < until:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    files = [folder / f"outcome-{rank}" for rank in range(SIZE)]
    return [file.read_text() if file.exists() else "too slow" for file in files]


def main():
    names = sys.argv[4:] or sorted(name for name in dir(BASE) if name.startswith("test_"))
    for name in names:
        print(json.dumps({"test": name, "ranks": forked(name)}), flush=True)


if __name__ == "__main__":
    main()
