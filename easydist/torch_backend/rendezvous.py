"""The meeting of the ranks of an ``"easydist_shm"`` group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.groups.meeting import Meeting
from easydist.liveness.timed_store import TimedStore

NAME = "easydist_shm"
"""The name for ``init_process_group`` and ``new_group``."""

_INSTEAD = "Use gloo: init_process_group('gloo')"

_place: ContextVar[Store | None] = ContextVar("easydist_meeting_place", default=None)


@contextlib.contextmanager
def meeting_in(store: Store) -> Iterator[None]:
    """Let the groups created in the block meet in this store instead of torch's.

    So a process can create a group that exists on other ranks already, where it is renewed
    (``SharedMemoryGroup.renew``).

    Args:
        store: The store of this meeting only.
    """
    token = _place.set(store)
    try:
        yield
    finally:
        _place.reset(token)


def begin_meeting(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Meeting, Store]:
    """Begin to create a group. Return the meeting of its ranks, and the store that is theirs alone.

    Args:
        store: The store of groups of this name, one after another. Each generation has keys of its own.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        timeout: The limit of the meeting.
    """
    store = _place.get() or store
    arrival = TimedStore(store).add("came", 1, timeout.total_seconds())
    own = PrefixStore(f"{(arrival - 1) // size}", store)
    return Meeting(own, rank, size, timeout, name=NAME, operation="init_process_group", instead=_INSTEAD), own
