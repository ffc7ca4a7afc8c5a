"""The rendezvous of the ranks of an ``"easydist_shm"`` group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed import Store

from easydist.groups.rendezvous import Rendezvous
from easydist.groups.sharing import is_wanted
from easydist.liveness.peer import Peer
from easydist.transport.backends.shm import Shm

NAME = "easydist_shm"
"""The name for ``init_process_group`` and ``new_group``."""

_INSTEAD = "Use gloo: init_process_group('gloo')"

_place: ContextVar[Store | None] = ContextVar("easydist_rendezvous", default=None)


@contextlib.contextmanager
def rendezvous_in(store: Store) -> Iterator[None]:
    """Let the groups created in the block meet in this store instead of torch's.

    So a process can create a group that exists on other ranks already, where it is renewed
    (``SharedMemoryGroup.renew``).

    Args:
        store: The store of this rendezvous only.
    """
    token = _place.set(store)
    try:
        yield
    finally:
        _place.reset(token)


def met(
    store: Store, rank: int, size: int, timeout: timedelta, known: Mapping[int, Peer] | None = None
) -> tuple[Rendezvous, Shm]:
    """Let the ranks of a new group meet, and return their rendezvous and their memory.

    Args:
        store: The store of groups of this name, one after another.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        timeout: The limit of the rendezvous.
        known: The other processes by rank, as far as they are known; not for a rendezvous in another store.

    Raises:
        EasydistError: Some ranks did not come or have ended, or the store is gone.
        RuntimeError: The ranks cannot share memory.
    """
    if (place := _place.get()) is not None:
        store, known = place, None
    operation = "init_process_group"
    with Rendezvous(store, rank, size, timeout, name=NAME, operation=operation, known=known) as rendezvous:
        return rendezvous, rendezvous.join(rendezvous.introduce(is_wanted()), _INSTEAD)
