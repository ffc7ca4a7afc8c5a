"""``TorchComm``: the public communicator, with options, hooks, sub-communicators, batches and windows."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, SupportsIndex

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from easydist.comms.batch import BatchSendRecv
from easydist.comms.failures import abort, explained
from easydist.comms.hooks import AbortHook, HookArgs, Hooks, PostHook, PreHook, RemovableHandle
from easydist.comms.making import Made, Place, make
from easydist.comms.options import CommOptions, Milliseconds, checked_hints, limited
from easydist.comms.traced import traced
from easydist.comms.window import RegisteredWindow, TorchCommWindow
from easydist.liveness.monitor import Monitor
from easydist.shm.streams import Guard
from easydist.transport.backend import Backend
from easydist.transport.checked import Hints, checked_timeout
from easydist.transport.comm import Collectives
from easydist.transport.staging import Staging
from easydist.transport.work import TorchWork


class TorchComm(Collectives):
    """A communicator, with the methods and signatures of torchcomms; ``new_comm`` makes one.

    Every method checks its arguments before anything is sent and raises ``RuntimeError`` where they do not fit. Tensors
    have to be on the communicator's device; strides and dtypes are free. Shapes are not compared, numbers of elements
    are. With ``async_op=True`` an operation returns at once, goes on by itself, and its result may be used after
    ``wait()``. ``hints`` are accepted and not used. ``timeout`` limits each wait of the operation; None or zero is the
    communicator's own. All ranks call the operations of one communicator in the same order, each rank from one thread
    at a time; communicators do not disturb one another. After an operation has failed the communicator is broken.

    Args:
        backend: Moves the bytes.
        name: For people.
        options: None: the defaults.
        store: Where the ranks can meet again, to split; for this communicator alone.
        kind: The backend's name for ``new_comm``; empty: no sub-communicators can be made.
        made: What is known of the ranks.

    Attributes:
        store: Where the ranks can meet again.
        monitor: Knows the other processes.

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
        super().__init__(backend, name)
        self._options = CommOptions() if options is None else options
        self.store, self._kind, self._made = store, kind, made
        self.monitor: Monitor | None = made.monitor if made else None
        self._hooks = Hooks()
        self._busy: dict[str, tuple[int, str]] = {}
        self._failure: BaseException | None = None
        self._is_final = False
        self._operations = 0

    def core(self) -> Collectives:
        """The same ranks and backend for easydist's verbs, without hooks and time limits of its own."""
        return Collectives(self._backend, self._name)

    @property
    def time_limit(self) -> timedelta:
        """How long an operation may take unless it says otherwise."""
        return self._options.time_limit

    @property
    def is_broken(self) -> bool:
        """True if an operation has failed: no further one can begin."""
        return self._failure is not None

    def look_to(self, guard: Guard) -> None:
        """Let ``guard`` end waits in shared memory.

        Args:
            guard: See ``easydist.shm.streams``.
        """
        if self._made is not None and self._made.look_to is not None:
            self._made.look_to(guard)

    def get_options(self) -> CommOptions:
        """The options; a copy."""
        return copy.copy(self._options)

    def unsafe_get_backend(self) -> Backend:
        """The backend itself, which may change from version to version."""
        return self._backend

    def get_backend_impl(self) -> Backend:
        """The same, by its newer name."""
        return self._backend

    def get_backend_version(self) -> str:
        """The version of easydist, whose own all backends are."""
        return version("easydist")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of operations that begin from now on.

        Args:
            timeout: At least a millisecond.

        Raises:
            TypeError: It is no ``timedelta``.
            RuntimeError: It leaves no time.
        """
        if checked_timeout(timeout) is None:
            raise TypeError("timeout must be a timedelta, got None")
        if timeout < timedelta(milliseconds=1):
            raise RuntimeError(f"set_timeout: {timeout} leaves no time")
        self._options = copy.copy(self._options)
        self._options.timeout = Milliseconds.of(timeout)

    def batch_op_create(self) -> BatchSendRecv:
        """An empty batch of sends and receives."""
        return BatchSendRecv(self)

    def window_allocate(
        self, window_size: SupportsIndex, cpu_buf: bool = False, signal_size: SupportsIndex = 256
    ) -> TorchCommWindow:
        """Memory of this rank that the others write and read; called by all ranks.

        Args:
            window_size: Bytes, the same number on every rank.
            cpu_buf: True: on the CPU, also if the communicator is not.
            signal_size: How many signals each rank has.

        Raises:
            RuntimeError: The sizes are negative, or differ, or the ranks cannot share memory; on every rank.
        """
        return TorchCommWindow(self, operator.index(window_size), cpu_buf, operator.index(signal_size))

    def new_window(self, tensor: torch.Tensor | None = None) -> RegisteredWindow:
        """A window whose memory is that of a tensor; called by all ranks.

        Args:
            tensor: Registered at once; None: ``tensor_register`` does it later.
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
        """A communicator of some of the ranks, with the same options; works after ``finalize``, too.

        Its members have to call with the same list; the others may call with an empty one, or not at all.

        Args:
            ranks: The members; a member's rank is its position in the list.
            name: The new communicator's.
            hints: Instead of this communicator's.
            timeout: For the making; None is the communicator's.

        Returns:
            The communicator; None for an empty list.

        Raises:
            RuntimeError: A rank does not exist, stands twice, or this rank is not among them; or not all came.
        """
        members = self._members(ranks)
        checked_hints(hints)
        limit = limited(checked_timeout(timeout), self.time_limit)
        if not members:
            return None
        options = copy.copy(self._options)
        options.hints = options.hints if hints is None else hints
        rank, what = members.index(self.get_rank()), f"split {name!r}"
        if not self._kind or self.store is None:
            raise RuntimeError(f"{what}: this communicator was made without a store; use new_comm or wrap")
        store = PrefixStore(f"split/{'-'.join(map(str, members))}", self.store)
        place = Place(store, rank, len(members), self.get_device(), name, options, limit)
        return made_comm(self._kind, place, what)

    def _members(self, ranks: Sequence[SupportsIndex]) -> list[int]:
        members, size = [operator.index(rank) for rank in ranks], self.get_size()
        for rank in members:
            if not 0 <= rank < size:
                raise RuntimeError(f"Invalid rank {rank} in ranks. Valid ranks are 0 to {size - 1}")
        if len(set(members)) < len(members):
            raise RuntimeError(f"Duplicate ranks found in ranks list: {members}")
        if members and self.get_rank() not in members:
            raise RuntimeError(f"Current rank {self.get_rank()} is not included in the provided ranks list {members}")
        return members

    def finalize(self) -> None:
        """Give back what the communicator has created; getters and ``split`` work on, and so do its children.

        Raises:
            RuntimeError: It was called before.
        """
        if self._is_final:
            raise RuntimeError(f"TorchComm {self._name!r} already finalized")
        self._is_final = True
        super().finalize()

    def register_pre_hook(self, hook: PreHook) -> RemovableHandle:
        """Call ``hook(name, op_id, args)`` before each operation, whose arguments are right; it may raise.

        Args:
            hook: The function.
        """
        return self._hooks.add(self._hooks.before, hook)

    def register_post_hook(self, hook: PostHook) -> RemovableHandle:
        """Call ``hook(op_id, args)`` when an operation has begun, or, without ``async_op``, ended; not if it raised.

        Args:
            hook: The function.
        """
        return self._hooks.add(self._hooks.after, hook)

    def register_abort_hook(self, hook: AbortHook) -> RemovableHandle:
        """Call ``hook(error)`` when an operation has failed.

        Args:
            hook: The function.
        """
        return self._hooks.add(self._hooks.failed, hook)

    def _run(
        self,
        name: str,
        begin: Callable[[], TorchWork],
        async_op: bool,
        hints: Hints,
        timeout: timedelta | None,
        staging: Staging | None = None,
    ) -> TorchWork:
        self._demand_ready(name)
        limit = limited(checked_timeout(timeout), self.time_limit)
        outputs = [] if staging is None else staging.outputs
        args = HookArgs(name, bool(async_op), checked_hints(hints), limit, outputs)
        number = self._operations
        self._operations += 1
        for before in tuple(self._hooks.before.values()):
            before(name, number, args)
        with traced(self, name, number, outputs):
            work = self._begun(name, begin, async_op, limit, staging)
        for after in tuple(self._hooks.after.values()):
            after(number, args._replace(work=work))
        return work

    def _begun(
        self, name: str, begin: Callable[[], TorchWork], async_op: bool, limit: timedelta, staging: Staging | None
    ) -> TorchWork:
        """The operation itself, with no other of this process at the same time."""
        mine = threading.get_ident(), name
        other = self._busy.setdefault("operation", mine)
        if other is not mine:
            raise RuntimeError(self._two_at_once(mine, other))
        try:
            work = self._posted(name, begin, limit)
            if staging is not None:
                staging.deliver(work)
            work.reporting(lambda error: self._failed(error, name, limit), staging.outputs if staging else ())
            if not async_op:
                work.wait()
            elif self._backend.device.type == "cpu":
                work.in_background()
            return work
        finally:
            self._busy.pop("operation", None)

    def _posted(self, name: str, begin: Callable[[], TorchWork], limit: timedelta) -> TorchWork:
        try:
            return begin().within(limit)
        except BaseException as error:
            raise self._failed(error, name, limit) from error

    def _demand_ready(self, name: str) -> None:
        if self._is_final:
            raise RuntimeError(f"{name}: TorchComm {self._name!r} not initialized: it has been finalized")
        if self._failure is not None:
            raise RuntimeError(f"{name}: the communicator {self._name!r} is broken: {self._failure}") from self._failure

    def _two_at_once(self, mine: tuple[int, str], other: tuple[int, str]) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [
            f"{mine[1]}: another call of the group is under way in this process",
            *[f"  {names.get(thread)}: {operation}" for thread, operation in (other, mine)],
            f"Calls of one communicator ({self._name!r}) have one order on all ranks, so they cannot overlap: give "
            "each thread a communicator of its own (new_comm, split), and make no call in a signal handler.",
        ]
        return "\n".join(lines)

    def _failed(self, error: BaseException, name: str, limit: timedelta) -> BaseException:
        """Break the communicator; returns what is to be raised."""
        if self._failure is not None or self._is_final:
            return RuntimeError(f"{name}: the operation cannot end any more: {self._failure or 'finalized'}")
        peers = [] if self.monitor is None else list(self.monitor.peers.values())
        what = f"{name} in the communicator {self._name!r} (rank {self.get_rank()} of {self.get_size()})"
        raised = explained(error, what, limit, peers) if isinstance(error, Exception) else error
        self._failure = raised
        if raised is not error:
            raised.__cause__ = error
        for hook in tuple(self._hooks.failed.values()):
            hook(raised)
        if self._options.abort_process_on_timeout_or_error:
            abort(raised)
        return raised


def made_comm(kind: str, place: Place, what: str) -> TorchComm:
    """A communicator whose ranks meet now.

    Args:
        kind: The backend's name.
        place: Which rank of which communicator this is.
        what: The call, for errors.

    Raises:
        RuntimeError: They did not all come, or the backend cannot be made.
    """
    try:
        made: Made = make(kind, place)
    except Exception as error:
        if isinstance(error, RuntimeError):
            raise
        raise explained(error, what, place.timeout, []) from error
    own: Any = PrefixStore("of", place.store)
    return TorchComm(made.backend, place.name, place.options, store=own, kind=kind, made=made)
