"""A pool of worker processes that act as the ranks of a distributed program.

The workers are started once, from a fork server with torch loaded, and stay alive. Each run gives some of them a fresh
process group on a store of its own, so that no run affects the next.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from easydist.base.arguments import integer
from easydist.testing.worker import Failure, Reference, Verdict, WorkerCall, work

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

GRACE = 2.0
"""Seconds that the other ranks have after the first one has failed."""

DUMPED = 30.0
"""Seconds within which a stuck rank dumps its stacks, unless the test has replaced the signal handler."""

_IDENT = re.compile(r"hread (0x[0-9a-f]+)")


class Stuck(Exception):
    """A rank did not end in time. Its stacks are in the notes."""


class Died(Exception):
    """A rank's process ended during a run."""


class Pool:
    """Worker processes for as many ranks as have been requested.

    Args:
        timeout: The seconds that a run may take.

    Example:
        >>> import os
        >>> with Pool() as pool:
        ...     len(set(pool.run(os.getpid, 2)))
        2
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["easydist.testing.worker"])
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="easydist-testing-")
        self._runs = 0
        self._owner = os.getpid()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank of a fresh gloo group of ``world_size`` ranks.

        Args:
            fn: A function that the workers can import, defined at the top level of a module.
            world_size: The number of ranks.
            *args: Arguments for ``fn``. They must be picklable.
            timeout: Seconds; None means the pool's.
            **kwargs: Arguments for ``fn``. ``rank`` and ``world_size`` are added if ``fn`` has parameters of these
                names.

        Returns:
            The result of ``fn`` on each rank.

        Raises:
            TypeError: ``world_size`` is not an integer, or an argument cannot be pickled.
            ValueError: ``world_size`` is less than 1, or ``fn`` cannot be found by its name.
            ExceptionGroup: The errors of the ranks, the first failure first, each with its rank and traceback in its
                notes. Once one rank has failed, the others have two seconds; one that is still stuck then is reported
                as a ``Stuck`` with its stacks, and the pool's workers are replaced.
        """
        return self.run_with(fn, world_size, args, kwargs, timeout)

    def run_with(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None = None,
    ) -> list[Any]:
        """Do as ``run``, for arguments of any names, ``timeout`` and ``self`` among them."""
        if integer("world_size", world_size, "a number of ranks") < 1:
            raise ValueError(f"world_size={world_size}: at least one rank runs the function")
        self._grow(world_size)
        workers = self._workers[:world_size]
        store, reference = self._next_store(), Reference.of(fn)
        limit, path = timeout or self.timeout, [*sys.path, *reference.roots()]
        try:
            for rank, worker in enumerate(workers):
                arguments = _encoded(tuple(args), dict(kwargs))  # for each rank: a tensor's memory is sent once
                task = WorkerCall(reference, arguments, rank, world_size, store, path, _filters(), limit)
                worker.pipe.send(task)
            outcomes = self._collect(workers, limit)
        except BaseException:  # Ctrl-C, for instance: an outcome that comes later must not count for the next run
            self._restart()
            raise
        failures = [(rank, outcome) for rank, outcome in outcomes if isinstance(outcome, Failure)]
        failures.sort(key=lambda each: each[1].time)
        if any(failure.fatal for _, failure in failures):
            self._restart()
        if failures:
            _raise(failures, world_size)
        return [value for _, value in sorted(outcomes, key=lambda outcome: outcome[0])]

    def _next_store(self) -> str:
        """Return a new file for a store. Nobody removes it before the folder: ranks may still write to it then.

        Writing to a removed file would create a new one, which the other ranks' stores would read from the middle.
        """
        self._runs += 1
        return str(Path(self._folder.name) / f"store-{self._runs}")

    def _grow(self, world_size: int) -> None:
        for worker in [each for each in self._workers if not each.is_alive()]:
            self._workers.remove(worker)
            text = f"{worker.ending()} after its last run, which may have caused it; another one takes its place"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._context, self._folder.name))

    def _collect(self, workers: list[_Worker], timeout: float) -> list[tuple[int, Any]]:
        """Return the outcomes in the order in which they arrive."""
        outcomes: list[tuple[int, Any]] = []
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), left):
                rank = waiting.pop(ready)
                outcomes.append((rank, workers[rank].receive()))
                if isinstance(outcomes[-1][1], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        stuck = [(rank, workers[rank]) for rank in waiting.values()]
        return outcomes + [
            (rank, Failure(Stuck(f"rank {rank} did not end"), worker.stacks(), True)) for rank, worker in stuck
        ]

    def _restart(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def close(self) -> None:
        """End the workers."""
        if os.getpid() == self._owner:
            for worker in self._workers:
                worker.end()
            self._workers.clear()
            self._folder.cleanup()


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self, context: Any, folder: str) -> None:
        self.pipe, theirs = context.Pipe()
        self._stacks = tempfile.NamedTemporaryFile(dir=folder, suffix=".stacks", delete=False)  # noqa: SIM115
        self._process = context.Process(target=work, args=(theirs, self._stacks.name), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(GRACE)
            return Failure(Died(self.ending()), "", True)

    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def ending(self) -> str:
        return f"the process ended with exit code {self._process.exitcode}"

    def stacks(self) -> str:
        """Return the current stacks of all its threads."""
        path = Path(self._stacks.name)
        if not (first := path.read_text()):  # the signal would end a process that has not come so far
            return ""
        dump = ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + DUMPED
        while not is_whole(dump, first) and self._process.is_alive() and time.monotonic() < deadline:
            self._process.join(0.01)
            dump = path.read_text()[len(first) :]
        return dump if self._process.is_alive() else f"{dump}Meanwhile {self.ending()}"

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self._process.join(GRACE)
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.pipe.close()
        self._stacks.close()


def is_whole(dump: str, first: str) -> bool:
    r"""True if a ``faulthandler`` dump of all threads is complete.

    It is written line by line, straight from the signal handler, so that it also shows a process stuck in C; and no
    mark is written at the end. But the main thread comes last, and its outermost frames never change: a dump made at
    the start shows the end of every later one.

    Args:
        dump: The part written so far.
        first: A dump that the main thread made of itself, before any task and any other thread.

    Example:
        >>> first = "Current thread 0x1 (most recent call first):\n  File a, line 9 in work\n  File b, line 1 in run\n"
        >>> dump = "Thread 0x1 (most recent call first):\n  File c, line 5 in wait\n  File a, line 9 in work\n"
        >>> is_whole(dump, first), is_whole(dump + "  File b, line 1 in run\n", first)
        (False, True)
    """
    header, _, frames = first.partition("\n")
    main, outermost = _IDENT.findall(header), frames.partition("\n")[2]
    thread = dump.rpartition("\n\n")[2]
    if thread == "...\n":  # more threads than faulthandler shows
        return True
    is_main = bool(main) and main == _IDENT.findall(thread.partition("\n")[0])
    return is_main and thread.endswith((outermost, "\n  ...\n"))  # the dots: more frames than it shows


def _encoded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the arguments for a rank.

    Raises:
        TypeError: One of them cannot be pickled; the text names it.
    """
    try:
        return bytes(ForkingPickler.dumps((args, kwargs)))
    except Exception as error:
        named = [(f"argument {i}", value) for i, value in enumerate(args)] + [(f"{k}=", v) for k, v in kwargs.items()]
        name = next((name for name, value in named if not _is_portable(value)), "an argument")
        raise TypeError(
            f"{name} cannot be pickled, so it cannot be sent to the ranks: {error}; make it in the function itself"
        ) from error


def _is_portable(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:  # a class may raise anything
        return False
    return True


def _filters() -> list[tuple[Any, ...]]:
    """Return the caller's warning filters, so that the same warnings are errors in the workers."""
    return [
        (action, getattr(message, "pattern", message) or "", category, getattr(module, "pattern", module) or "", lineno)
        for action, message, category, module, lineno in warnings.filters
    ]


def _raise(failures: list[tuple[int, Failure]], world_size: int) -> None:
    if isinstance(verdict := failures[0][1].error, Verdict):  # others may have failed because this rank has left
        _end_test(verdict)
    failures = [(rank, failure) for rank, failure in failures if not isinstance(failure.error, Verdict)]
    for rank, failure in failures:
        note = f"on rank {rank} of {world_size}:\n{failure.traceback}"
        vars(failure.error).setdefault("__notes__", []).append(note)  # add_note is new in Python 3.11
    raise ExceptionGroup(f"{len(failures)} of {world_size} ranks failed", [failure.error for _, failure in failures])


def _end_test(verdict: Verdict) -> None:
    import pytest

    getattr(pytest, verdict.name)(verdict.reason)


_default: Pool | None = None


def default_pool() -> Pool:
    """Return the pool of this process, created at the first call and ended at exit."""
    global _default
    if _default is None or _default._owner != os.getpid():
        _default = Pool()
        atexit.register(_default.close)
    return _default


def close_default_pool() -> None:
    """End the pool of this process, if there is one."""
    global _default
    if _default is not None:
        _default.close()
        _default = None
