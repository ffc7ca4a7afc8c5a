"""The process-state singleton: the rank, the world and the process group of this process."""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar, overload

import torch
import torch.distributed as dist

from easydist import settings
from easydist.agreement.calling import founding, seconds
from easydist.agreement.runner import meet
from easydist.base import forks
from easydist.base.eager import eager
from easydist.data.split import split
from easydist.groups.communicators import Communicators
from easydist.groups.known import SOLO, of_group, remember
from easydist.state.absent import WithAdvice, absent
from easydist.state.environment import DistributedType, World, flag, launched
from easydist.state.first import first, is_first_of_host
from easydist.state.groups import (
    backend_for,
    default_group,
    founding as founding_of,
    is_recovered,
    leave_groups_of_parents,
    of_argument,
    world_of,
)
from easydist.typing import Group, Timeout, Tree

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """A decorator that makes a function return None on other processes."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | None]:
        """Decorate a function."""


class ProcessState(metaclass=WithAdvice):
    """The state of this process and its knowledge of the others; all instances share it.

    It adopts the default process group of ``torch.distributed``, if there is one; else the world that torchrun,
    accelerate launch, Open MPI, Intel MPI, MPICH, MVAPICH or SLURM described in the environment; else a world of one
    process. Nothing is created before the first exchange (or ``process_group``). At exit easydist destroys a group that
    it created, but not groups made by others.

    Args:
        cpu: Stay on the CPU even if there is an accelerator (also ``ACCELERATE_USE_CPU=1``).
        backend: The backend of the process group that easydist will create, as in ``init_process_group``. Default: gloo
            for the CPU, and the accelerator's own library if there is one (``"cpu:gloo,cuda:nccl"``).
        timeout: The time limit of that group's collectives: a timedelta, or seconds. Default: torch's (30 minutes for
            gloo).

    Raises:
        TypeError: ``timeout`` is neither a number of seconds nor a timedelta.
        ValueError: ``timeout`` is not positive; or ``cpu``, ``backend`` or ``timeout`` come too late, because the group
            exists already and was made differently; or ``ACCELERATE_USE_CPU`` or ``ACCELERATE_DEBUG_MODE``, which are
            read when the first instance is made, are neither yes nor no; or this process works alone, and one of
            easydist's own variables is malformed.

    Example:
        >>> from easydist import ProcessState
        >>> state = ProcessState()
        >>> state.process_index, state.num_processes, state.is_main_process
        (0, 1, True)

    Source: accelerate's ``PartialState``, of which it has the attributes and methods.
    """

    _shared: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, *, backend: str | None = None, timeout: Timeout | None = None) -> None:
        self.__dict__ = self._shared
        if not self._shared:
            self._forget()
        for name, value in (("backend", backend), ("timeout", timeout), ("cpu", cpu or None)):
            if value is not None:
                self._set(name, value)
        self._adopt()

    def _forget(self) -> None:
        """Reset the state to that of a new process."""
        self.debug, self._asks_for_cpu = flag("ACCELERATE_DEBUG_MODE"), flag("ACCELERATE_USE_CPU")
        self._options: dict[str, Any] = {}
        self._generation = 0
        self._group: dist.ProcessGroup | None = None
        self._first_call: tuple[int, Communicators] | None = None
        self._world: World | None = None
        self._device: torch.device | None = None

    def _set(self, name: str, value: Any) -> None:
        """Set an option; raise an error if it is malformed, or comes too late to have an effect."""
        if name == "timeout":
            seconds(value, "ProcessState")
        if self._options.get(name) == value:
            return
        existing = default_group()
        if existing is not None and not (name == "backend" and dist.get_backend() == value) and name != "cpu":
            raise ValueError(
                f"ProcessState({name}={value!r}) must come before the first call: the process group exists already "
                f"(backend {dist.get_backend()!r})"
            )
        if name == "cpu" and self._device is not None and self._device.type != "cpu":
            raise ValueError(
                f"ProcessState(cpu=True) must come before the first use: the state is on {self._device} already"
            )
        self._options[name], self._first_call = value, None

    def _adopt(self) -> World:
        """Return the current world: that of the default group if there is one, else the launcher's."""
        if not self._shared:
            self._forget()
        group = default_group()
        if self._generation != forks.generation and (group is None or group in forks.groups_of_parents):
            group = self._after_fork()
        if self._world is None or group is not self._group:
            device = self._device if group is not None and is_recovered(group) else None
            self._group, self._device, self._first_call = group, None, None
            world = launched() if group is None else world_of(group)
            if world.size == 1:
                settings.check()  # several ranks do so when they meet
            self._world, self._device = world, device or self._choose_device(world)
        return self._world

    def _after_fork(self) -> dist.ProcessGroup | None:
        """Reset the parent's state if this forked process has got its own rank since; return the default group."""
        if not forks.is_copy():
            self._generation, self._world = forks.generation, None
            if default_group() is not None:
                leave_groups_of_parents()
        return default_group()

    def _choose_device(self, world: World) -> torch.device:
        if named := os.environ.get("ACCELERATE_TORCH_DEVICE"):
            return torch.device(named)
        device = None if self._stays_on_cpu() else torch.accelerator.current_accelerator(check_available=True)
        if device is None or device.type == "mps":
            return device or torch.device("cpu")
        if self._group is not None and not os.environ.get("LOCAL_RANK"):
            return torch.device(device.type, torch.accelerator.current_device_index())  # chosen by the group's maker
        index = world.local_rank % torch.accelerator.device_count()
        if world.size > 1:
            torch.accelerator.set_device_index(index)
        return torch.device(device.type, index)

    def _stays_on_cpu(self) -> bool:
        asked = self._options.get("cpu") or self._asks_for_cpu
        gloo_only = self._group is not None and dist.get_backend() == "gloo"
        return bool(asked or gloo_only or self._options.get("backend") == "gloo")

    @property
    def world(self) -> World:
        """The world of this process, which is all processes that were launched, or the survivors."""
        return self._adopt()

    @property
    def process_group_as_it_is(self) -> dist.ProcessGroup | None:
        """The default process group; None if there is none yet."""
        self._adopt()
        return self._group

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The default process group, created now if the launcher started several ranks and there is none yet.

        After ``easydist.recover()`` it is the group of the survivors.

        Every rank has to read it; it is None in a single process without a group. It is meant for code that takes a
        group, such as ``DistributedDataParallel``.
        """
        if self._adopt().size > 1 and self._group is None:
            with founding(self.communicators(), "ProcessState.process_group"):
                pass
        return self._group

    def _unfounded(self, world: World) -> Communicators:
        """Return the communicators of the default group that the ranks make in their first call."""
        if self._first_call is None or self._first_call[0] != os.getpid():
            timeout = self._options.get("timeout")
            limit = None if timeout is None else timedelta(seconds=seconds(timeout, "ProcessState"))
            group = founding_of(world, self._planned_backend(), limit, self._use)
            self._first_call = os.getpid(), Communicators(None, founding=group, made=remember)
        return self._first_call[1]

    def _planned_backend(self) -> str:
        return self._options.get("backend") or backend_for(self.device)

    def _use(self, group: dist.ProcessGroup) -> None:
        self._group, self._first_call = group, None

    def communicators(self, group: Group = None) -> Communicators:
        """Return the communicators of ``group``; None is the default group, created now if necessary.

        Args:
            group: A group, as verbs take it.

        Raises:
            ValueError: This process is not in the group, or the ``DeviceMesh`` has more than one dimension.
            TypeError: ``group`` is not a group.
        """
        if group is None:
            world = self._adopt()
            if self._group is not None:
                return of_group(self._group)
            return SOLO if world.size == 1 else self._unfounded(world)
        if (found := of_argument(group)) is None:
            raise ValueError(f"rank {self.process_index} is not in this group: only its members may call")
        return found

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0 (``RANK``)."""
        return self._adopt().rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process among those on its node, from 0 (``LOCAL_RANK``)."""
        return self._adopt().local_rank

    @property
    def num_processes(self) -> int:
        """The number of processes (``WORLD_SIZE``)."""
        return self._adopt().size

    @property
    def local_world_size(self) -> int:
        """The number of processes on this node (``LOCAL_WORLD_SIZE``); see ``node_rank``."""
        world = self._adopt()
        return world.local_size if world.tells_local_size else self._hosts().count(self._hosts()[world.rank])

    @property
    def node_rank(self) -> int:
        """The number of this node, from 0 (``GROUP_RANK``).

        If the launcher does not tell, the nodes are the hosts that the ranks have found in their first call, in the
        order of their lowest ranks.

        Raises:
            RuntimeError: The launcher does not tell, and the ranks have made no call yet.
        """
        world = self._adopt()
        if world.node_rank is not None:
            return world.node_rank
        return list(dict.fromkeys(self._hosts())).index(self._hosts()[world.rank])

    @property
    def num_nodes(self) -> int:
        """The number of nodes (``GROUP_WORLD_SIZE``); see ``node_rank``."""
        known = self._adopt().num_nodes
        return len(set(self._hosts())) if known is None else known

    def _hosts(self) -> list[str]:
        """Return the identifier of each rank's host, as the ranks have told one another when they met."""
        found = None if self._group is None else of_group(self._group).hosts
        if found is None:
            raise RuntimeError(
                "the launcher does not tell which ranks are on which host, and the ranks have made no call yet, in "
                "which they find out: call easydist.wait_for_everyone() on all ranks first"
            )
        return found

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        self._adopt()
        assert self._device is not None
        return self._device

    @device.setter
    def device(self, value: torch.device) -> None:
        self._adopt()
        self._device = torch.device(value)

    @property
    def backend(self) -> str | None:
        """The backend for data on ``device``: ``"gloo"``, ``"nccl"``, …; None in a single process without a group."""
        if self._adopt().size == 1 and self._group is None:
            return None
        planned = dist.get_backend_config() if self._group is not None else self._planned_backend()
        by_device = dict(item.split(":") for item in planned.split(",") if ":" in item)
        return by_device.get(self.device.type, by_device.get("cpu", planned))

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of this world."""
        if not self.use_distributed:
            return DistributedType.NO
        kind = {"cuda": "GPU"}.get(self.device.type, self.device.type.upper())
        return DistributedType(f"MULTI_{kind}")

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self._adopt().size > 1

    @property
    def initialized(self) -> bool:
        """True if the state is known; always true for an instance."""
        return bool(self._shared)

    @property
    def is_main_process(self) -> bool:
        """True if this is process 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this is process 0 of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True if this is the last process."""
        return self.process_index == self.num_processes - 1

    @eager
    def wait_for_everyone(self, *, group: Group = None, timeout: Timeout | None = None) -> None:
        """Block until every process has made this call.

        Args:
            group: The ranks that take part.
            timeout: The time limit of the call; None is the group's.

        Raises:
            DisagreementError: Another process made a different call.

        Cost: one header exchange.
        """
        meet(self.communicators(group), "wait_for_everyone", timeout=timeout)

    @contextmanager
    def main_process_first(self, *, group: Group = None, timeout: Timeout | None = None) -> Iterator[None]:
        """Run the body on the main process, then on the others.

        The body may take any time: the group's limit does not count while a rank is known to run its body. It counts
        while that process is stopped, or its body waits in a call for one of the ranks that wait for it.

        Args:
            group: The ranks that take part; the first one goes first.
            timeout: The time limit of each wait for the bodies of others. None for no limit of the body.

        Raises:
            RemoteError: The body raised an exception on another process; on that process its own exception is raised.
                If it was the main process, the others do not run their bodies.
            PeerLostError: A process ended in its body.

        Cost: two header exchanges; all processes leave together.
        """
        comms = self.communicators(group)
        yield from first(comms, comms.rank == 0, timeout)

    @contextmanager
    def local_main_process_first(self, *, group: Group = None, timeout: Timeout | None = None) -> Iterator[None]:
        """Run the body on process 0 of each node, then on the others; otherwise the same as ``main_process_first``.

        Args:
            group: The ranks that take part; the first one on each host goes first, which may have several nodes of
                torchrun.
            timeout: The time limit of each wait for a body; None means that a body may take any time.
        """
        comms = self.communicators(group)
        goes_first = self.is_local_main_process if group is None else is_first_of_host(comms, timeout)
        yield from first(comms, goes_first, timeout)

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process only; it returns None on the others.

        Example:
            >>> state = ProcessState()
            >>> @state.on_main_process
            ... def announce():
            ...     print("ready")
            >>> announce()
            ready

        Args:
            function: The function.
        """
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on process 0 of each node only.

        Args:
            function: The function, which returns None on the other processes.
        """
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process only.

        Args:
            function: The function, which returns None on the other processes.
        """
        return self._only(function, lambda: self.is_last_process)

    @overload
    def on_process(self, function: Callable[P, R], process_index: int | None = None) -> Callable[P, R | None]: ...
    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> Decorator: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process only: ``@state.on_process(process_index=2)``.

        Args:
            function: The function, which returns None on the other processes.
            process_index: The rank of that process.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(self, function: None = None, local_process_index: int | None = None) -> Decorator: ...
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run on one process of each node only.

        Args:
            function: The function, which returns None on the other processes.
            local_process_index: The rank of that process on its node.
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    @contextmanager
    def split_between_processes(
        self, inputs: Tree, apply_padding: bool = False, *, group: Group = None
    ) -> Iterator[Tree]:
        """Give the body this process's share of ``inputs``, which are not changed.

        Lists, tuples, ranges, tensors, arrays and datasets (of torch and of ``datasets``) are cut along dim 0, dicts
        and namedtuples value by value (at every depth); all other values are the same on every process. If the length
        cannot be divided evenly, the first processes get one element more.

        Args:
            inputs: The data to split; the same on every process.
            apply_padding: Repeat the last element until all shares have the same length.
            group: The ranks that share the data.

        Raises:
            TypeError: ``inputs`` is an iterator, a stream or a ``DataLoader``, which every process would read whole.
            ValueError: The values of a dict differ in length.

        Cost: no exchange.

        Example:
            >>> with ProcessState().split_between_processes(["a", "b"]) as share:
            ...     share
            ['a', 'b']
        """
        comms = None if group is None else self.communicators(group)
        size, rank = (comms.size, comms.rank) if comms else (self.num_processes, self.process_index)
        yield split(inputs, size, rank, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each node only.

        Args:
            *args: The values to print.
            **kwargs: The options of Python's ``print``.
        """
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy ``group``, or the default process group, even if easydist did not make it.

        Args:
            group: A process group; None is the default one.
        """
        if dist.is_initialized():
            dist.destroy_process_group(group)

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has raised an AttributeError: raise it again, not another one
                return object.__getattribute__(self, name)
            raise absent(self, name)

    def _only(self, function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if here() or not self.use_distributed else None

        return wrapper

    @staticmethod
    def _reset_state() -> None:
        """Reset the state, as accelerate's tests do between cases; a process group is kept."""
        ProcessState._shared.clear()

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


PartialState = ProcessState
"""accelerate's name for ``ProcessState``."""


def communicators(group: Group = None) -> Communicators:
    """Return the communicators of ``group``; see ``ProcessState.communicators``."""
    if group is None and (default := default_group()) is not None and default not in forks.groups_of_parents:
        return of_group(default)  # the state adopts the group when it is next read
    return _STATE.communicators(group)


_STATE = ProcessState.__new__(ProcessState)
"""The state for calls, which give it no options: making an instance takes as long as half a call of one process."""
_STATE.__dict__ = ProcessState._shared


@eager
def wait_for_everyone(*, group: Group = None, timeout: Timeout | None = None) -> None:
    """Block until every process has made this call; the same as ``ProcessState().wait_for_everyone``.

    Args:
        group: The ranks that take part.
        timeout: The time limit of the call; None is the group's.

    Raises:
        DisagreementError: Another process made a different call.

    Cost: one header exchange.
    """
    meet(communicators(group), "wait_for_everyone", timeout=timeout)
