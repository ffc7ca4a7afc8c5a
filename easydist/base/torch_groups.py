"""Facts about process groups for which ``torch.distributed`` has no public name, and the consequences without them.

Every other module asks this one. The names are looked up as those of ``torch_private`` are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from easydist.base.torch_private import found

_world = found("torch.distributed.distributed_c10d._world", None)
"""The tables of all groups. Without it: groups that are not destroyed end as the process does, a notebook renews its
default group only, torch may number groups differently on the ranks after one could not be made, a forked child makes
no groups of its own, and communicators are no groups of a ``DeviceMesh``."""

_default_timeout = found("torch.distributed.distributed_c10d._get_default_timeout", None)
"""Returns the time limit of a backend. Without it: half an hour for all of them."""

_set_limit = getattr(dist, "set_timeout", None) or found("torch.distributed.distributed_c10d._set_pg_timeout", None)
"""Sets the limit of calls; torch 2.14 has the first. Without both: the limit for connecting holds for calls, too."""

_set_default = found("torch.distributed.distributed_c10d._update_default_pg", None)
"""Makes a group torch's default group. Without it: as without ``_world``."""

_forget_names = found("torch.distributed.distributed_c10d._unregister_all_process_groups", None)
"""Lets operators written in C++ forget all groups. Without it: as without ``_world``."""

_name_group = found("torch.distributed.distributed_c10d._register_process_group", None)
"""Tells operators written in C++ of a group. Without it: as without ``_world``."""

_make = found("torch.distributed.distributed_c10d._new_process_group_helper", None)
"""Makes a group of some ranks in a store. Without it: ``recover`` is an error for groups that easydist did not make."""

_default_store = found("torch.distributed.distributed_c10d._get_default_store", None)
"""Returns the store of the default group. Without it: ``new_comm`` wants ``store=``."""

_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")


def _needed(name: Any, what: str) -> Any:
    """Return what a name refers to, or raise an error that says what it is needed for."""
    if name is None:
        raise NotImplementedError(
            f"{what}: this torch ({torch.__version__}) lacks an internal function; use another version"
        )
    return name


def known() -> list[dist.ProcessGroup]:
    """Return the groups that have been made and not destroyed."""
    return [] if _world is None else list(_world.pg_map)


def is_known(group: dist.ProcessGroup | None) -> bool:
    """True if torch knows the group: it has been made, and not destroyed."""
    return group is not None and (places(group) is not None if _world is None else group in _world.pg_map)


def places(group: dist.ProcessGroup | None) -> Mapping[int, int] | None:
    """Return each member's rank inside a group by its rank in the world; None if torch does not know the group."""
    if _world is not None:
        ranks: Mapping[int, int] | None = _world.pg_group_ranks.get(group)
        return ranks
    with suppress(Exception):  # torch's own error for an unknown group has changed
        return {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
    return None


def count() -> int:
    """Return the number of groups made so far, which is part of the name of the next one."""
    return 0 if _world is None else int(_world.group_count)


def set_count(number: int) -> None:
    """Set this number, which has to be equal on all ranks, and so has to count groups that could not be made, too."""
    if _world is not None:
        _world.group_count = number


def default_timeout(backend: str = "undefined") -> timedelta:
    """Return the time limit of a backend's groups, unless another one is given."""
    limit: timedelta = timedelta(minutes=30) if _default_timeout is None else _default_timeout(dist.Backend(backend))
    return limit


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the time limit of the calls of a group of gloo or NCCL."""
    if _set_limit is not None:
        _set_limit(limit, group)


def default_store() -> Store:
    """Return the store of the default group."""
    store: Store = _needed(_default_store, "new_comm without store=")()
    return store


def set_default_store(store: Store) -> None:
    """Let groups of the default group meet in another store from now on."""
    if _world is not None:
        default = dist.group.WORLD
        _world.pg_map[default] = _world.pg_map[default][0], store


def set_default(group: dist.ProcessGroup | None) -> None:
    """Make a group the default one; None: there is none any more."""
    _needed(_set_default, "a default group of easydist's own")(group)


def forget_all() -> None:
    """Forget all groups without ending them."""
    world, forget_names = (
        _needed(_world, "groups of a forked child"),
        _needed(_forget_names, "groups of a forked child"),
    )
    set_default(None)
    for table in _TABLES:
        getattr(world, table).clear()
    set_count(0)
    forget_names()


def made(ranks: Sequence[int], rank: int, backend: str, store: Store, name: str, limit: timedelta) -> dist.ProcessGroup:
    """Return a group made as by ``new_group``, but in its own store, and by its members alone.

    Without a default group it is made as that one, which it can become by ``set_default``.

    Args:
        ranks: The members, as ranks of the default group.
        rank: The rank of this process among the members.
        backend: As in ``new_group``.
        store: The store of all members.
        name: The name of the group, which no other group has.
        limit: The time limit for connecting, and for each call of the group.
    """
    make = _needed(_make, "a group of some ranks in its own store")
    told = len(ranks), rank, [] if dist.group.WORLD is None else list(ranks), backend, store, name
    group: dist.ProcessGroup = make(*told, timeout=limit, group_desc=name)[0]
    _needed(_world, "the same").pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    return group


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the backend of a group, as in ``new_group``."""
    return dist.get_backend(group) if _world is None else str(_world.pg_map[group][0])


def free_name(name: str) -> str:
    """Return a name for a group that no other one has: this one, or one with a number."""
    taken, number, free = {group.group_name for group in known()}, 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def present(group: Any, name: str, ranks: Sequence[int], backend: tuple[str, str], store: Store, about: str) -> None:
    """Tell torch of a group that it has not made, as ``new_group`` does.

    Args:
        group: The group.
        name: Its name, which no other group has.
        ranks: The members, as ranks of the default group.
        backend: The name of its backend, and the type of its device.
        store: Its store.
        about: Its description.
    """
    world, told = _needed(_world, "a communicator as a group"), _needed(_name_group, "a communicator as a group")
    group._set_group_name(name)
    group._set_group_desc(about)
    world.pg_map[group] = (backend[0], store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    world.pg_backend_config[group] = f"{backend[1]}:{backend[0]}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    world.pg_to_tag[group] = f"ptd:{name}"
    told(name, group)
