"""Creation of communicators, with and without a process group."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from easydist.comms.comm import TorchComm, made_comm
from easydist.comms.environment import default_store, rank_and_size
from easydist.comms.making import Made, Place, check_backend
from easydist.comms.options import CommOptions, Milliseconds, checked_hints, limited
from easydist.torch_backend.rendezvous import NAME
from easydist.transport.backends.c10d import over
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
        hints: For gloo: ``hostname``, ``interface``.

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
    place = Place(PrefixStore(f"{name}/{size}", shared), rank, size, device, name, options, limit)
    return made_comm(backend, place, f"new_comm {name!r}")


def _check_types(device: object, name: object, store: object) -> None:
    for what, value, kind in (("device", device, torch.device), ("name", name, str), ("store", store, Store)):
        if not isinstance(value, kind) and not (what == "store" and value is None):
            raise TypeError(f"new_comm(): {what} must be a {kind.__name__}, got {value!r}")


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
        place = Place(store, process_group.rank(), process_group.size(), chosen, name, options, limit)
        return made_comm("shm", place, f"wrap {name!r}")
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
