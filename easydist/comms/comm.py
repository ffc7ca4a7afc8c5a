"""``TorchComm``: the public communicator, with options, sub-communicators, batches, windows and recovery."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, SupportsIndex

import torch
from torch.distributed import DistError, PrefixStore, Store

from easydist.base.arguments import integer, integers
from easydist.comms.batch import BatchSendRecv
from easydist.comms.circles import Splits
from easydist.comms.failures import UNMADE, explained
from easydist.comms.hooks import AbortHook, PostHook, PreHook, RemovableHandle, taking_the_error
from easydist.comms.making import Endpoint, Made, make, recovered
from easydist.comms.operations import Operations
from easydist.comms.options import CommOptions, Milliseconds, checked_hints, limited
from easydist.comms.window import RegisteredWindow, TorchCommWindow
from easydist.errors import EasydistError
from easydist.groups.communicators import Communicators
from easydist.groups.pickled import OfThisProcess
from easydist.groups.recovering import TIMEOUT, Recovery, alone
from easydist.shm.streams import Guard
from easydist.transport.backend import Backend
from easydist.transport.checked import checked_timeout
from easydist.transport.comm import Collectives
from easydist.typing import T


class TorchComm(OfThisProcess, Collectives):
    """A communicator, with the methods and signatures of torchcomms; ``new_comm`` makes one.

    Every method checks its arguments before it sends anything, and raises ``RuntimeError`` if they do not fit. Tensors
    must be on the communicator's device; strides and dtypes are free. Methods compare the numbers of elements, not the
    shapes. With ``async_op=True`` an operation returns at once and continues by itself; use its result after
    ``wait()``. Of ``hints`` only ``check`` is used, over gloo (see ``new_comm``). ``timeout`` limits each wait of the
    operation; None or zero means the communicator's own limit. All ranks call the operations of one communicator in the
    same order, each rank from one thread at a time. Communicators do not disturb one another. After an operation has
    failed, the communicator is broken, unless the error says that it goes on.

    Args:
        backend: Moves the bytes.
        name: A name for error messages and logs.
        options: None means the defaults.
        store: The store in which the ranks can meet again to split. It belongs to this communicator alone.
        kind: The backend's name for ``new_comm``; if it is empty, no sub-communicators can be created.
        made: The backend's knowledge of the other ranks.

    Attributes:
        store: The store in which the ranks can meet again.
        monitor: Watches the other processes.
        store_of_verbs: The store for waits of easydist's verbs over this communicator; None if there is none.

    Example:
        >>> from easydist.comms import ReduceOp, Solo, TorchComm
        >>> comm = TorchComm(Solo(), "main")
        >>> tensor = torch.ones(2)
        >>> comm.all_reduce(tensor, ReduceOp.SUM, async_op=False).wait()
        >>> tensor
        tensor([1., 1.])

    Source: the torchcomms API.
    """

    def __init__(
        self,
        backend: Backend,
        name: str = "",
        options: CommOptions | None = None,
        *,
        store: Store | None = None,
        kind: str = "",
        made: Made | None = None,
    ) -> None:
        self.monitor = made.monitor if made else None
        self._operations = Operations(backend, name, CommOptions() if options is None else options, self.monitor)
        super().__init__(backend, name, self._operations.run)
        self.store, self._kind, self._made = store, kind, made
        self._recovery: Recovery | None = None
        self._recovers = threading.Lock()
        self._splits: Splits | None = None
        self.store_of_verbs: Store | None = None
        if made is not None and made.store is not None:
            self._operations.watch(PrefixStore("calls", made.store))
            self.store_of_verbs = PrefixStore("verbs", made.store)

    def core(self) -> Collectives:
        """Return the same ranks and backend for easydist's verbs, without hooks and time limits of its own.

        Raises:
            RuntimeError: This process is a forked child, or the communicator has been finalized.
        """
        self._operations.demand_own_process()
        if self._operations.is_final:
            raise RuntimeError(f"TorchComm {self._name!r} not initialized: it has been finalized")
        return Collectives(self._backend, self._name)

    def exchange(self, name: str, run: Callable[[Collectives, timedelta], T]) -> T:
        """Do as ``Collectives.exchange``; the communicator is broken if it fails."""
        limit = self.time_limit
        return self._operations.exchange(name, lambda: run(self.core(), limit))

    @property
    def time_limit(self) -> timedelta:
        """The time limit of an operation that does not set its own."""
        return self._operations.time_limit

    @property
    def is_broken(self) -> bool:
        """True if an operation has failed. No further one can begin."""
        return self._operations.failure is not None

    def look_to(self, guard: Guard) -> None:
        """Let ``guard`` end waits in shared memory.

        Args:
            guard: See ``easydist.shm.streams``.
        """
        if self._made is not None and self._made.look_to is not None:
            self._made.look_to(guard)

    def get_options(self) -> CommOptions:
        """Return a copy of the options."""
        return copy.copy(self._operations.options)

    def unsafe_get_backend(self) -> Backend:
        """Return the backend itself. Its interface may change from version to version."""
        return self._backend

    def get_backend_impl(self) -> Backend:
        """Return the backend, as ``unsafe_get_backend``; this is its newer name."""
        return self._backend

    def get_backend_version(self) -> str:
        """Return the version of easydist, which contains all backends."""
        return version("easydist")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of operations that begin after this call.

        Args:
            timeout: At least a millisecond.

        Raises:
            TypeError: It is not a ``timedelta``.
            RuntimeError: It is shorter than a millisecond.
        """
        if checked_timeout(timeout) is None:
            raise TypeError("timeout must be a timedelta, got None")
        if timeout < timedelta(milliseconds=1):
            raise RuntimeError(f"set_timeout: {timeout} is not positive")
        self._operations.options = options = self.get_options()
        options.timeout = self._operations.time_limit = Milliseconds.of(timeout)

    def register_pre_hook(self, hook: PreHook) -> RemovableHandle:
        """Call ``hook(name, op_id, args)`` before each operation, after its arguments were checked. It may raise.

        Args:
            hook: The function.

        Returns:
            A handle; its ``remove``, or the end of a ``with`` block, ends the calls.
        """
        return self._operations.hooks.add(self._operations.hooks.before, hook)

    def register_post_hook(self, hook: PostHook) -> RemovableHandle:
        """Call ``hook(op_id, args)`` once an operation has begun, or without ``async_op`` ended, unless it raised.

        Args:
            hook: The function.

        Returns:
            A handle; its ``remove``, or the end of a ``with`` block, ends the calls.
        """
        return self._operations.hooks.add(self._operations.hooks.after, hook)

    def register_abort_hook(self, hook: AbortHook) -> RemovableHandle:
        """Call ``hook(error)`` when an operation has failed, or ``hook()`` if it takes no argument.

        Args:
            hook: The function. If it raises, that is logged; the caller gets the error of the operation.

        Returns:
            A handle; its ``remove``, or the end of a ``with`` block, ends the calls.
        """
        return self._operations.hooks.add(self._operations.hooks.failed, taking_the_error(hook))

    def batch_op_create(self) -> BatchSendRecv:
        """Create an empty batch of sends and receives."""
        return BatchSendRecv(self)

    def window_allocate(
        self, window_size: SupportsIndex, cpu_buf: bool = False, signal_size: SupportsIndex = 256
    ) -> TorchCommWindow:
        """Allocate memory of this rank that the others can write and read. All ranks call it.

        Args:
            window_size: The number of bytes, the same on every rank.
            cpu_buf: True: put the window on the CPU even if the communicator is not.
            signal_size: The number of signals of each rank.

        Raises:
            RuntimeError: On every rank: the sizes are negative or differ, or the ranks cannot share memory.
        """
        return TorchCommWindow(
            self,
            integer("window_size", window_size, "an integer"),
            cpu_buf,
            integer("signal_size", signal_size, "an integer"),
        )

    def new_window(self, tensor: torch.Tensor | None = None) -> RegisteredWindow:
        """Create a window whose memory is that of a tensor. All ranks call it.

        Args:
            tensor: The tensor to register at once; None: ``tensor_register`` does it later.
        """
        window = RegisteredWindow(self)
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    def split(
        self,
        ranks: Sequence[SupportsIndex],
        name: str,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> TorchComm | None:
        """Create a communicator of some of the ranks, with the same options. This works after ``finalize``, too.

        All members must call it with the same list; the others may call it with an empty list, or not at all.

        Args:
            ranks: The members. A member's rank is its position in the list.
            name: The name of the new communicator.
            hints: Hints that replace this communicator's.
            timeout: The time limit for creating it; None means the communicator's.

        Returns:
            The communicator; None for an empty list.

        Raises:
            RuntimeError: A rank does not exist or is listed twice, this rank is not a member, this process is a forked
                child, or some members did not come in time (CommTimeout), have ended (CommPeerLost), recover this
                communicator (CommRemoteError), or wait for this rank in a ``split`` with another list
                (CommDisagreement, on all of these ranks).
        """
        self._operations.demand_own_process()
        members = self._members(ranks)
        checked_hints(hints)
        limit = limited(checked_timeout(timeout), self.time_limit)
        if not members:
            return None
        options = self.get_options()
        options.hints = options.hints if hints is None else hints
        rank, what = members.index(self.get_rank()), f"split {name!r}"
        if not self._kind or self.store is None:
            raise RuntimeError(f"{what}: this communicator was made without a store; use new_comm or wrap")
        store = PrefixStore(f"split/{'-'.join(map(str, members))}", self.store)
        peers = {} if self.monitor is None else self.monitor.peers
        known = {i: peers[member] for i, member in enumerate(members) if member in peers}
        splits = self._splits = self._splits or Splits(self.store, self.get_rank(), self.get_size())
        endpoint = Endpoint(store, rank, len(members), self.get_device(), name, options, limit, known, splits.look)
        with splits.waiting(members, name):
            return made_comm(self._kind, endpoint, what)

    def recover(self, timeout: timedelta | None = None) -> TorchComm:
        """Create a communicator of the surviving ranks after a rank has died or has not come. All survivors call it.

        It has the same members on every rank on which it returns: the ranks that are alive and have called, in their
        old order, numbered from 0. This communicator can no longer be used, whether it was broken before or not.

        Args:
            timeout: How long to wait for ranks that are alive; None means a minute. Connecting may take up to half a
                minute more. The call does not wait for dead ranks if they were on this host.

        Returns:
            The communicator, with the same backend, device, name and options, but without hooks.

        Raises:
            CommLeftOut: This rank came too late, and the others have continued without it.
            CommTimeout: The survivors could not be connected in time. The call can be repeated.
            CommPeerLost: The survivors cannot agree, because the store is lost and they are on several hosts.
            OverlappingCallError: Another thread of this process is recovering it.
            RuntimeError: It was recovered or finalized before, or made by ``wrap`` or without a store.

        Example:
            >>> import os
            >>> from easydist.comms import new_comm
            >>> os.environ |= {"TORCHCOMM_RANK": "0", "TORCHCOMM_SIZE": "1"}
            >>> comm = new_comm("shm", torch.device("cpu"), "main", store=torch.distributed.HashStore())
            >>> comm = comm.recover()
            >>> comm.get_size()
            1

        Source: easydist's own.
        """
        limit = TIMEOUT if timeout is None else limited(checked_timeout(timeout), self.time_limit).total_seconds()
        if self._operations.is_final:
            raise RuntimeError(f"recover: TorchComm {self._name!r} not initialized: it has been finalized")
        if not self._kind or self.store is None or (self.monitor is None and self.get_size() > 1):
            raise RuntimeError(
                "recover: this communicator was not made by new_comm; over a process group call "
                "easydist.recover(group=...) and wrap what it returns"
            )
        self._operations.demand_own_process()
        with alone(self._recovers):
            return self._recovered(limit)

    def _recovered(self, limit: float) -> TorchComm:
        assert self.store is not None
        self._end_exchanges()
        endpoint = Endpoint(self.store, 0, 1, self.get_device(), self._name, self.get_options(), self.time_limit)
        if self.monitor is None:
            return made_comm(self._kind, endpoint, f"recover {self._name!r}")
        if self._recovery is None:
            self._recovery = Recovery(self.monitor, PrefixStore("recover", self.store))
        made, endpoint = recovered(self._recovery, self._kind, endpoint, limit).made
        return _comm_over(self._kind, endpoint, made)

    def _end_exchanges(self) -> None:
        """Break the connections, so that ranks that wait for this one call ``recover``, too."""
        self._operations.end(RuntimeError("recover() has replaced it"))
        for monitor in (self.monitor, getattr(self.communicators, "monitor", None)):  # the second one is of verbs
            if monitor is not None:
                monitor.recovers()

    def _members(self, ranks: Sequence[SupportsIndex]) -> list[int]:
        members, size = integers("ranks", ranks, "a list of ranks"), self.get_size()
        for rank in members:
            if not 0 <= rank < size:
                raise RuntimeError(f"Invalid rank {rank} in ranks. Valid ranks are 0 to {size - 1}")
        if len(set(members)) < len(members):
            raise RuntimeError(f"Duplicate ranks found in ranks list: {members}")
        if members and self.get_rank() not in members:
            raise RuntimeError(f"Current rank {self.get_rank()} is not included in the provided ranks list {members}")
        return members

    def finalize(self) -> None:
        """Release the communicator's resources; getters, ``split`` and sub-communicators still work.

        Ranks may call it at different times: it waits for the collectives under way, what this rank has sent still
        arrives, and an operation of another rank that needs more of it raises ``CommPeerLost``.

        Raises:
            RuntimeError: It was called before.
        """
        if self._operations.is_final:
            raise RuntimeError(f"TorchComm {self._name!r} already finalized")
        try:
            self._operations.finish()
        finally:
            self._announce_leaving()
            super().finalize()

    def _announce_leaving(self) -> None:
        """Tell the other ranks, in its operations and in verbs, that this rank has left."""
        if self.monitor is not None:
            self.monitor.announce_leaving()
        if isinstance(self.communicators, Communicators):
            self.communicators.leave()


def made_comm(kind: str, endpoint: Endpoint, what: str) -> TorchComm:
    """Create a communicator whose ranks meet now.

    Args:
        kind: The backend's name.
        endpoint: This rank's endpoint in the communicator.
        what: The call, for error messages.

    Raises:
        RuntimeError: Some ranks did not come, or the backend cannot be created.
    """
    try:
        made: Made = make(kind, endpoint)
    except Exception as error:
        if isinstance(error, RuntimeError) and (isinstance(error, EasydistError) or not isinstance(error, DistError)):
            raise
        raise explained(error, what, endpoint.timeout, [*endpoint.known.values()], UNMADE) from error
    return _comm_over(kind, endpoint, made)


def _comm_over(kind: str, endpoint: Endpoint, made: Made) -> TorchComm:
    try:
        return TorchComm(made.backend, endpoint.name, endpoint.options, store=_own(endpoint), kind=kind, made=made)
    except BaseException as error:  # Ctrl-C: the others have the communicator, and may wait in it
        if made.monitor is not None:
            made.monitor.ended_by(error)
        raise


def _own(endpoint: Endpoint) -> Any:
    """Return the store for later calls of the communicator."""
    return PrefixStore("of", endpoint.store)
