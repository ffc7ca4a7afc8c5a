"""Functions for scripts that fork their ranks, so that torch is loaded only once."""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence

from launching import free_port

finalizers: list[weakref.finalize] = []
"""Those that take torch's operators back one by one, which takes 30 ms; found before ranks are forked."""


def statuses(pids: Sequence[int]) -> list[int]:
    """Return the exit statuses of these children, negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@contextlib.contextmanager
def store_of_an_agent(exists: bool) -> Iterator[dict[str, object]]:
    """Let a process serve the store, as the agent of torchrun does, and give the variables that say so."""
    if not exists:
        yield {}
        return
    pid, port = _serve_a_store()
    yield {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.kill(pid, signal.SIGKILL)
    statuses([pid])


def _serve_a_store() -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(writer, f"{store.port}".encode())
        signal.pause()
    return pid, int(os.read(reader, 16))


def end() -> None:
    """End a process with all that runs at exit, but leave its objects: to destroy them takes most of its time."""
    for finalizer in finalizers:
        finalizer.atexit = False
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def forked(
    size: int, work: Callable[[int], None], *, whole: Sequence[int] | None = (0,), **environment: object
) -> list[int]:
    """Fork the ranks of a world, each in the environment of a launcher, and return their pids.

    Args:
        size: The number of ranks.
        work: ``work(rank)`` is what a rank does.
        whole: The ranks that end as any program does, the others by ``end``; None for all. Over gloo one does, since
            its threads are C++, which may abort the process then.
        environment: More variables.
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": size} | environment
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                {name: str(value) for name, value in variables.items()}, RANK=str(rank), LOCAL_RANK=str(rank)
            )
            faulthandler.enable()
            work(rank)
            sys.exit() if whole is None or rank in whole else end()
        pids.append(pid)
    return pids


def settle() -> None:
    """Prepare this process to be forked often: what each rank would load is loaded once."""
    "localhost".encode("idna")
    if "easydist" in sys.modules:  # else the ranks load it themselves, in an environment of their own
        importlib.import_module("easydist.verbs.gather")
        importlib.import_module("easydist.verbs.objects")
    finalizers.extend(
        one for one, known in weakref.finalize._registry.items() if known.func.__module__ == "torch.library"
    )
    gc.collect()
    gc.freeze()  # objects loaded before the fork are then not scanned and copied, which saves half a second a rank


def side_by_side(count: int, cases: Sequence[str], launch: Callable[[str], None]) -> None:
    """Launch ``count`` cases at a time, since they mostly wait."""
    settle()
    pids = []
    for first in range(count):
        pid = os.fork()
        if pid == 0:
            for case in cases[first::count]:
                launch(case)
            end()
        pids.append(pid)
    sys.exit(any(statuses(pids)))
