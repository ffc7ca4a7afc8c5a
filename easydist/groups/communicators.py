"""The communicators of a group: one for control on the CPU, one for the data of each device type."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from easydist import memory
from easydist.base import forks, torch_groups
from easydist.base.gloo import run_after_ranks
from easydist.data.packing import Packed, Packing
from easydist.errors import EasydistError, LeftOutError, Mark
from easydist.groups.connecting import gloo_beside
from easydist.groups.first_meeting import FirstMeeting
from easydist.groups.founding import Founding, appear, found
from easydist.groups.reconnecting import reconnect
from easydist.groups.recovering import Attempt, Recovered, Recovery, alone
from easydist.groups.sharing import Hosts, all_gather, attach, introduce, is_wanted
from easydist.liveness import texts
from easydist.liveness.monitor import Monitor, again
from easydist.liveness.peer import host_id
from easydist.liveness.status import nothing, recovering
from easydist.liveness.timed_store import TimedStore
from easydist.liveness.watchdog import signals_wake_watchdog, watchdog
from easydist.shm.mailbox import Mailbox
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo
from easydist.transport.backends.hierarchical import Hierarchical
from easydist.transport.backends.native import over
from easydist.transport.backends.shm import Shm
from easydist.transport.backends.solo import Solo
from easydist.transport.comm import Collectives

T = TypeVar("T")

_SLOT = 1 << 16
"""The least bytes that a rank can publish at once; where rows of headers are longer, one of them, if there is room."""

_ROW, _ROWS, _SHORTEST_ROW = 1 << 15, 1 << 20, 1 << 12
"""The most bytes of a row of ``Frames``, those of all rows together, and the least of a row, which counts first."""

_CUT_ROWS, _HEADER = 1 << 19, 1 << 10
"""The bytes of all rows that a few ranks have even if these rows are longer, and those that each has beside for numbers
and sizes. An exchange of data after that of headers costs more than to copy so much into frames and out of them."""

_LARGE = 1 << 19
_LARGE_SLOTS = (2 << 20, 1 << 19, 1 << 17)
"""Large steps beat many small ones, as every step may cost context switches; 8 MB was slower again than 2."""

_SHORTEST = 0.05
"""The least seconds that are left for a call after its group was made."""

_ENDS_WITHIN, _LOOK_EVERY = 2.0, 0.005
"""Seconds within which the call of another thread ends once this process has left the group, and between two looks."""

_ALWAYS = nullcontext()
"""The context for backends that wait in Python: Python handles signals during their waits without help."""


class Frames:
    """The buffer that receives the headers of a call: one row per rank, reused by every call.

    Args:
        size: The number of ranks.
        are_cut: True if only the used part of a row travels.

    Attributes:
        nbytes: The length of a row. Rows are shorter in larger groups, because every rank receives the rows of all.
    """

    def __init__(self, size: int, are_cut: bool = True) -> None:
        nbytes = max(min(_ROW, _ROWS // size), _CUT_ROWS // size + _HEADER if are_cut else 0)
        self.nbytes, self._size = max(_SHORTEST_ROW, nbytes // 64 * 64), size

    @functools.cached_property
    @memory.kept
    def rows(self) -> torch.Tensor:
        """The rows as a tensor: uint8, of shape (group size, ``nbytes``)."""
        return torch.empty((self._size, self.nbytes), dtype=torch.uint8, device="cpu")

    @functools.cached_property
    def view(self) -> memoryview:
        """The same memory, for ``struct``."""
        return self.rows.view(-1).numpy().data

    @functools.cached_property
    def columns(self) -> np.ndarray[Any, Any]:
        """The eight numbers at the beginning of every row, as int64 of shape (8, group size)."""
        columns: np.ndarray[Any, Any] = self.rows.numpy()[:, :64].view(np.int64).T
        return columns

    @functools.cached_property
    def packed(self) -> Callable[[Packing, int], Packed]:
        """The function that returns the leaves of a packing in the rows, from a byte on; it remembers the last ones."""
        rows = self.rows
        return functools.lru_cache(maxsize=16)(memory.kept(lambda packing, start: Packed(rows, packing, start)))

    @functools.cached_property
    @memory.kept
    def each(self) -> tuple[torch.Tensor, ...]:
        """The rows one by one: slices of these cost less."""
        return self.rows.unbind()


class Communicators:
    """The communicators of one group. The ranks meet in their first call, unless they have met before.

    Args:
        control: A communicator of the group on the CPU; None if it has none.
        group: The process group; None if only ``control`` represents the group.
        founding: The group, if its ranks have not made it yet.
        made: Called with the group and these communicators once the ranks have made it.

    Attributes:
        founding: The group that the ranks make in the first call; None once they have made it.
        control: Carries headers, sizes and objects; its tensors are on the CPU. It is set once the ranks have met.
        name: The name of the group.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        has_met: True if the ranks know one another.
        monitor: Monitors the waits of the group's calls.
        frames: The buffer for headers.
        mark: The mark of errors that all ranks of the group raise.
        under_way: The call that this process is making in the group; empty outside of calls.
        pairs: What this rank shares with one other rank alone, by rank, until the ranks reconnect.
        turns: The lock for the calls of backward passes, because autograd has a thread for each device.
    """

    control: Collectives
    _first: Collectives

    def __init__(
        self,
        control: Collectives | None,
        group: dist.ProcessGroup | None = None,
        founding: Founding | None = None,
        made: Callable[[dist.ProcessGroup, Communicators], object] | None = None,
    ) -> None:
        self.founding, self._made = founding, made
        if founding is not None:
            self.name, self.rank, self.size = "default", founding.rank, founding.size
        elif control is not None:
            self.name, self.rank, self.size = control.get_name(), control.get_rank(), control.get_size()
        elif group is not None:
            self.name, self.rank, self.size = group.group_name, group.rank(), group.size()
            control = Collectives(Solo(), self.name) if self.size == 1 else None  # with any backend
        self._group = group
        self._device_group: dist.ProcessGroup | None = None
        self._bulk: Collectives | None = None
        self._shared: list[Backend] = []
        self._hosts: Hosts = []
        self._store: Store | None = None
        self._asked: TimedStore | None = None  # the same store, to reconnect
        if group is not None and self.size > 1:
            self._store = PrefixStore("easydist", group.get_group_store())
        self._data: dict[str, Collectives] = {}
        store = None if self._store is None else TimedStore(self._store)
        timeout = timeout_of(group) if founding is None else founding.timeout
        self.monitor = Monitor(self.rank, self.size, timeout, store, self.name)
        if group is None and founding is None:
            self.monitor.advice = texts.VERBS_ENDED
        self.monitor.elder = getattr(group, "monitor", None)  # a group in shared memory has met
        self.frames, self.mark = Frames(self.size), Mark()
        self.under_way: dict[str, Any] = {}
        # The bodies of ``together`` and the like that this rank is in, and those of ``main_process_first`` and the
        # like, for whose end others wait outside; and the outermost body of the first kind that another rank has left
        # with an error, or is not in, as far as this rank has heard, with the error that it got.
        self.bodies = self.awaited_bodies = 0
        self.left: tuple[int, EasydistError] | None = None
        self.turns = threading.RLock()  # a call in a signal handler is an error, not a deadlock
        self._recovery: Recovery | None = None
        self._recovers = threading.Lock()
        self._inboxes: dict[int, deque[Any]] = {}
        self.pairs: dict[int, Any] = {}
        if control is not None:
            self._use(control)
        self.has_met = self._is_recorded = self.size == 1
        self._waits_in_cpp = True
        self._generation = forks.generation

    def demand_own_process(self) -> None:
        """Check that this is not a forked child, which would pose as its parent.

        Raises:
            RuntimeError: This process is a forked child.
        """
        forks.demand_own(self._generation)

    def met(self, timeout: timedelta | None = None, check: Callable[[], None] = nothing) -> Communicators:
        """Let the ranks meet if they have not met yet, and return these communicators.

        For use outside of a call; every rank has to call it.

        Args:
            timeout: The time limit; None is the group's.
            check: Called again and again meanwhile; it raises an ``EasydistError`` once ranks cannot meet any more.

        Raises:
            EasydistError: Some ranks did not come.
        """
        limit = None if timeout is None else timeout.total_seconds()
        self.found("the first call of the group", "easydist", limit)
        if not self.has_met:
            self.monitor.begin("the first call of the group", "easydist", limit)
            self.monitor.outside = check
            self.make_ready()
            self.monitor.outside = nothing
            self.monitor.end()
        return self

    def found(self, operation: str, site: str, timeout: float | None) -> float | None:
        """Make the group if the ranks have not made it yet; all of them have to come.

        Args:
            operation: The call that needs the group.
            site: The file and line of that call.
            timeout: Its time limit in seconds; None is the group's.

        Returns:
            The seconds that are left of ``timeout``.

        Raises:
            EasydistError: Some ranks did not come.
        """
        if self.founding is None:
            return timeout
        began = time.monotonic()
        self._store, self._group = found(self.founding, self.monitor, self._store, (operation, site, timeout))
        if self._made is not None:
            self._made(self._group, self)
        self.founding, self._made, self.name = None, None, self._group.group_name
        self.monitor.elder = getattr(self._group, "monitor", None)
        self.monitor.name, self.monitor.timeout = self.name, timeout_of(self._group)
        if (backend := over(self._group)) is not None:
            self._use(Collectives(backend, self.name))
        return None if timeout is None else max(_SHORTEST, timeout - (time.monotonic() - began))

    def appear(self) -> None:
        """Let the others see this rank before its first call, while it runs a body for which they wait."""
        if self.founding is not None and self._store is None:
            self._store = appear(self.founding, self.monitor)
        if self.size > 1:
            watchdog().add(self.monitor)  # which tells other hosts, and ranks that have not met this one yet

    def make_ready(self) -> None:
        """Connect or reconnect the ranks during a call, if that is necessary; all ranks have to come.

        A call between only two ranks skips the meeting: they need nothing but a connection. If an earlier call fails
        on another rank while the ranks meet, they reconnect and meet again.

        Raises:
            EasydistError: Some ranks did not come.
        """
        # All ranks have to come, also for a call between two: so the monitor observes all of them.
        peer, self.monitor.peer = self.monitor.peer, None
        try:
            while self._is_apart or not (self.has_met or peer is not None):
                try:
                    self.reconnect() if self._is_apart else self._meet()
                except EasydistError as error:
                    if not error.is_earlier:
                        raise
        finally:
            self.monitor.peer = peer

    def begin(self, exchange: Callable[[], T]) -> T:
        """Run the first exchange of a call; repeat it while it shows that an earlier call has failed on another rank.

        Args:
            exchange: Runs the exchange. It must look up the communicators, which may have been replaced before the
                second time.
        """
        while True:
            self.monitor.is_awaited = self.monitor.peer is None
            try:
                return exchange()
            except EasydistError as error:
                if not error.is_earlier:
                    raise
            self.make_ready()

    def _meet(self) -> None:
        """Exchange the identities of all ranks, and share memory with the other ranks where possible."""
        self.monitor.is_awaited = True
        first = FirstMeeting(self._store, self.monitor)
        # Before the exchange: ranks that recover the group instead of meeting find this one by its record.
        first.announce()
        is_ours = type(self.control.backend) is Gloo  # if users bring their own backend, data has to go through it
        hosts = introduce(functools.partial(all_gather, self.control), self.monitor, is_ours and is_wanted())
        near, self._hosts = attach(self.control, self.monitor, hosts, [max(_SLOT, self.frames.nbytes), _SLOT])
        if len(self._hosts) < self.size:
            self._data["cpu"] = self.control = self._over(near, 0)
        self.monitor.waits_in_memory = self.control.get_backend() == "shm"
        self._waits_in_cpp = isinstance(self.control.backend, Gloo | Hierarchical)
        self._is_recorded = self._is_recorded or first.conclude()
        self.monitor.is_awaited, self.has_met = False, True
        if (ids := self.hosts) is not None:  # the first rank of each group that shares memory exchanges messages
            run_after_ranks([ids[ranks[0]] for ranks in self._hosts].count(host_id()))

    def _use(self, control: Collectives) -> None:
        """Use this communicator for control, and have its waits monitored."""
        if not hasattr(self, "control"):  # a call that reconnects the ranks has written its frame
            self.frames = Frames(self.size, type(control.backend).all_gather_upto is not Backend.all_gather_upto)
        self.control = self._first = self._data[control.get_device().type] = control
        if self.size > 1 and isinstance(backend := control.backend, Gloo):
            backend.monitor, self.monitor.disconnect = self.monitor, backend.disconnect
            backend.is_near = self.monitor.sees
            watchdog().add(self.monitor)

    def _over(self, near: Backend, lane: int) -> Collectives:
        """Return a communicator over this host's shared memory; between hosts it uses the first communicator."""
        if near.size < self.size:
            assert isinstance(self._first.backend, Gloo)
            near = Hierarchical(near, self._first.backend, self._hosts, lane)
        self._shared.append(near)
        return Collectives(near, self.name)

    def cpu(self, nbytes: int) -> Collectives:
        """Return the communicator for data on the CPU: if ranks share memory, one with larger slots for large data.

        Args:
            nbytes: The number of bytes to move, the same on every rank.

        Cost: that of ``attach``, once.
        """
        if nbytes < _LARGE or self.control is self._first:
            return self.control
        if self._bulk is None:
            near, hosts = attach(self.control, self.monitor, self._hosts, _LARGE_SLOTS)
            # ``attach`` returns the same hosts on all ranks, so all of them fall back, or none.
            self._bulk = self._over(near, 1) if hosts == self._hosts else self.control
        return self._bulk

    @property
    def hosts(self) -> list[str] | None:
        """The identifier of each rank's host; None if the ranks have not met."""
        peers = self.monitor.peers
        found = [host_id() if rank == self.rank else peers[rank].host_id for rank in range(self.size)]
        return [host for host in found if host is not None] if self.has_met and None not in found else None

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return the mailbox for short messages to and from a rank; None if the ranks do not share memory."""
        backend = self.control.backend
        return backend.mailbox(peer) if isinstance(backend, Shm) else None

    def inbox(self, peer: int) -> deque[Any]:
        """Return the messages of a rank that were received while this one waited for another."""
        return self._inboxes.setdefault(peer, deque())

    def keep(self, backend: Backend) -> None:
        """Stop this backend, which is over shared memory, together with the others."""
        self._shared.append(backend)

    def carry_by(self, group: dist.ProcessGroup) -> None:
        """Let another group of the same ranks move the tensors of its devices; call this before the first one moves."""
        self._device_group = group

    @property
    def direct(self) -> Backend:
        """The connections between pairs of ranks, even where the ranks share memory."""
        return self._first.backend

    def data(self, device: torch.device) -> Collectives:
        """Return the communicator for tensors on ``device``; the control communicator if the group has none for it."""
        comm = self._data.get(device.type)
        if comm is None:
            group = self._device_group or self._group
            backend = None if group is None else over(group, device)
            comm = self._data[device.type] = Collectives(backend, self.name) if backend else self.control
        return comm

    @property
    def _is_apart(self) -> bool:
        """True if the ranks have to connect."""
        return self.monitor.broken is not None or not hasattr(self, "control")

    @property
    def _gloo(self) -> Gloo | None:
        """The backend that connects the ranks, if it is gloo; else None."""
        backend = self._first.backend if hasattr(self, "_first") else None
        return backend if isinstance(backend, Gloo) else None

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the group, if it is known, and the gloo group made beside it, if there is one."""
        made = [self._gloo._group] if self._gloo else []
        return made if self._group is None else [self._group, *made]

    def let_go(self) -> None:
        """Release everything that would keep the connections of a destroyed group alive."""
        self.monitor.detach()
        if self._gloo:
            self._gloo.monitor = None

    def leave(self) -> None:
        """Tell the other ranks that this one leaves the group; they end waits that need more of it.

        A call that another thread makes raises, too, before its memory is released; it gets some seconds for that.
        Later calls of this process raise the same, such as that of a backward pass, whose graph still knows the group.
        """
        if self.size == 1:
            return
        self.monitor.announce_leaving()
        others = [call for call in tuple(self.under_way.values()) if call.thread != threading.get_ident()]
        if others:
            self.monitor.leave_for_good(self.monitor.left_by_this_process())
        until = time.monotonic() + _ENDS_WITHIN
        while any(call in self.under_way.values() for call in others) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        self.monitor.refuse_calls(self.monitor.left_by_this_process())

    def stop(self) -> None:
        """Stop all transfers through shared memory, so that nothing writes to the caller's tensors after an error."""
        while self._shared:
            self._shared.pop().close()

    def hears_signals(self, between_two: bool) -> AbstractContextManager[bool | None]:
        """Return a context in which Ctrl-C ends the waits of the group."""
        return signals_wake_watchdog() if between_two or self._waits_in_cpp else _ALWAYS

    def recover(self, timeout: float, connect: Callable[[Attempt], T]) -> Recovered[T]:
        """Agree with the other survivors on a new group after ranks were lost, and connect it.

        The old group stays broken for good.

        Args:
            timeout: Seconds after which living ranks that have not come are left out.
            connect: Makes the object that the survivors continue with.

        Raises:
            EasydistError: The errors of ``Recovery.run``.
            RuntimeError: The group has been recovered already, or this process is a forked child.
        """
        self.demand_own_process()
        with alone(self._recovers):
            return self._recovered(timeout, connect)

    def _recovered(self, timeout: float, connect: Callable[[Attempt], T]) -> Recovered[T]:
        self.appear()  # in the store, if a rank was lost before the group was made
        self.monitor.recovers()
        self.stop()
        known: Monitor | None = getattr(self._group, "monitor", None)  # a group in shared memory has met
        if self._recovery is None:
            if known is not None:
                known.recovers()
            has_met = known is not None or FirstMeeting(self._store, self.monitor).look(self._is_recorded, timeout)
            self._recovery = Recovery(known or self.monitor, self._store, has_met)
        try:
            with recovering(known or self.monitor):
                return self._recovery.run(timeout, connect)
        except LeftOutError as error:
            self.monitor.broken = again(error)  # each further call raises it
            raise

    def reconnect(self) -> None:
        """Make new connections after a timeout or an interruption, once all ranks have come.

        Raises:
            EasydistError: The error that broke the old connections, if a process has ended or the group's store is
                not known; any error of ``Monitor.guard`` while ranks are missing.
        """
        broken = self.monitor.broken
        if self._group is None or self._store is None or (broken is not None and broken.is_final):
            self.monitor.raise_if_broken()
        assert self._group is not None
        assert self._store is not None
        self.stop()
        # Both ranks count their messages from zero over new connections.
        self._inboxes.clear()
        self.pairs.clear()
        self.has_met = False
        if self._asked is None or self._asked.plain is not self._store:
            self._asked = TimedStore(self._store)
        connect = functools.partial(gloo_beside, self._group, monitor=self.monitor)
        self._rebuild(reconnect(self._asked, self.monitor, connect))

    def _rebuild(self, backend: Gloo) -> None:
        cpu = self._data.get("cpu")
        self._data = {kind: comm for kind, comm in self._data.items() if comm is not cpu}
        self._use(Collectives(backend, self.name))
        self._bulk = None
        self._meet()


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Return the group's timeout: the seconds that a call may take, as set when the group was created."""
    if isinstance(own := getattr(group, "timeout", None), timedelta):  # a group written in Python has no backend
        return own.total_seconds()
    for kind in [] if group is None else group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            options: Any = group._get_backend(kind).options  # type: ignore[union-attr]
            return float(options._timeout.total_seconds())
    return torch_groups.default_timeout().total_seconds()
