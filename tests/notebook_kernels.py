"""A real Jupyter kernel without a page, and the output of its cells."""

import contextlib
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field

import psutil
from launching import ROOT, within

from easydist.cli.ranks import LocalRanks


@dataclass
class Shown:
    """The output of a cell."""

    out: str = ""
    err: str = ""
    results: list = field(default_factory=list)
    displays: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    number: int = 0

    def hear(self, message):
        kind, content = message["msg_type"], message["content"]
        if kind == "stream" and content["name"] == "stdout":
            self.out += content["text"]
        elif kind == "stream":
            self.err += content["text"]
        elif kind == "execute_result":
            self.results.append(content["data"])
        elif kind == "display_data":
            self.displays.append(content["data"])
        elif kind == "error":
            self.errors.append(content)

    @property
    def lines(self):
        return self.out.splitlines()

    @property
    def error(self):
        """The text of its only error, without colours."""
        assert len(self.errors) == 1, self
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(self.errors[0]["traceback"]))


class Kernel:
    """A notebook's kernel."""

    def __init__(self):
        from jupyter_client.manager import KernelManager  # which loads for a while

        # A port might be taken in between, and so might a path in the working directory, which is the default.
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-")  # short, because the paths of sockets must be
        path = os.path.join(self._folder.name, "ipc")
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=path)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[:1]]), "OMP_NUM_THREADS": "1"}
        env.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would not capture what programs write
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=within(60))

    @property
    def pid(self):
        return self.manager.provisioner.process.pid

    def run(self, code, seconds=30, hook=None):
        """Run a cell, which may fail."""
        shown = Shown()

        def hear(message):
            shown.hear(message)
            if hook is not None:
                hook(shown)

        reply = self.client.execute_interactive(code, output_hook=hear, timeout=within(seconds), allow_stdin=False)
        shown.number = reply["content"]["execution_count"]
        return shown

    def good(self, code, seconds=30):
        """Run a cell that must not fail."""
        shown = self.run(code, seconds)
        assert not shown.errors, shown.error
        return shown

    def bad(self, code, seconds=30, hook=None):
        """Run a cell that must fail, and return its error."""
        return self.run(code, seconds, hook).error

    def interrupted_in(self, operation, code, rank=0):
        """Run a cell, interrupt it once a rank is in an operation (if one is named), and return its error."""
        asked = []  # so that it happens only once

        def interrupt(shown):
            if "ready" in shown.out and not asked:
                until(lambda: not operation or self.is_in(operation, rank))
                asked.append(rank)
                self.manager.interrupt_kernel()

        return self.bad(code, hook=interrupt)

    def is_in(self, operation, rank):
        """True if a rank of the notebook is in a call of that name."""
        told = [row.entry for group in LocalRanks(self.pid).look() for row in group]
        return any(row.rank == rank and row.is_in_call and row.place.startswith(operation) for row in told)

    def processes(self):
        """Return the ranks' processes."""
        return psutil.Process(self.pid).children(recursive=True)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._folder.cleanup()


def until(condition, seconds=20):
    """Wait for a condition, and fail after a time in which it should have come true."""
    deadline = time.monotonic() + within(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def kernel():
    """Start a kernel, and make sure that it and its ranks are gone afterwards."""
    made = Kernel()
    try:
        yield made
    finally:
        left = made.processes()
        made.close()
        _, alive = psutil.wait_procs(left, within(10))
        assert not alive
