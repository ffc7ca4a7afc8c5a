"""The groups of calls: those that ``group=`` stands for, and the default one, which is found, created and left here."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from easydist.base import forks, torch_groups
from easydist.groups.communicators import Communicators
from easydist.groups.connecting import connect, own_connection
from easydist.groups.founding import Founding
from easydist.groups.known import let_go, of_comm, of_group
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import PeerPage
from easydist.liveness.process import ancestors
from easydist.liveness.timed_store import reached, served
from easydist.state.environment import World, has_agent, launched, restart_key
from easydist.transport.comm import Collectives
from easydist.typing import Group

_OUTSIDE: object = dist.GroupMember.NON_GROUP_MEMBER
"""The result of ``new_group`` on a rank that is not in the group."""

_WAIT = 1800.0
"""The limit of torch's own waits in the store, in seconds; torch's default."""

_stores = dict[World, Store]()
"""The store of the world that this process has reached."""

_made: list[World] = []
"""One entry for each group that easydist has made in this process."""


def of_argument(group: Group) -> Communicators | None:
    """Return the communicators of the group that an argument stands for; None if this process is not in it.

    Args:
        group: Anything but None, which is the default group.

    Raises:
        ValueError: The ``DeviceMesh`` has more than one dimension.
        TypeError: ``group`` is not a group.
    """
    assert group is not None
    if isinstance(group, dist.ProcessGroup):
        return of_group(group)
    if isinstance(group, Collectives):
        return of_comm(group)
    if group is _OUTSIDE:
        return None
    if hasattr(group, "get_group") and hasattr(group, "get_coordinate") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"a DeviceMesh of {group.ndim} dimensions is not one group: pass mesh[name]")
        return None if group.get_coordinate() is None else of_group(group.get_group())
    if isinstance(known := getattr(group, "communicators", None), Communicators):
        return known
    if isinstance(cpu_group := getattr(group, "cpu_group", None), dist.ProcessGroup):  # vLLM's own coordinator
        return of_group(cpu_group)
    raise TypeError(
        "group= takes None, a ProcessGroup, a one-dimensional DeviceMesh, a TorchComm or a GroupCoordinator, "
        f"got {type(group).__name__}"
    )


_survivors: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The survivors of torch's default group, as long as it exists: their group would keep its threads and connections."""

_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, World] = weakref.WeakKeyDictionary()
"""This process among the members of each group of survivors."""


def default_group() -> dist.ProcessGroup | None:
    """Return the default group, made by easydist or by others, or the group of its survivors; None if there is none."""
    default = dist.group.WORLD  # looked up once: it takes half a microsecond
    return _survivors.get(default, default) if _survivors and default is not None else default


def current_rank() -> int:
    """Return the rank of this process among all, without making a state, which would choose a device."""
    group = default_group()
    if group is None or (group in forks.groups_of_parents and not forks.is_copy()):
        return launched(has_group=True).rank
    return world_of(group).rank


def is_recovered(group: dist.ProcessGroup) -> bool:
    """True if this is the group of the survivors of a default group."""
    return group in _worlds


def replace_default_group(group: dist.ProcessGroup, world: World) -> None:
    """Make this the default group of easydist, until torch has another default group; if torch has none, of torch too.

    Args:
        group: The group of the survivors.
        world: This process among the survivors.
    """
    _worlds[group] = world
    if dist.group.WORLD is not None:
        _survivors[dist.group.WORLD] = group
        return
    torch_groups.set_default(group)
    torch_groups.set_count(1)  # as on ranks on which the lost group had been made
    _take_down_at_exit(group, launched())


def world_of(group: dist.ProcessGroup) -> World:
    """Return the world of an existing group; if LOCAL_RANK and the like are unset, all ranks count as one host's."""
    if (world := _worlds.get(group)) is not None:
        return world
    rank, size = group.rank(), group.size()
    with contextlib.suppress(ValueError):  # variables that another launcher has left over; the group counts
        told = launched(has_group=True)
        if (told.rank, told.size) == (rank, size):
            return told
    local_rank = int(os.environ.get("LOCAL_RANK") or rank)
    if size == 1:
        return World("adopted", rank, size, local_rank)
    return World("adopted", rank, size, local_rank, size, tells_local_size=False, node_rank=None, num_nodes=None)


def backend_for(device: torch.device) -> str:
    """Return the backend of a process group that moves tensors on the CPU and on this device.

    Example:
        >>> backend_for(torch.device("cuda")), backend_for(torch.device("cpu"))
        ('cpu:gloo,cuda:nccl', 'gloo')
    """
    native = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl", "hpu": "hccl"}.get(device.type)
    return f"cpu:gloo,{device.type}:{native}" if native else "gloo"


def founding(
    world: World,
    backend: str,
    timeout: timedelta | None,
    use: Callable[[dist.ProcessGroup], None],
) -> Founding:
    """Return the default group of a world that has none yet; it is destroyed at exit.

    Args:
        world: The world.
        backend: As in ``init_process_group``.
        timeout: The time limit of the group's calls; None is torch's.
        use: Gets the group once it is made.

    Raises:
        RuntimeError: This process is a child of a rank, with the rank's variables.
        ValueError: This build of torch lacks the backend.
    """
    if forks.is_copy() or forks.is_worker():
        raise RuntimeError(forks.NOT_A_RANK)
    if (pid := next(filter(functools.partial(_is_rank, world), ancestors()), None)) is not None:
        raise RuntimeError(f"rank {world.rank} is process {pid}; {forks.NOT_A_RANK}")
    _demand_built(backend)
    limit = timeout or torch_groups.default_timeout(backend.partition(",")[0].rpartition(":")[2])

    def make(monitor: Monitor, store: Store, seconds: float) -> dist.ProcessGroup:
        group = _made_in(monitor, store, seconds, world, backend)
        torch_groups.set_timeout(group, limit)
        use(group)
        return group

    reach = functools.partial(store_of_group, world)
    where = f"{world.address}:{world.port}"
    return Founding(world.rank, world.size, limit.total_seconds(), backend, where, not has_agent(), reach, make)


def _is_rank(world: World, pid: int) -> bool:
    """True if a process was launched as this rank of this world and is in a group of it, whoever made the group."""
    page = PeerPage.find(pid)
    if page is None or (world.rank, world.size) not in {(entry.rank, entry.size) for entry in page.entries()}:
        return False
    try:
        began = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        return launched(dict(each.split("=", 1) for each in began if "=" in each)) == world
    except (OSError, ValueError):
        return False


def _demand_built(backend: str) -> None:
    names = [name.rpartition(":")[2] for name in backend.split(",")]
    if "nccl" in names and not dist.is_nccl_available():
        raise ValueError(
            f"backend={backend!r}: this build of torch ({torch.__version__}) has no NCCL; install torch for CUDA, or "
            "leave backend= out, which means gloo on the CPU"
        )


def _made_in(monitor: Monitor, store: Store, seconds: float, world: World, backend: str) -> dist.ProcessGroup:
    count, limit = torch_groups.count(), timedelta(seconds=seconds)
    place: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "timeout": limit}
    try:
        # Only an ended rank ends this: after other errors the ranks try again, while torch would still make this group.
        check = monitor.raise_if_lost
        there = connect(lambda: own_connection(store), seconds, monitor, check)
        connect(lambda: dist.init_process_group(backend, store=there, **place), seconds, monitor, check)
    except BaseException:
        torch_groups.set_count(count)  # it numbers the groups, and the ranks may try again
        raise
    group = dist.group.WORLD
    assert group is not None
    _take_down_at_exit(group, world)
    return group


def _take_down_at_exit(group: dist.ProcessGroup, world: World) -> None:
    _made.append(world)
    atexit.register(_take_down, weakref.ref(group))  # a group that is destroyed before ends its threads then


def _take_down(made: weakref.ref[dist.ProcessGroup]) -> None:
    """Destroy the group that easydist made, unless that has been done, as this process ends."""
    group = made()
    if group is not None and dist.group.WORLD is group:
        let_go(group)
        dist.destroy_process_group()


def leave_groups_of_parents() -> None:
    """Make torch forget the parent's groups without ending them, so that this process can make its own."""
    torch_groups.forget_all()


def store_of_group(
    world: World, seconds: float, check: Callable[[], None], env: Mapping[str, str] = os.environ
) -> Store:
    """Return the store of the next default group of a world, within a number of seconds.

    Args:
        world: The world.
        seconds: The time limit.
        check: As for ``reached``.
        env: The variables of the launcher for a rank of this world.

    Raises:
        RuntimeError: No process serves it, or it has not answered in time.
    """
    if (store := _stores.get(world)) is None:
        if world.rank == 0 and not has_agent():
            store = served(world.address, world.port, seconds, _WAIT)
        else:
            store = reached(world.address, world.port, seconds, check, _WAIT)
        _stores[world] = store
    # A second group must not see keys of the first; ranks of a new world may have made groups in others.
    return PrefixStore(f"easydist/{restart_key(env)}/{_made.count(world)}", store)


def forget_store(world: World | None = None) -> None:
    """Close the connection to the store of a world, unless a group uses it.

    Args:
        world: The world; None for all.
    """
    for one in [*_stores] if world is None else [world]:
        _stores.pop(one, None)
