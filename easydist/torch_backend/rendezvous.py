"""Where the ranks of a ``torch.distributed`` group over shared memory meet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.groups.meeting import Meeting

NAME = "easydist_shm"
"""What ``init_process_group`` and ``new_group`` are given."""

_INSTEAD = "Use gloo: init_process_group('gloo')"

_place: ContextVar[Store | None] = ContextVar("easydist_meeting_place", default=None)


@contextlib.contextmanager
def meeting_in(store: Store) -> Iterator[None]:
    """Let the groups that are made in the body meet in this store, whatever torch makes of its own.

    So a process can make a group that exists elsewhere already, and is renewed there (``SharedMemoryGroup.renew``).

    Args:
        store: Of one meeting only.
    """
    token = _place.set(store)
    try:
        yield
    finally:
        _place.reset(token)


def meeting(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Meeting, Store]:
    """The meeting of a group, and the store of this generation of it.

    Args:
        store: torch's, for the group.
        rank: This process in the group.
        size: How many processes the group has.
        timeout: How long all of it may last.
    """
    store = _place.get() or store
    # A store may have seen a group of this name before: each generation has keys of its own.
    own = PrefixStore(f"{(store.add('came', 1) - 1) // size}", store)
    return Meeting(own, rank, size, timeout, name=NAME, operation="init_process_group", instead=_INSTEAD), own
