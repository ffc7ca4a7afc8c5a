"""Backends by name, created by ranks that meet in a store, or by those that are left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from easydist.comms.failures import UNMADE, CommLeftOut, CommPeerLost, CommTimeout, explained
from easydist.comms.options import CommOptions
from easydist.comms.own_gloo import OwnGloo
from easydist.errors import CollectiveTimeout, EasydistError, LeftOutError, PeerLostError
from easydist.groups.connecting import connect, gloo_connections
from easydist.groups.recovering import Attempt, Recovered, Recovery
from easydist.groups.rendezvous import Rendezvous
from easydist.groups.sharing import Hosts, is_wanted
from easydist.liveness.monitor import Monitor
from easydist.liveness.peer import Peer
from easydist.liveness.status import nothing
from easydist.shm.streams import Guard
from easydist.transport.backend import Backend
from easydist.transport.backends.native import Native
from easydist.transport.backends.solo import Solo


class Endpoint(NamedTuple):
    """The rank and the communicator for which a backend is created."""

    store: Store
    """The store of this communicator alone."""
    rank: int
    size: int
    device: torch.device
    name: str
    options: CommOptions
    timeout: timedelta
    """The time limit for creating the backend."""
    known: Mapping[int, Peer] = {}
    """The other processes by rank, as far as they are known from a communicator that this one is split from."""
    look: Callable[[], None] = nothing
    """Called again and again while the ranks meet; it raises if they cannot."""


class Made(NamedTuple):
    """A backend and its knowledge of the other ranks."""

    backend: Backend
    monitor: Monitor | None = None
    look_to: Callable[[Guard], None] | None = None
    """Sets the guard that ends waits in shared memory."""
    store: Store | None = None
    """The store of this communicator and no earlier one of its name."""


Factory = Callable[[Endpoint], Backend]

_factories: dict[str, Factory] = {}
_BUILT_IN = ("auto", "gloo", "nccl", "shm")


def register_backend(name: str, factory: Factory) -> None:
    """Let ``new_comm(name, …)`` create communicators over a custom backend.

    Args:
        name: Any name but those of the built-in backends.
        factory: Called on each rank with its ``Endpoint`` (``store``, ``rank``, ``size``, ``device``, ``name``,
            ``options``, ``timeout``). It returns the rank's ``Backend``.

    Raises:
        ValueError: ``name`` is the name of a built-in backend.

    Example:
        >>> import torch
        >>> from easydist.comms import Solo, new_comm, register_backend
        >>> register_backend("alone", lambda endpoint: Solo())
    """
    if name in _BUILT_IN:
        raise ValueError(f"register_backend: {name!r} is built in")
    _factories[name] = factory


def check_backend(name: object) -> None:
    """Make sure that there is a backend of this name.

    Raises:
        TypeError: ``name`` is not a string.
        ModuleNotFoundError: There is no such backend.
    """
    if not isinstance(name, str):
        raise TypeError(f"backend must be a str, got {name!r}")
    if name not in _BUILT_IN and name not in _factories:
        known = ", ".join([*_BUILT_IN, *_factories])
        raise ModuleNotFoundError(
            f"failed to find backend {name}, is it registered via entry_points.txt? "
            f"Known backends: {known}. register_backend(name, factory) adds one"
        )


def make(kind: str, endpoint: Endpoint) -> Made:
    """Create a backend. All ranks of the communicator call it.

    Args:
        kind: The backend's name.
        endpoint: That of this rank. The store may have been used for the same communicator before.

    Raises:
        RuntimeError: Some ranks did not come, or the backend cannot be created.
    """
    if kind in _factories:
        with _rendezvous(endpoint) as rendezvous:
            return Made(_factories[kind](endpoint._replace(store=rendezvous.store)))
    if endpoint.size == 1:
        alone = Solo(endpoint.device)
        alone.name = kind if kind != "auto" else "shm" if endpoint.device.type == "cpu" else "nccl"
        return Made(alone)
    with _rendezvous(endpoint) as rendezvous:
        hosts = rendezvous.introduce(is_wanted() and endpoint.device.type == "cpu")
        build = {"shm": _shm, "gloo": _gloo, "nccl": _nccl}[_chosen(kind, endpoint, hosts)]
        backend = build(endpoint._replace(store=rendezvous.store), rendezvous, hosts)
        rendezvous.monitor.operation = f"the communicator {endpoint.name!r}"
        rendezvous.monitor.end()
        return Made(backend, rendezvous.monitor, rendezvous.look_to, rendezvous.store)


def _rendezvous(endpoint: Endpoint) -> Rendezvous:
    return Rendezvous(
        endpoint.store,
        endpoint.rank,
        endpoint.size,
        endpoint.timeout,
        name=f"the communicator {endpoint.name!r} over shm",
        operation=f"new_comm {endpoint.name!r}",
        known=endpoint.known,
        look=endpoint.look,
    )


def _chosen(kind: str, endpoint: Endpoint, hosts: Hosts) -> str:
    """Return the backend that ``auto`` means."""
    if kind != "auto":
        return kind
    if endpoint.device.type == "cpu":
        return "shm" if len(hosts) == 1 else "gloo"
    return "nccl"


def _shm(endpoint: Endpoint, rendezvous: Rendezvous, hosts: Hosts) -> Backend:
    if endpoint.device.type != "cpu":
        raise RuntimeError(f"the backend shm moves tensors on the CPU, not on {endpoint.device}")
    return rendezvous.join(hosts, "Use gloo: new_comm('gloo', …), or 'auto'")


_dist: Any = dist
"""Untyped, because the stubs depend on the build of torch."""


def _gloo(endpoint: Endpoint, rendezvous: Rendezvous, hosts: Hosts) -> Backend:
    if endpoint.device.type != "cpu":
        raise RuntimeError(f"the backend gloo moves tensors on the CPU, not on {endpoint.device}; use nccl")
    hints = endpoint.options.hints
    where = {key: hints[key] for key in ("hostname", "interface") if key in hints}
    store, monitor = PrefixStore("gloo", endpoint.store), rendezvous.monitor
    try:
        gloo = gloo_connections(
            store, endpoint.rank, endpoint.size, rendezvous.left, monitor, rendezvous.check, **where
        )
    except RuntimeError as error:  # from gloo: it names neither the call nor the communicator
        raise explained(error, monitor.operation, endpoint.timeout, [], UNMADE) from error
    rendezvous.arrive()  # a rank that closes its connections at once would break those that others are still making
    return OwnGloo(gloo, endpoint.device, monitor)


def _nccl(endpoint: Endpoint, rendezvous: Rendezvous, hosts: Hosts) -> Backend:
    if endpoint.device.type != "cuda" or not _dist.is_nccl_available():
        raise RuntimeError(
            f"the backend nccl needs a GPU and a torch that was built with it; device is {endpoint.device}"
        )
    from torch.distributed import ProcessGroupNCCL

    given = ":" in str(endpoint.device)
    device = endpoint.device if given else torch.device("cuda", endpoint.rank % torch.cuda.device_count())
    group: Any = dist.ProcessGroup(PrefixStore("nccl", endpoint.store), endpoint.rank, endpoint.size)
    store, options = PrefixStore("nccl", endpoint.store), _nccl_options(endpoint)
    limit, monitor = rendezvous.left.total_seconds(), rendezvous.monitor
    told = store, endpoint.rank, endpoint.size, options
    nccl = connect(lambda: ProcessGroupNCCL(*told), limit, monitor, rendezvous.check)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl)
    return Native(group, device, "nccl")


def _nccl_options(endpoint: Endpoint) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = endpoint.timeout
    options.is_high_priority_stream = endpoint.options.hints.get("high_priority_stream") == "1"
    return options


def recovered(recovery: Recovery, kind: str, old: Endpoint, timeout: float) -> Recovered[tuple[Made, Endpoint]]:
    """Agree on the survivors, and make a backend for them.

    Args:
        recovery: The communicator's recovery.
        kind: The name of the backend.
        old: The endpoint of this rank in the old communicator. Its store is not used.
        timeout: Seconds to wait for ranks that are alive but have not called; they are left out after that.

    Raises:
        CommLeftOut: The others have continued without this rank.
        CommTimeout: The survivors could not be connected in time.
        CommPeerLost: The survivors cannot agree.
    """

    def connect(attempt: Attempt) -> tuple[Made, Endpoint]:
        size = len(attempt.members)
        new = old._replace(store=attempt.store, rank=attempt.rank, size=size, timeout=attempt.left)
        return make(kind, new._replace(look=attempt.check)), new

    try:
        return recovery.run(timeout, connect)
    except EasydistError as error:
        raise _of_comm(error) from error


def _of_comm(error: EasydistError) -> EasydistError:
    """Return the same error as a ``RuntimeError``."""
    kinds: list[tuple[type[EasydistError], type[EasydistError]]]
    kinds = [(LeftOutError, CommLeftOut), (CollectiveTimeout, CommTimeout), (PeerLostError, CommPeerLost)]
    kind = next((own for known, own in kinds if isinstance(error, known)), None)
    if kind is None:
        return error
    found = kind(*error.args)
    vars(found).update(vars(error))
    return found
