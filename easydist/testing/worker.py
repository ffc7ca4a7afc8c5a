"""What runs in a worker process of the pool."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from easydist.state import ProcessState

_TIMEOUT = 60.0
"""Seconds that a group has at least for a call."""


@dataclass(frozen=True)
class Reference:
    """A function by name, so that the worker imports it itself; a wrapped one means the body inside."""

    module: str
    name: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Reference:
        """The reference to a function of a module.

        Raises:
            ValueError: The function is not to be found by its name.
        """
        name = getattr(fn, "__qualname__", "<nameless>")
        if "<" in name:
            raise ValueError(f"{name} cannot be imported by other processes: define it at the top of its module")
        return cls(fn.__module__, name)

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        value: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        return getattr(value, "each_rank", value)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """A call for one rank."""

    fn: Reference
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    store: str
    path: list[str]
    filters: list[tuple[Any, ...]]
    timeout: float

    @property
    def group_timeout(self) -> timedelta:
        """Shorter than a long run's: a rank that is left waiting raises an error, which says for whom it waits."""
        return timedelta(seconds=max(_TIMEOUT, self.timeout * 2 / 3))


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    error: Exception
    traceback: str
    fatal: bool = False


def work(pipe: Connection, stacks: str) -> None:
    """Run tasks until there are no more."""
    with open(stacks, "w") as file:
        faulthandler.dump_traceback(file=file)  # shows how later dumps will end
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ["TORCH_DIST_INIT_BARRIER"] = (
            "1"  # a rank that has nothing to say must not leave while others connect
        )
        torch.set_num_threads(1)
        while (task := pipe.recv()) is not None:
            sys.path[:] = task.path
            pipe.send(_outcome(task))
            if dist.is_initialized():  # after the report: the others fail when the group ends
                dist.destroy_process_group()
            ProcessState._reset_state()


def _outcome(task: Task) -> Any:
    dist.distributed_c10d._world.group_count = 0  # groups are named by it; a failed one would leave a gap
    try:
        store = FileStore(task.store, task.world_size)
        limit = task.group_timeout
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=limit)
    except Exception as error:  # this process counts its groups; after a failed one it counts otherwise than its peers
        return Failure(_portable(error), _trace(error), fatal=True)
    try:
        with warnings.catch_warnings():
            _apply(task.filters)
            args, kwargs = _arguments(fn := task.fn.load(), task)
            value = fn(*args, **kwargs)
        pickle.dumps(value)
        return value
    except BaseException as error:
        return Failure(_portable(error), _trace(error))


def _apply(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, lineno in reversed(filters):
        warnings.filterwarnings(action, message, category, module, lineno)


def _arguments(fn: Callable[..., Any], task: Task) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The task's arguments, with the rank and the world size where ``fn`` has parameters of these names."""
    given = {"rank": task.rank, "world_size": task.world_size}
    try:
        names = list(inspect.signature(fn).parameters)
    except ValueError:  # some built-in functions have no signature
        names = []
    wanted = {name: value for name, value in given.items() if name in names}
    if not wanted:
        return task.args, task.kwargs
    others = [name for name in names if name not in wanted]
    return (), {**dict(zip(others, task.args, strict=False)), **task.kwargs, **wanted}


class Skip(Exception):
    """Stands for pytest's Skipped, which cannot be pickled."""


def _portable(error: BaseException) -> Exception:
    """The error itself where it can travel, else its text."""
    if type(error).__name__ == "Skipped":
        return Skip(getattr(error, "msg", ""))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of the test's own may raise
        copy = None
    return copy if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _trace(error: BaseException) -> str:
    """The traceback; where a bare assertion failed, with the values of the names in it."""
    bare = isinstance(error, AssertionError) and not str(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.TracebackException(type(error), error, frames, capture_locals=bare).format())
