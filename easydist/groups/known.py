"""The groups that this process knows, with their communicators."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import cast

import torch.distributed as dist

from easydist.base.forks import NOT_A_RANK, groups_of_parents, keep
from easydist.base.torch_groups import is_known
from easydist.groups.communicators import Communicators
from easydist.groups.recovering import ALREADY_RECOVERED
from easydist.liveness.timed_store import TimedStore
from easydist.transport.backends.native import over
from easydist.transport.backends.solo import Solo
from easydist.transport.comm import Collectives

_CACHE: dict[dist.ProcessGroup, Communicators] = {}
unregistered: set[dist.ProcessGroup] = set()
"""The groups in use that torch does not know of."""

_retired: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups that have ended because their survivors continue in others."""

_making = threading.RLock()
"""The lock that is held while communicators are made."""

SOLO = Communicators(Collectives(Solo(), "solo"))
"""The communicators of a single process."""


def of_group(group: dist.ProcessGroup) -> Communicators:
    """Return the communicators of ``group``."""
    found = _CACHE.get(group)
    return _make(group) if found is None else found


def _make(group: dist.ProcessGroup) -> Communicators:
    with _making:  # two threads that come at once have to get the same communicators, and see each other's calls
        if (found := _CACHE.get(group)) is not None:
            return found
        if group in groups_of_parents:
            raise RuntimeError(NOT_A_RANK)
        if group in _retired:
            raise RuntimeError(ALREADY_RECOVERED)
        backend = over(group)
        return remember(group, Communicators(Collectives(backend, group.group_name) if backend else None, group))


def remember(group: dist.ProcessGroup, comms: Communicators) -> Communicators:
    """Let these be the communicators of ``group``, release those of destroyed groups, and return them."""
    with _making:
        for gone in [known for known in _CACHE if not (is_known(known) or known in unregistered)]:
            _CACHE[gone].leave()
            _CACHE.pop(gone).let_go()  # a destroyed group keeps its connections open as long as it is cached here
        _CACHE[group] = comms
        comms.monitor.is_destroyed = functools.partial(_is_destroyed, weakref.ref(group))
    return comms


def _is_destroyed(group: weakref.ref[dist.ProcessGroup]) -> bool:
    known = group()
    return not is_known(known) and known not in unregistered


def forget(group: dist.ProcessGroup) -> None:
    """Let the next call make new communicators, in which the ranks meet again; all ranks have to call this.

    Args:
        group: The group. Its store may be a different one in the next call.
    """
    with _making:
        if (known := _CACHE.pop(group, None)) is not None:
            known.stop()
            known.let_go()


def let_go(group: dist.ProcessGroup) -> None:
    """Let a group end together with this process, silently: how the process ends says more than that it left.

    Args:
        group: The group.
    """
    with _making:
        if (known := _CACHE.get(group)) is not None:
            known.let_go()


def retire(group: dist.ProcessGroup) -> None:
    """Release the communicators of a group that has been recovered; no other ones can be made.

    Args:
        group: The group.
    """
    forget(group)
    _retired.add(group)


def _after_fork() -> None:
    global _making
    _making = threading.RLock()  # a thread of the parent may have held the old one
    keep([group for comms in _CACHE.values() for group in comms.groups()])


os.register_at_fork(after_in_child=_after_fork)


def of_comm(comm: Collectives) -> Communicators:
    """Return the communicators of the group of a communicator on the CPU.

    Raises:
        ValueError: ``comm`` is not on the CPU, so it cannot carry headers.
    """
    if comm.get_device().type != "cpu":
        raise ValueError(f"group= needs a communicator on the CPU, or the ProcessGroup itself; got {comm!r}")
    with _making:
        if comm.communicators is None:
            comm.communicators = comms = Communicators(comm.core())
            if (store := getattr(comm, "store_of_verbs", None)) is not None:
                comms.monitor.use(TimedStore(store))  # until its ranks have met in a verb
            if (elder := getattr(comm, "monitor", None)) is not None:
                elder.share_memory_with(comms.monitor)
    comms = cast(Communicators, comm.communicators)
    if (limit := getattr(comm, "time_limit", None)) is not None:  # it may have been changed
        comms.monitor.timeout = limit.total_seconds()
    return comms
