"""The check of arguments that name ranks."""

from __future__ import annotations

from easydist.groups.communicators import Communicators


def check_rank(comms: Communicators, name: str, rank: int | None) -> None:
    """Check that an argument is a rank of the group, or None.

    Raises:
        ValueError: It is neither.
    """
    if rank is not None and not 0 <= rank < comms.size:
        raise ValueError(f"{name}={rank} is not a rank of the group: it has {comms.size}, counted from 0")
