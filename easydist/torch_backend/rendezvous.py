"""The meeting of the ranks of an ``"easydist_shm"`` group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store

from easydist.errors import PeerLostError
from easydist.groups.meeting import Meeting
from easydist.liveness import texts
from easydist.liveness.timed_store import TimedStore
from easydist.transport.backends.shm import Shm

NAME = "easydist_shm"
"""The name for ``init_process_group`` and ``new_group``."""

_OPERATION = "init_process_group"
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


def met(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Meeting, Store, Shm]:
    """Let the ranks of a new group meet. Return the meeting, the store that is theirs alone, and their memory.

    Args:
        store: The store of groups of this name, one after another. Each generation has keys of its own.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        timeout: The limit of the meeting.

    Raises:
        EasydistError: Some ranks did not come, or the store is gone.
        RuntimeError: The ranks cannot share memory.
    """
    store = _place.get() or store
    try:
        arrival = TimedStore(store).add("came", 1, timeout.total_seconds())
        own = PrefixStore(f"{(arrival - 1) // size}", store)
        meeting = Meeting(own, rank, size, timeout, name=NAME, operation=_OPERATION, instead=_INSTEAD)
        return meeting, own, meeting.join()
    except DistError as error:
        raise PeerLostError(texts.without_store(_OPERATION)) from error
