"""The argument ``group=`` of all verbs: each of its kinds stands for one group."""

from __future__ import annotations

import torch.distributed as dist

from easydist.groups.communicators import Communicators
from easydist.groups.known import of_comm, of_group
from easydist.transport.comm import Collectives
from easydist.typing import Group

_OUTSIDE: object = dist.GroupMember.NON_GROUP_MEMBER
"""The result of ``new_group`` on a rank that is not in the group."""


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
