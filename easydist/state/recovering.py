"""``easydist.recover``, which continues with the surviving ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch.distributed as dist

from easydist.agreement.calling import seconds
from easydist.base import torch_groups
from easydist.base.eager import eager
from easydist.groups.communicators import timeout_of
from easydist.groups.connecting import gloo_group, registered_group
from easydist.groups.founding import Founding
from easydist.groups.known import forget, of_group, retire, unregistered
from easydist.groups.recovering import TIMEOUT, Attempt
from easydist.state.environment import World
from easydist.state.groups import is_recovered, replace_default_group
from easydist.state.process_state import ProcessState
from easydist.transport.comm import Collectives
from easydist.typing import Timeout

C = TypeVar("C", bound=Collectives)


@overload
def recover(group: None = None, *, timeout: Timeout | None = None) -> dist.ProcessGroup | None: ...
@overload
def recover(group: dist.ProcessGroup, *, timeout: Timeout | None = None) -> dist.ProcessGroup: ...
@overload
def recover(group: C, *, timeout: Timeout | None = None) -> C: ...
@eager
def recover(group: Any = None, *, timeout: Timeout | None = None) -> Any:
    """Continue with the surviving ranks after a rank has died or has not come; all survivors have to call this.

    Law: it returns with the same members on every rank: the ranks that are alive and have called it, in their old
    order, numbered from 0. If no rank was lost these are all ranks.

    Afterwards ``group=None``, and ``process_index``, ``num_processes``, ``is_main_process`` and the like of
    ``ProcessState``, mean the survivors. ``ProcessState().process_group`` is their group, for code that takes a torch
    group. ``dist.group.WORLD`` and groups made from it stay broken.

    Args:
        group: None for the default group. With a ``ProcessGroup`` only that group is recovered, and nothing else
            changes. A ``TorchComm`` is recovered by its own ``recover``.
        timeout: The time to wait for living ranks; None is a minute. Dead ranks are not waited for if they were on this
            host. Connecting may take up to half a minute more.

    Returns:
        The new group; None in a single process without a group.

    Raises:
        LeftOutError: The others have continued without this rank, which came too late. It cannot rejoin them.
        CollectiveTimeout: The survivors could not be connected in time; it may be called again.
        PeerLostError: The survivors cannot agree: the store that they need has ended with its rank, and they are on
            several hosts or had made no call yet. The text contains advice.
        OverlappingCallError: Another thread of this process is recovering the group. Let it wait for that thread.
        RuntimeError: The group was recovered already, or this process is a child of a rank.
        TypeError: ``group`` is not a group.

    Example:
        >>> import easydist
        >>> easydist.recover()  # a single process

    Cost: some milliseconds once all have come; a few messages through memory, or on several hosts through the store.
    """
    limit = TIMEOUT if timeout is None else seconds(timeout, "recover")
    if isinstance(group, Collectives) and hasattr(group, "recover"):
        return group.recover(timedelta(seconds=limit))
    state = ProcessState()
    of = state.process_group_as_it_is if group is None else group
    if of is not None and not isinstance(of, dist.ProcessGroup):
        raise TypeError(f"recover: group= takes None, a ProcessGroup or a TorchComm, got {type(of).__name__}")
    comms = state.communicators() if of is None else of_group(of)
    old = comms.founding or of
    if comms.size == 1 or old is None:
        return of
    world = state.world
    found = comms.recover(limit, functools.partial(_connected, old))
    new = found.made
    if group is None:
        # torch keeps its default group, but another one is easydist's own.
        ended = of if of is not None and is_recovered(of) and of is not dist.group.WORLD else None
        replace_default_group(new, _survivor(world, new.rank(), found.hosts))
        _ = state.world  # the state adopts the new group, and so releases the old one
        if ended is not None:
            retire(ended)
            dist.destroy_process_group(ended)
    return new


def _survivor(world: World, rank: int, hosts: Sequence[str]) -> World:
    """Return the world of a rank among the survivors, given the host of each."""
    here, nodes = [host == hosts[rank] for host in hosts], list(dict.fromkeys(hosts))
    return replace(
        world,
        rank=rank,
        size=len(hosts),
        local_rank=sum(here[:rank]),
        local_size=sum(here),
        tells_local_size=True,
        node_rank=nodes.index(hosts[rank]),
        num_nodes=len(nodes),
    )


def _connected(old: dist.ProcessGroup | Founding, attempt: Attempt) -> dist.ProcessGroup:
    """Return a group of the members, which have met in it, with the backend and the timeout of the old one."""
    if old in unregistered:
        name, timeout = _name(old, attempt), timeout_of(old)
        new = gloo_group(attempt.store, attempt.rank, len(attempt.members), name, attempt.left, check=attempt.check)
        unregistered.add(new)
    else:
        ranks, backend, timeout = _registration(old, attempt)
        told = ranks, attempt.rank, backend, attempt.store, _name(old, attempt), attempt.left
        new = registered_group(*told, check=attempt.check)
    # A group in shared memory has its own, because torch's function knows groups of gloo and NCCL only.
    limit = timedelta(seconds=timeout)
    new.set_timeout(limit) if hasattr(new, "monitor") else torch_groups.set_timeout(new, limit)
    try:
        # So that they need no store to recover if a rank dies before their next call.
        of_group(new).met(attempt.left, attempt.check)
    except BaseException:
        _discard(new)
        raise
    return new


def _name(old: dist.ProcessGroup | Founding, attempt: Attempt) -> str:
    """Return the same name on ranks that had made the default group when a rank was lost, and on those that had not."""
    if isinstance(old, Founding) or (old is dist.group.WORLD and not is_recovered(old)):
        return f"default{_RECOVERED}{attempt.number}"
    first, _, number = old.group_name.rpartition(_RECOVERED)
    if not number.isdigit() or not first:
        first, number = old.group_name, "0"
    return f"{first}{_RECOVERED}{int(number) + attempt.number}"  # counted: it would grow with each recovery


_RECOVERED = "/recovered/"


def _registration(old: dist.ProcessGroup | Founding, attempt: Attempt) -> tuple[list[int], str, float]:
    """Return the members for torch, the backend and the timeout; torch counts ranks as its default group does."""
    if isinstance(old, Founding):
        return list(range(len(attempt.members))), old.backend, old.timeout
    ranks = dist.get_process_group_ranks(old)
    return [ranks[member] for member in attempt.members], torch_groups.backend_of(old), timeout_of(old)


def _discard(new: dist.ProcessGroup) -> None:
    """Release a group whose members could not meet."""
    forget(new)
    if new in unregistered:
        unregistered.discard(new)
    else:
        dist.destroy_process_group(new)
