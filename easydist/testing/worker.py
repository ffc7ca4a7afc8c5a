"""The code of the pool's worker processes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from easydist.base import torch_groups
from easydist.base.wording import trace
from easydist.liveness.background import within
from easydist.state import ProcessState

_TIMEOUT = 60.0
"""The least time limit of a group's call, in seconds."""


@dataclass(frozen=True)
class Reference:
    """A function by name, so that the worker imports it itself. For a wrapped one it refers to the inner function."""

    module: str
    name: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Reference:
        """Return the reference to a function of a module.

        Raises:
            ValueError: The function cannot be found by its name.
        """
        name = getattr(fn, "__qualname__", "<nameless>")
        if "<" in name:
            raise ValueError(f"{name} cannot be imported by other processes: define it at the top of its module")
        return cls(fn.__module__, name)

    def roots(self) -> list[str]:
        """Return the folder below which its module is a file of that name, if it is one.

        It need not be in ``sys.path``: pytest's ``--import-mode=importlib`` imports tests by their file.
        """
        file, parts = getattr(sys.modules.get(self.module), "__file__", None) or "", self.module.split(".")
        found = Path(file).with_suffix("").parts if file else ()
        return [str(Path(*found[: -len(parts)]))] if [*found[-len(parts) :]] == parts else []

    def load(self) -> Callable[..., Any]:
        """Import the function, and return it."""
        value: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        inner: Callable[..., Any] = getattr(value, "each_rank", value)
        return inner


@dataclass(frozen=True)
class WorkerCall:
    """A call for one rank.

    Attributes:
        fn: The function.
        arguments: Its positional and keyword arguments, pickled: the worker imports their classes by ``path``.
        rank: The rank.
        world_size: The number of ranks.
        store: The file of the group's store.
        path: The ``sys.path`` of the rank.
        filters: The caller's warning filters.
        timeout: The time limit of the run, in seconds.
    """

    fn: Reference
    arguments: bytes
    rank: int
    world_size: int
    store: str
    path: list[str]
    filters: list[tuple[Any, ...]]
    timeout: float

    @property
    def group_timeout(self) -> timedelta:
        """The limit of the group. It is shorter than a long run's, so a rank that waits for nothing raises an error."""
        return timedelta(seconds=max(_TIMEOUT, self.timeout * 2 / 3))


@dataclass(frozen=True)
class Failure:
    """The error of a rank, and when it was noted, by the clock that all processes of the host share."""

    error: Exception
    traceback: str
    fatal: bool = False
    time: float = field(default_factory=time.monotonic)


def work(pipe: Connection, stacks: str) -> None:
    """Run tasks until there are no more, or the process that has the pool has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between tasks Ctrl-C is for that process only
    with contextlib.suppress(EOFError, ConnectionResetError), open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.dump_traceback(file=file)  # shows the end of later dumps, and that the signal may come
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank without exchanges must not leave while others connect
        torch.set_num_threads(1)
        multiprocessing.current_process().daemon = False  # it ends with its pool, but may start DataLoader workers
        gc.freeze()  # what the fork server has loaded is then not scanned, and copied, again and again
        while (task := pipe.recv()) is not None:
            sys.path[:] = task.path
            faulthandler.unregister(signal.SIGUSR1)  # a task may have taken the signal, as an event loop does
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
            pipe.send(_outcome(task))
            if dist.is_initialized():  # after the report, since the other ranks fail when the group ends
                dist.destroy_process_group()
            ProcessState._reset_state()


def _outcome(task: WorkerCall) -> Any:
    torch_groups.set_count(0)  # it numbers new groups; a failed one would leave a gap
    try:
        limit, place = task.group_timeout, dict[str, Any](rank=task.rank, world_size=task.world_size)
        store = FileStore(task.store, task.world_size)
        within(limit.total_seconds(), lambda: dist.init_process_group("gloo", store=store, timeout=limit, **place))
    except Exception as error:  # after a failed group this process's count of groups differs from its peers'
        return Failure(_portable(error), trace(error, __file__), fatal=True)
    try:
        with warnings.catch_warnings():
            _apply(task.filters)
            args, kwargs = _arguments(fn := task.fn.load(), task)
            with _interruptible():
                value = fn(*args, **kwargs)
        pickle.dumps(value)
        return value
    except BaseException as error:
        return Failure(_portable(error), trace(error, __file__))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C reach a task."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _apply(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, lineno in reversed(filters):
        warnings.filterwarnings(action, message, category, module, lineno)


def _arguments(fn: Callable[..., Any], task: WorkerCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the task's arguments, with the rank and the world size if ``fn`` has parameters of these names."""
    given = {"rank": task.rank, "world_size": task.world_size}
    args, kwargs = pickle.loads(task.arguments)
    try:
        names = list(inspect.signature(fn).parameters)
    except ValueError:  # some built-in functions have no signature
        names = []
    wanted = {name: value for name, value in given.items() if name in names}
    if not wanted:
        return args, kwargs
    others = [name for name in names if name not in wanted]
    if len(args) > len(others):
        raise TypeError(f"{fn!r} has no parameters for {len(args) - len(others)} of {len(args)} arguments")
    return (), {**dict(zip(others, args, strict=False)), **kwargs, **wanted}


class Verdict(Exception):
    """A stand-in for an exception by which a test says that it is skipped, or expected to fail.

    Attributes:
        name: The function of pytest that raises it.
        reason: Its text.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


_VERDICTS = {"Skipped": "skip", "SkipTest": "skip", "XFailed": "xfail"}
"""The names of the exceptions, and of pytest's functions that raise them; pytest need not be installed here."""


def _portable(error: BaseException) -> Exception:
    """Return the error itself if it can be pickled, else its text."""
    if (name := _VERDICTS.get(type(error).__name__)) is not None:
        return Verdict(name, str(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # a class of the test's own may raise anything
        copy = None
    return copy if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
