"""``DeviceMesh`` over communicators, for DDP, FSDP2, DTensor and tensor parallelism.

Its dimensions are the communicators as process groups that ``torch.distributed`` knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from easydist.base import torch_groups
from easydist.comms.comm import TorchComm
from easydist.comms.new_comm import new_comm
from easydist.comms.own_gloo import GlooGroup, OwnGloo
from easydist.liveness.monitor import Monitor

__all__ = ["init_device_mesh"]

_SEVERAL = (
    "More than one torch comm objects are passed but no global comm(_global_comm) is provided. Pass the communicator "
    "of all ranks as _global_comm="
)


def init_device_mesh(
    mesh_dim_comms: tuple[TorchComm, ...] | str,
    mesh_dim_names: tuple[str, ...] | Mapping[str, int],
    _global_comm: TorchComm | None = None,
) -> DeviceMesh:
    """Create a ``DeviceMesh`` whose dimensions are communicators. All ranks call it.

    If there is no default process group, the global communicator becomes it. ``destroy_process_group()`` removes the
    groups of the mesh, and ``finalize`` ends the communicators.

    Args:
        mesh_dim_comms: One communicator per dimension, outermost first: that of this rank's neighbours along it. Or the
            name of a backend, with which the call creates the communicators.
        mesh_dim_names: The names of the dimensions and of their process groups. With a backend's name: names and sizes.
        _global_comm: The communicator of all ranks. It may be omitted for one dimension, and with a backend's name.

    Returns:
        A mesh with the sizes of the communicators. A rank's place in it follows from its ranks in them.

    Raises:
        RuntimeError: The communicators do not make a mesh of all ranks, or ``_global_comm`` is missing.

    Example:
        >>> import torch.distributed as dist
        >>> from easydist.comms import Solo, TorchComm
        >>> from easydist.comms.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh((TorchComm(Solo()),), ("dp",))
        >>> mesh.mesh_dim_names, mesh.size()
        (('dp',), 1)
        >>> dist.destroy_process_group()

    Cost: two all-gathers of the global communicator, and one of each dimension's.

    Source: the torchcomms API.
    """
    if isinstance(mesh_dim_comms, str):
        if not isinstance(mesh_dim_names, Mapping):
            raise TypeError("init_device_mesh: with a backend's name, mesh_dim_names= must map names to sizes")
        comms, everyone = _made(mesh_dim_comms, mesh_dim_names, _global_comm)
    else:
        comms, everyone = tuple(mesh_dim_comms), _everyone(tuple(mesh_dim_comms), _global_comm)
    names = tuple(mesh_dim_names)
    if len(names) != len(comms):
        raise RuntimeError(f"init_device_mesh: {len(comms)} communicators have {len(names)} names")
    if not dist.is_initialized():
        _make_default(everyone)
    mesh = _layout(comms, everyone)
    _check_lines(mesh, comms, names, everyone)
    lines = [_line(mesh, dim, dist.get_rank()) for dim in range(len(names))]
    groups = [_group_of(comm, name, ranks) for comm, name, ranks in zip(comms, names, lines, strict=True)]
    kind = everyone.get_device().type
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, kind, mesh, mesh_dim_names=names)


def _everyone(comms: Sequence[TorchComm], given: TorchComm | None) -> TorchComm:
    if given is None and len(comms) != 1:
        raise RuntimeError(_SEVERAL)
    return comms[0] if given is None else given


def _made(backend: str, sizes: Mapping[str, int], given: TorchComm | None) -> tuple[tuple[TorchComm, ...], TorchComm]:
    """Create the communicators of all ranks, in rank order along the dimensions."""
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    everyone = given or new_comm(backend, device, f"mesh {' '.join(sizes)}")
    shape, rank = tuple(sizes.values()), everyone.get_rank()
    if math.prod(shape) != everyone.get_size():
        raise RuntimeError(f"init_device_mesh: {everyone.get_size()} ranks cannot form a mesh of {dict(sizes)}")
    mesh = torch.arange(math.prod(shape), device="cpu").view(shape)
    members = [_line(mesh, dim, rank) for dim in range(len(shape))]
    parts = [everyone.split(ranks, name) for ranks, name in zip(members, sizes, strict=True)]
    return tuple(cast(TorchComm, part) for part in parts), everyone


def _line(mesh: torch.Tensor, dim: int, rank: int) -> list[int]:
    """Return the ranks along a dimension that include this one."""
    place = (mesh == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if d == dim else at for d, at in enumerate(place))
    ranks: list[int] = mesh[index].tolist()
    return ranks


def _layout(comms: Sequence[TorchComm], everyone: TorchComm) -> torch.Tensor:
    """Gather every rank's place, and return the ranks of the default group in the shape of the mesh."""
    places, shape = [comm.get_rank() for comm in comms], [comm.get_size() for comm in comms]
    rows = _rows(everyone, [dist.get_rank(), *places, *shape])
    mesh = torch.full(shape, -1, device="cpu")
    for rank, *row in rows:
        place, sizes = row[: len(shape)], row[len(shape) :]
        if sizes == shape and all(at < size for at, size in zip(place, shape, strict=True)):
            mesh[tuple(place)] = rank
    if mesh.numel() != everyone.get_size() or (mesh < 0).any():
        raise RuntimeError(
            f"init_device_mesh: the communicators do not form a mesh of {' × '.join(map(str, shape))} of "
            f"{everyone.get_size()} ranks: two ranks share a place, or a place has no rank, or the sizes differ: "
            f"{[row[1:] for row in rows]}"
        )
    return mesh


def _check_lines(mesh: torch.Tensor, comms: Sequence[TorchComm], names: Sequence[str], everyone: TorchComm) -> None:
    """Make sure that each communicator holds the ranks of its line of the mesh; if one does not, all ranks raise."""
    mine = [rank for comm in comms for (rank,) in _rows(comm, [dist.get_rank()])]
    for rank, *row in _rows(everyone, [dist.get_rank(), *mine]):
        for dim, name in enumerate(names):
            held, row = row[: mesh.shape[dim]], row[mesh.shape[dim] :]
            if held != (line := _line(mesh, dim, rank)):
                raise RuntimeError(
                    f"init_device_mesh: {name!r} of rank {rank} holds the ranks {held}, but the mesh needs {line}"
                )


def _rows(comm: TorchComm, mine: Sequence[int]) -> list[list[int]]:
    """Gather the numbers of all ranks, as many on each."""
    data = torch.tensor(mine, device=comm.get_device())
    rows = torch.empty((comm.get_size(), len(mine)), dtype=torch.int64, device=data.device)
    comm.exchange("init_device_mesh", lambda core, limit: core.all_gather_single(rows, data, False, timeout=limit))
    found: list[list[int]] = rows.tolist()
    return found


def _make_default(comm: TorchComm) -> None:
    """Make the ranks of the communicator of all ranks the world of ``torch.distributed``."""
    group = _group_of(comm, "0", range(comm.get_size()))
    torch_groups.set_default(group)


def _group_of(comm: TorchComm, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group over a communicator's connections; after ``wrap``, the wrapped one.

    If the name is taken, a number is added. The ranks are those of the default group.
    """
    own: Any = getattr(comm.backend, "_group", None)
    if own is not None and torch_groups.is_known(own):
        known: dist.ProcessGroup = own
        return known
    store = comm.store if comm.store is not None else HashStore()
    group: dist.ProcessGroup = _group_over(comm, PrefixStore("presented", store))
    free, backend = torch_groups.free_name(name), (comm.get_backend(), comm.get_device().type)
    torch_groups.present(group, free, ranks, backend, store, comm.get_name() or free)
    return group


def _group_over(comm: TorchComm, store: Store) -> Any:
    backend = comm.backend
    if isinstance(backend, OwnGloo):
        return GlooGroup(store, comm.get_rank(), comm.get_size(), backend.process_group)
    if comm.get_device().type != "cpu":
        return backend._group  # type: ignore[attr-defined]
    from easydist.torch_backend.group import SharedMemoryGroup  # few need it

    size = comm.get_size()
    monitor = comm.monitor or Monitor(comm.get_rank(), size, comm.time_limit.total_seconds())
    group: Any = SharedMemoryGroup(backend, store, comm.time_limit, monitor)
    comm.look_to(group.guard)
    return group
