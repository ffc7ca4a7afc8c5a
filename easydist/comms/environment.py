"""The rank of this process and the store of its world, from the launcher's environment."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from easydist.base import torch_groups
from easydist.comms.failures import CommTimeout
from easydist.liveness import texts
from easydist.liveness.limited import NoAnswerError
from easydist.liveness.timed_store import reached, served
from easydist.state.environment import World, launched

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
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = _connected(os.getpid(), address, int(port), not rank, timeout)
    except (NoAnswerError, DistError) as error:
        raise _unreached(what, rank, f"{address}:{port}", timeout) from error
    return PrefixStore(f"easydist/comms/{restarts}", store)


def _unreached(what: str, rank: int, where: str, timeout: timedelta) -> CommTimeout:
    """Return the error for a store that does not answer; the first rank that serves it may not have come."""
    is_served = not _has_agent() and rank > 0
    row = texts.row(rank, f"waits in {what}", "")
    error = CommTimeout(texts.unreached(what, where, is_served, timeout.total_seconds(), row, texts.UNMADE))
    error.missing = (0,) if is_served else ()
    return error


def _has_agent() -> bool:
    """True if torchrun's agent serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache
def _connected(pid: int, address: str, port: int, serves: bool, timeout: timedelta) -> Store:
    """Return a store that lives as long as the process, so that communicators can be created and split at any time."""
    if serves and not _has_agent() and _is_here(address):
        with contextlib.suppress(RuntimeError):  # another process serves it already
            return served(address, port, timeout.total_seconds())
    return reached(address, port, timeout.total_seconds())


def _is_here(address: str) -> bool:
    """True if this is an address of this host."""
    with contextlib.suppress(OSError), socket.create_server((address, 0)):
        return True
    return False
