"""Creation of communicators, over a process group, or from the launcher's environment."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from easydist.base import torch_groups
from easydist.base.wording import a_or_an
from easydist.comms.comm import TorchComm, made_comm
from easydist.comms.failures import CommTimeout
from easydist.comms.making import Endpoint, Made, check_backend
from easydist.comms.options import CommOptions, Milliseconds, checked_hints, limited
from easydist.liveness import texts
from easydist.liveness.background import NoAnswerError
from easydist.liveness.timed_store import reached, served
from easydist.state.environment import World, has_agent, launched, restart_key
from easydist.torch_backend.rendezvous import NAME
from easydist.transport.backends.native import over
from easydist.transport.checked import checked_timeout


def new_comm(
    backend: str,
    device: torch.device,
    name: str,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    high_priority_stream: bool | None = None,
    store: Store | None = None,
    hints: Mapping[str, str] | None = None,
) -> TorchComm:
    """Create a communicator. All of its ranks call it.

    Rank and size come from ``TORCHCOMM_RANK`` and ``TORCHCOMM_SIZE``, else from the launcher, else from the default
    process group. The ranks meet in ``store``, else in the default group's store, else at ``MASTER_ADDR:MASTER_PORT``.
    Names can be reused, communicators can share a store, and no rank of the job is special.

    Args:
        backend: ``"gloo"``, ``"nccl"``, ``"shm"`` (memory of one host), ``"auto"`` (shm where all ranks share a host
            and the device is the CPU, else gloo or nccl), or a name registered with ``register_backend``.
        device: The device of the tensors.
        name: A name that is the same on all ranks. Communicators created at the same time need different names.
        abort_process_on_timeout_or_error: True: a failed operation writes the error and ends the process. None and
            False: it raises.
        timeout: The limit for creating it and for each operation; None means 600 s, or
            ``TORCHCOMM_TIMEOUT_SECONDS``.
        high_priority_stream: For nccl.
        store: The store in which the ranks meet.
        hints: For gloo: ``hostname``, ``interface``, and ``check``: ``"1"`` compares the ranks' operations before their
            data moves.

    Returns:
        This rank's communicator.

    Raises:
        TypeError: An argument has the wrong type.
        ModuleNotFoundError: There is no such backend.
        RuntimeError: The rank is unknown, some ranks did not come, or the backend cannot be created.

    Example:
        >>> import os, torch
        >>> from easydist.comms import new_comm
        >>> os.environ |= {"TORCHCOMM_RANK": "0", "TORCHCOMM_SIZE": "1"}
        >>> comm = new_comm("auto", torch.device("cpu"), "main", store=torch.distributed.HashStore())
        >>> comm.get_backend(), comm.get_rank(), comm.get_size()
        ('shm', 0, 1)
        >>> comm.finalize()

    Source: the torchcomms API.
    """
    check_backend(backend)
    _check_types(device, name, store)
    rank, size = rank_and_size()
    options = CommOptions()
    options.timeout = limit = Milliseconds.of(limited(checked_timeout(timeout), options.timeout))
    options.abort_process_on_timeout_or_error, options.store = abort_process_on_timeout_or_error, store
    options.hints = dict(checked_hints(hints) or {})
    if high_priority_stream:
        options.hints = {**options.hints, "high_priority_stream": "1"}
    shared = (
        PrefixStore("easydist/comms", store) if store is not None else default_store(rank, limit, f"new_comm {name!r}")
    )
    endpoint = Endpoint(PrefixStore(f"{name}/{size}", shared), rank, size, device, name, options, limit)
    return made_comm(backend, endpoint, f"new_comm {name!r}")


def _check_types(device: object, name: object, store: object) -> None:
    for what, value, kind in (("device", device, torch.device), ("name", name, str), ("store", store, Store)):
        if not isinstance(value, kind) and not (what == "store" and value is None):
            hint = f"; pass torch.device({value!r})" if kind is torch.device and isinstance(value, str) else ""
            raise TypeError(f"new_comm(): {what} must be {a_or_an(kind.__name__)}, got {value!r}{hint}")


def wrap(process_group: dist.ProcessGroup, device: torch.device | None = None) -> TorchComm:
    """Wrap an existing process group in a communicator, whose ``finalize`` does not touch the group.

    Over a group of ``easydist_shm`` it creates shared memory of its own between the same ranks, so all of them call it.

    Args:
        process_group: Any group that this process belongs to.
        device: The device of the tensors; None means the CPU if the group serves it, else the group's device.

    Raises:
        RuntimeError: The group cannot move tensors on the device, or (over ``easydist_shm``) some ranks did not come.

    Example:
        >>> import torch.distributed as dist
        >>> from easydist.comms import wrap
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> wrap(dist.group.WORLD).get_backend()
        'gloo'
        >>> dist.destroy_process_group()
    """
    kinds = [torch.device(kind) for kind in process_group._device_types]
    chosen = device or next((kind for kind in kinds if kind.type == "cpu"), kinds[0])
    options, name = CommOptions(), process_group.group_name
    store = PrefixStore("easydist/comms", process_group.get_group_store())
    if chosen.type == "cpu" and process_group.name() == NAME:
        limit = Milliseconds.of(process_group.timeout)  # type: ignore[attr-defined]  # it is written in Python
        endpoint = Endpoint(store, process_group.rank(), process_group.size(), chosen, name, options, limit)
        return made_comm("shm", endpoint, f"wrap {name!r}")
    backend = over(process_group, chosen)
    if backend is None:
        raise RuntimeError(
            f"wrap: the group {name!r} cannot move tensors on {chosen} for a communicator; make one with new_comm"
        )
    made = Made(backend, store=_calls(process_group, store))
    return TorchComm(backend, name, options, store=store, kind=backend.name, made=made)


_wrapped: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How often each group was wrapped."""


def _calls(group: dist.ProcessGroup, store: Store) -> Store:
    """Return the store for the calls of a communicator over a group: the i-th one of each rank is the same one."""
    _wrapped[group] = number = _wrapped.get(group, 0) + 1
    return PrefixStore(f"wrapped/{number}", store)


_UNKNOWN = (
    "Unable to determine rank and size from environment variables. Please set TORCHCOMM_RANK and TORCHCOMM_SIZE, or "
    "ensure you are running in a supported environment (torchrun, MPI, SLURM), or make a process group first."
)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size: ``TORCHCOMM_RANK`` and ``_SIZE``, the launcher's, or the group's.

    Raises:
        RuntimeError: None of them is set, or a variable is not a number.
    """
    env = os.environ
    if env.get("TORCHCOMM_RANK") and env.get("TORCHCOMM_SIZE"):
        rank, size = _number("TORCHCOMM_RANK"), _number("TORCHCOMM_SIZE")
    elif (world := _world()) is not None:
        rank, size = world.rank, world.size
    elif dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        raise RuntimeError(_UNKNOWN)
    if not 0 <= rank < size:
        raise RuntimeError(f"Unable to determine rank and size: rank {rank} is outside of {size} ranks")
    return rank, size


def _number(name: str) -> int:
    text = os.environ[name]
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise RuntimeError(f"Invalid value for environment variable {name}: {text}")
    return int(text)


def _world() -> World | None:
    try:
        world = launched(os.environ, has_group=True)
    except ValueError as error:
        raise RuntimeError(f"Invalid value for environment variable: {error}") from error
    return None if world.launcher == "none" else world


def default_store(rank: int, timeout: timedelta, what: str) -> Store:
    """Return the default group's store, or one at ``MASTER_ADDR`` and ``MASTER_PORT``.

    If no launcher serves that store, a rank 0 on its host does: rank 0 of all ranks, or of a communicator.

    Args:
        rank: The rank of this process in the communicator.
        timeout: How long to wait for the store.
        what: The call, for errors.

    Raises:
        CommTimeout: The store is not reached in time.
        RuntimeError: The address is not set.
    """
    if dist.is_initialized():
        return PrefixStore("easydist/comms", torch_groups.default_store())
    world = _world()
    address = os.environ.get("MASTER_ADDR") or (world.address if world else "")
    port = os.environ.get("MASTER_PORT") or (str(world.port) if world else "")
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise RuntimeError(f"new_comm: {missing} env is not set; set it, or pass store=")
    try:
        store = _connected(os.getpid(), address, int(port), not rank, timeout)
    except (NoAnswerError, DistError) as error:
        raise _unreached(what, rank, address, port, timeout) from error
    return PrefixStore(f"easydist/comms/{restart_key()}", store)


def _unreached(what: str, rank: int, address: str, port: str, timeout: timedelta) -> CommTimeout:
    """Return the error for a store that does not answer; the first rank that serves it may not have come."""
    where, is_served = f"{address}:{port}", not has_agent() and rank > 0
    if rank == 0 and not has_agent():
        return CommTimeout(f"{what}: {texts.unserved(where, is_taken=_is_here(address))}")
    row = texts.row(rank, f"waits in {what}", "")
    error = CommTimeout(texts.unreached(what, where, is_served, timeout.total_seconds(), row, texts.UNMADE))
    error.missing = (0,) if is_served else ()
    return error


@functools.cache
def _connected(pid: int, address: str, port: int, serves: bool, timeout: timedelta) -> Store:
    """Return a store that lives as long as the process, so that communicators can be created and split at any time."""
    if serves and not has_agent() and _is_here(address):
        with contextlib.suppress(RuntimeError):  # another process serves it already
            return served(address, port, timeout.total_seconds())
    return reached(address, port, timeout.total_seconds())


def _is_here(address: str) -> bool:
    """True if this is an address of this host."""
    with contextlib.suppress(OSError), socket.create_server((address, 0)):
        return True
    return False
