"""The coordinators of a layout, created together, and the groups of ranks that it makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from easydist.agreement.runner import compare
from easydist.base.arguments import integer
from easydist.groups.communicators import Communicators
from easydist.parallel.coordinator import GroupCoordinator
from easydist.state import ProcessState

_AXES = ("dp", "pp", "pcp", "tp")
_CONTEXT = ("pcp", "dcp")
"""The groups that usually have one rank each: these need no process group."""

Lists = list[list[int]]


class ParallelGroups(Mapping[str, GroupCoordinator]):
    """Coordinators by name, also as attributes. ``destroy`` destroys all of them."""

    def __init__(self, groups: Mapping[str, GroupCoordinator]) -> None:
        self._groups = dict(groups)

    def __getitem__(self, name: str) -> GroupCoordinator:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __getattr__(self, name: str) -> GroupCoordinator:
        groups: dict[str, GroupCoordinator] = self.__dict__.get("_groups", {})  # a copy has none at first
        try:
            return groups[name]
        except KeyError:
            raise AttributeError(f"there is no group {name!r}; there are {', '.join(groups)}") from None

    def destroy(self) -> None:
        """Destroy all groups. A second call does nothing."""
        for group in self._groups.values():
            group.destroy()


def parallel_groups(
    mesh: Any = None,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    pcp: int = 1,
    dcp: int = 1,
    backend: str | dist.Backend | None = None,
    use_message_queue_broadcaster: bool = False,
    weights_only: bool = True,
) -> ParallelGroups:
    """Create the coordinators of a layout. All ranks of the world call it.

    The ranks form a box of ``dp × pp × pcp × tp`` in row-major order, as in vLLM, so the ranks of one tensor-parallel
    group are consecutive.

    Example:
        >>> from easydist.parallel import parallel_groups
        >>> groups = parallel_groups(tp=1, pp=1)
        >>> list(groups), groups.tp.ranks
        (['world', 'dp', 'pp', 'pcp', 'tp', 'ep', 'dcp'], [0])
        >>> groups.destroy()

    Args:
        mesh: A ``DeviceMesh`` of the whole world with named dimensions, in place of the sizes: one coordinator for
            each dimension.
        tp: The number of ranks that share a layer (tensor parallel).
        pp: The number of ranks that have successive layers (pipeline parallel).
        dp: The number of ranks that have the same layers and different data (data parallel); None uses the remaining
            ranks.
        pcp: The number of ranks that share the tokens of a prompt (prefill context parallel).
        dcp: The number of ranks that share the cache of a sequence while it is decoded (decode context parallel): a
            divisor of ``pcp × tp``. They are ranks of one tensor-parallel group, unless there are more of them: those
            with other ``pcp`` come first.
        backend: The backend for tensors on the accelerator, as in ``GroupCoordinator``.
        use_message_queue_broadcaster: ``broadcast_object`` of ``tp`` and ``dcp`` uses queues (for a mesh: of every
            group).
        weights_only: As in ``GroupCoordinator``.

    Returns:
        ``world``, ``dp``, ``pp``, ``pcp``, ``tp``, ``dcp``, and ``ep``, which has the ranks that share the experts of a
        layer, ``dp × pcp × tp`` of one stage. ``pcp`` and ``dcp`` of one rank each have no process group
        (``cpu_group`` is None). For a mesh: ``world`` and one for each dimension.

    Raises:
        ValueError: The product of the sizes is not the world size, ``dcp`` is no divisor, or the mesh lacks names or
            ranks. If that is so on some ranks only, a RemoteError on all.
        DisagreementError: The ranks have passed different layouts.
    """
    size = ProcessState().num_processes

    def laid_out(comms: Communicators) -> tuple[dict[str, Lists], dict[str, Any]]:
        lists = _lists(comms.size, tp, pp, dp, pcp, dcp) if mesh is None else _lists_of_mesh(mesh, comms.size)
        return lists, dict(lists)

    lists = compare(ProcessState().communicators(), "parallel_groups", laid_out)
    with_queues = {*lists} if mesh is not None else {"tp", "dcp"}

    def make(name: str, ranks: Lists) -> GroupCoordinator:
        own_device = str(backend or "gloo") != "gloo"
        queues = use_message_queue_broadcaster and name in with_queues
        local_rank = ProcessState().local_process_index
        if mesh is None and name in _CONTEXT and len(ranks) == size:
            return GroupCoordinator.alone(local_rank, name, weights_only=weights_only)
        return GroupCoordinator(ranks, local_rank, backend, own_device, queues, name, weights_only=weights_only)

    groups = {"world": make("world", [[*range(size)]]), **{name: make(name, ranks) for name, ranks in lists.items()}}
    if mesh is None:
        groups["ep"].data_parallel = groups["dp"]
    return ParallelGroups(groups)


def _lists(size: int, tp: int, pp: int, dp: int | None, pcp: int, dcp: int) -> dict[str, Lists]:
    pp, pcp, tp, dcp = _length("pp", pp), _length("pcp", pcp), _length("tp", tp), _length("dcp", dcp)
    sizes = (max(1, size // (tp * pp * pcp)) if dp is None else dp, pp, pcp, tp)
    lists = rank_lists(size, dict(zip(_AXES, sizes, strict=True)), {"ep": ("dp", "pcp", "tp")})
    if pcp * tp % dcp:
        raise ValueError(f"a layout of dcp={dcp} needs a divisor of pcp × tp, which is {pcp * tp}")
    # Sorted, because torch.distributed sorts the ranks of a group, too.
    along = torch.arange(size, device="cpu").view(-1, pcp, tp).transpose(1, 2) if dcp > 1 else torch.arange(size)
    return {**lists, "dcp": [sorted(ranks) for ranks in along.reshape(-1, dcp).tolist()]}


def _lists_of_mesh(mesh: Any, size: int) -> dict[str, Lists]:
    names = mesh.mesh_dim_names
    if not names or sorted(mesh.mesh.flatten().tolist()) != [*range(size)]:
        raise ValueError(f"parallel_groups needs a DeviceMesh of all {size} ranks with mesh_dim_names, got {mesh}")
    return {
        name: mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.shape[dim]).tolist() for dim, name in enumerate(names)
    }


def rank_lists(
    size: int, axes: Mapping[str, int], joined: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Lists]:
    """Return the groups along each axis of a layout.

    Law: the ranks form a box in row-major order, the last axis fastest. The ranks of a group along an axis differ only
    in their position on it.

    Example:
        >>> rank_lists(4, {"pp": 2, "tp": 2})
        {'pp': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}

    Args:
        size: The number of ranks.
        axes: The length of each axis.
        joined: Groups along several axes at once, by name.

    Raises:
        ValueError: The product of the lengths is not ``size``, or a length is less than 1.
        TypeError: A length is not an integer.
    """
    axes = {name: _length(name, length) for name, length in axes.items()}
    if math.prod(axes.values()) != size:
        told = " × ".join(f"{name}={length}" for name, length in axes.items())
        raise ValueError(f"a layout of {told} needs {math.prod(axes.values())} ranks, but the world has {size}")
    box, names = torch.arange(size, device="cpu").view(*axes.values()), list(axes)
    along = {**{name: [name] for name in names}, **(joined or {})}
    return {name: _along(box, [names.index(axis) for axis in own]) for name, own in along.items()}


def _length(name: str, value: Any) -> int:
    length = integer(name, value, "a number of ranks")
    if length < 1:
        raise ValueError(f"a layout needs at least one rank along each axis, got {name}={length}")
    return length


def _along(box: torch.Tensor, dims: Sequence[int]) -> Lists:
    others = [dim for dim in range(box.ndim) if dim not in dims]
    length = math.prod(box.shape[dim] for dim in dims)
    lists: Lists = box.permute(*others, *dims).reshape(-1, length).tolist()
    return lists
