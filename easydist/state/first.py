"""The order of ``main_process_first``: the body runs on some ranks first, and then on the others."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from easydist.agreement.calling import seconds, site
from easydist.agreement.runner import meet, reported
from easydist.groups.communicators import Communicators
from easydist.liveness import bodies
from easydist.typing import Timeout

_OPERATION = "main_process_first"
"""The name for both functions, which may be nested in one another, so that ranks meet in different ones."""


def first(comms: Communicators, goes_first: bool, timeout: Timeout | None) -> Iterator[None]:
    """Run the body between two meetings: after the bodies that go first, and after those of the others.

    Args:
        comms: The group.
        goes_first: True if this rank is one of those that go first.
        timeout: The time limit of each meeting; None is the group's, which does not count while others run their body.
    """
    limit = None if timeout is None else seconds(timeout, _OPERATION)
    meet_all = functools.partial(meet, comms, _OPERATION, timeout=limit)
    if not goes_first:
        meet_all()
    comms.appear()
    with reported(comms, _OPERATION, limit), bodies.running(f"{_OPERATION} at {site()}"):
        yield
    meet_all()
    if goes_first:
        meet_all()


def is_first_of_host(comms: Communicators, timeout: Timeout | None) -> bool:
    """True if no lower rank of the group is on this host; the ranks meet to find out, if they have not met."""
    if comms.hosts is None:
        meet(comms, _OPERATION, timeout=timeout)
    hosts = comms.hosts
    assert hosts is not None
    return hosts.index(hosts[comms.rank]) == comms.rank
