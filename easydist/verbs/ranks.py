"""Arguments that name ranks: ``src=``, ``dst=``, ``from_process=``, and torch's ``group_src=`` and ``group_dst=``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from easydist.base import torch_groups
from easydist.base.arguments import UNSET, either, integer
from easydist.base.wording import counted
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group


def named_rank(group: Group, operation: str, name: str, value: Any, group_value: Any, default: Any = 0) -> Any:
    """Return the rank inside the group that the caller has named.

    ``group_src`` is a rank inside the group, and so is ``src``. But in functions of ``torch.distributed``, a ``src`` is
    a rank of the world. So with a group of torch, a ``src`` that was passed has to mean the same member either way.

    Args:
        group: The group as the caller passed it. Only groups and meshes of torch count in the world, too.
        operation: The function.
        name: The first name: ``"src"``, ``"from_process"`` or ``"dst"``.
        value: The value passed under it: a rank, or ranks; ``UNSET`` or None if there is none.
        group_value: The value passed as ``group_src`` or ``group_dst``, or None.
        default: The result if nothing was passed.

    Returns:
        The rank, or ranks; or the error, for ``check_rank`` to raise where all ranks learn of it.
    """
    if group_value is None and (value is UNSET or value is None):
        return default if value is UNSET else value
    try:
        is_plain = group_value is None and group is None
        rank = value if is_plain else _member(group, operation, name, value, group_value)
    except (TypeError, ValueError) as error:
        return error.with_traceback(None)  # its frames hold it, once the caller has it in a local
    try:
        return integer(name, rank, "a rank")  # NumPy's integers fit no message
    except Exception:  # several ranks, or what ``check_rank`` refuses, where all ranks learn of it
        return rank


def named_peer(group: Group, operation: str, name: str, value: Any, group_value: Any) -> Any:
    """Return ``named_rank`` of a rank that has to be named, for a call between two ranks.

    Raises:
        TypeError: No rank was named, or one was named twice.
        ValueError: The name is ambiguous. The other rank cannot learn of it, as nobody knows which one it is.
    """
    if value is UNSET and group_value is None:
        either(operation, name, UNSET, "", UNSET)
    peer = named_rank(group, operation, name, value, group_value)
    _raise_if_error(peer)
    return peer


def check_rank(comms: Communicators, operation: str, name: str, rank: Any) -> Any:
    """Check that an argument is a rank of the group, or None, and return it.

    Args:
        comms: The group.
        operation: The function.
        name: The argument.
        rank: The result of ``named_rank``.

    Raises:
        TypeError: ``named_rank`` returned this error, or it is not an integer.
        ValueError: ``named_rank`` returned this error, or the rank is not in the group.
    """
    if type(rank) is not int:
        _raise_if_error(rank)
        if rank is None:
            return None
        rank = integer(f"{operation}: {name}", rank, "a rank")
    if not 0 <= rank < comms.size:
        raise ValueError(f"{operation}: {name}={rank} is not a rank of the group, which has {counted(comms.size)}")
    return rank


def source_rank(comms: Communicators, operation: str, name: str, rank: Any) -> int:
    """Return an argument as a rank after ``check_rank``; it cannot be None."""
    found = check_rank(comms, operation, name, rank)
    return found if found is not None else integer(f"{operation}: {name}", None, "a rank")


def _raise_if_error(rank: Any) -> None:
    """Raise a copy of an error: the call holds the error itself, and would be kept with it and its data in a cycle."""
    if isinstance(rank, Exception):
        raise type(rank)(*rank.args)


def checked_ranks(comms: Communicators, operation: str, name: str, ranks: Any) -> list[int]:
    """Return one or several ranks as a list, after ``check_rank``."""
    asked: Sequence[Any] = [ranks] if isinstance(ranks, Exception) else _listed(ranks)
    return [source_rank(comms, operation, name, rank) for rank in asked]


def _member(group: Group, operation: str, name: str, value: Any, group_value: Any) -> Any:
    group_name = "group_dst" if name == "dst" else "group_src"
    own = UNSET if group_value is None else group_value
    rank = either(operation, name, UNSET if value is None else value, group_name, own)
    if not (group is None or isinstance(group, dist.ProcessGroup) or hasattr(group, "get_coordinate")):
        return rank  # a communicator or coordinator, which counts its own members
    comms = communicators(group)
    if group_value is not None:
        checked_ranks(comms, operation, group_name, rank)
        return rank
    made = group if isinstance(group, dist.ProcessGroup) else comms.groups()[0]
    places = torch_groups.places(made)  # None: torch does not know the group
    asked = [integer(f"{operation}: {name}", one, "a rank") for one in _listed(rank)]
    if places is not None and (text := _ambiguity(places, group_name, rank, asked)):
        raise ValueError(f"{operation}: {name}={rank} {text}")
    return rank


def _ambiguity(places: Mapping[int, int], group_name: str, value: Any, asked: Sequence[int]) -> str:
    """Return the two meanings of a rank or of ranks; nothing if they are the same, or if there is none.

    Args:
        places: Each member's rank inside the group by its rank in the world.
        group_name: The argument that is unambiguous.
        value: The argument.
        asked: The rank or ranks in it.
    """
    if all(places.get(rank) == rank for rank in asked):
        return ""
    world = {place: rank for rank, place in places.items()}
    members, ranks = [places.get(rank) for rank in asked], [world.get(rank) for rank in asked]
    readings = [(own, of) for own, of in ((members, asked), (asked, ranks)) if None not in (*own, *of)]
    if not readings:
        return ""  # check_rank refuses it
    shown = [(own if hasattr(value, "__iter__") else own[0], of) for own, of in readings]
    told = [f"{group_name}={own} for {_text('rank', of)} of the world" for own, of in shown]
    as_world = "not in the group" if None in members else f"{_text('member', members)} of the group"
    as_member = f"there are only {len(world)}" if None in ranks else f"{_text('rank', ranks)} of the world"
    return (
        "is ambiguous with a group of torch.distributed\n"
        f"  as a rank of the world, as in torch's functions: {as_world}\n"
        f"  as a member of the group, counted from 0: {as_member}\n"
        f"Pass {', or '.join(told)}."
    )


def _listed(ranks: Any) -> Sequence[Any]:
    return [ranks] if hasattr(ranks, "__index__") or not hasattr(ranks, "__iter__") else ranks


def _text(noun: str, numbers: Sequence[Any]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
