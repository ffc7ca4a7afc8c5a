"""Which communicators a group has: one for control on the CPU, one for the data of each device type."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from easydist.errors import EasydistError
from easydist.forks import NOT_A_RANK, groups_of_parents, keep
from easydist.groups.first_meeting import FirstMeeting
from easydist.groups.reconnecting import reconnect
from easydist.groups.recovering import Attempt, Recovered, Recovery, leave
from easydist.groups.sharing import Hosts, all_gather, attach, introduce, is_wanted
from easydist.liveness.monitor import Monitor
from easydist.liveness.timed_store import TimedStore
from easydist.liveness.watchdog import signals_wake_watchdog, watchdog
from easydist.shm.mailbox import Mailbox
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo, over
from easydist.transport.backends.hierarchical import Hierarchical
from easydist.transport.backends.shm import Shm
from easydist.transport.backends.solo import Solo
from easydist.transport.comm import Collectives

T = TypeVar("T")

_SLOT = 1 << 16
"""Room for what a rank publishes at once: headers and small payloads."""

_LARGE = 1 << 19
_LARGE_SLOTS = (2 << 20, 1 << 19, 1 << 17)
"""Large steps beat many small ones, as every step may cost context switches; 8 MB was slower again than 2."""

_ALWAYS = nullcontext()
"""Backends that wait in Python hear signals anyway."""


class Frames:
    """Where the headers of a call arrive: one row per rank, used again by every call.

    Attributes:
        nbytes: The length of a row: less in larger groups, where everybody's row goes to everybody.
    """

    def __init__(self, size: int) -> None:
        self.nbytes = max(1 << 12, min(1 << 15, (1 << 20) // size // 64 * 64))
        self._size = size

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """uint8, of the shape (group size, ``nbytes``)."""
        return torch.empty((self._size, self.nbytes), dtype=torch.uint8, device="cpu")

    @functools.cached_property
    def view(self) -> memoryview:
        """The same memory, for ``struct``."""
        return self.rows.view(-1).numpy().data


class Communicators:
    """The communicators of one group. The ranks meet in their first call, as far as they have not met before.

    Args:
        control: A communicator of the group on the CPU; None where it has none.
        group: The group; None where ``control`` is all that there is of it.

    Attributes:
        control: Carries headers, sizes and objects; its tensors are on the CPU. There once the ranks have met.
        name: The group's.
        rank: This process in the group.
        size: How many processes the group has.
        has_met: True if the ranks know one another.
        monitor: Looks after the waits of its calls.
        frames: Where headers arrive.
        under_way: The call that this process makes in the group; empty outside of calls.
    """

    control: Collectives
    _first: Collectives

    def __init__(self, control: Collectives | None, group: dist.ProcessGroup | None = None) -> None:
        if control is not None:
            self.name, self.rank, self.size = control.get_name(), control.get_rank(), control.get_size()
        elif group is not None:
            self.name, self.rank, self.size = group.group_name, group.rank(), group.size()
            control = Collectives(Solo(), self.name) if self.size == 1 else None  # whatever its backend is
        self._group = group
        self._device_group: dist.ProcessGroup | None = None
        self._bulk: Collectives | None = None
        self._shared: list[Backend] = []
        self._hosts: Hosts = []
        self._store = None if group is None or self.size == 1 else PrefixStore("easydist", group.get_group_store())
        self._data: dict[str, Collectives] = {}
        store = None if self._store is None else TimedStore(self._store)
        self.monitor = Monitor(self.rank, self.size, timeout_of(group), store, self.name)
        self.frames = Frames(self.size)
        self.under_way: dict[str, Any] = {}
        self._recovery: Recovery | None = None
        if control is not None:
            self._use(control)
        self.has_met = self.size == 1
        self._waits_in_cpp = True
        self._pid = os.getpid()

    def demand_own_process(self) -> None:
        """Make sure that this is not a forked child, which would speak in its parent's name.

        Raises:
            RuntimeError: It is.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(NOT_A_RANK)

    def met(self) -> Communicators:
        """The same, for use outside of a call: if the ranks have not met, they do now; on every rank.

        Raises:
            EasydistError: They did not all come.
        """
        if not self.has_met:
            self.monitor.begin("the first call of the group", "easydist")
            self.make_ready()
            self.monitor.end()
        return self

    def make_ready(self) -> None:
        """In a call: connect the ranks, if that has not been done or has to be done again; all of them have to come.

        Two ranks alone need not know more of one another than how to send.

        Raises:
            EasydistError: They did not all come.
        """
        peer, self.monitor.peer = self.monitor.peer, None
        try:
            if self.monitor.broken is not None or not self._is_connected:
                self.reconnect()
            elif not self.has_met and peer is None:
                self._meet_first()
        finally:
            self.monitor.peer = peer

    def begin(self, exchange: Callable[[], T]) -> T:
        """The first exchange of a call; once more, where it shows that a call before this one has failed elsewhere.

        Args:
            exchange: Does it. The communicators may be others the second time.
        """
        self.monitor.is_awaited = self.monitor.peer is None
        try:
            return exchange()
        except EasydistError as error:
            if not error.is_earlier:
                raise
        self.make_ready()
        self.monitor.is_awaited = self.monitor.peer is None
        return exchange()

    def _meet_first(self) -> None:
        try:
            self._meet()
        except EasydistError as error:
            if not error.is_earlier:
                raise
            self.reconnect()  # two ranks have failed before the others came

    def _meet(self) -> None:
        """Learn who the other ranks are, and share memory with them where that is possible."""
        self.monitor.is_awaited = True
        first = FirstMeeting(self._store, self.monitor)
        first.announce()
        is_ours = type(self.control.backend) is Gloo  # a backend of the user's own is there to be used
        hosts = introduce(functools.partial(all_gather, self.control), self.monitor, is_ours and is_wanted())
        near, self._hosts = attach(self.control, self.monitor, hosts, [_SLOT])
        if len(self._hosts) < self.size:
            self._data["cpu"] = self.control = self._over(near, 0)
        self.monitor.waits_in_memory = self.control.get_backend() == "shm"
        self._waits_in_cpp = isinstance(self.control.backend, Gloo | Hierarchical)
        first.conclude()
        self.monitor.is_awaited, self.has_met = False, True

    def _use(self, control: Collectives) -> None:
        """Talk by this communicator, and have its waits looked after."""
        self.control = self._first = self._data[control.get_device().type] = control
        if self.size > 1 and isinstance(backend := control.backend, Gloo):
            backend.monitor, self.monitor.disconnect = self.monitor, backend.disconnect
            watchdog().add(self.monitor)

    def _over(self, near: Backend, channel: int) -> Collectives:
        """A communicator over the memory of this host's ranks; between hosts over the first one's connections."""
        if near.size < self.size:
            assert isinstance(self._first.backend, Gloo)
            near = Hierarchical(near, self._first.backend, self._hosts, channel)
        self._shared.append(near)
        return Collectives(near, self.name)

    def cpu(self, nbytes: int) -> Collectives:
        """The communicator for data on the CPU: where memory is shared, one with more room for large data.

        Args:
            nbytes: How much shall move, the same number on every rank.

        Cost: that of ``attach``, once.
        """
        if nbytes < _LARGE or self.control is self._first:
            return self.control
        if self._bulk is None:
            near, hosts = attach(self.control, self.monitor, self._hosts, _LARGE_SLOTS)
            self._bulk = self._over(near, 1) if hosts == self._hosts else self.control
        return self._bulk

    def between_two(self, nbytes: int) -> Collectives:
        """The communicator for data on the CPU that only two ranks exchange: they cannot make one with more room.

        Args:
            nbytes: How much shall move, the same number on both.
        """
        return self.control if nbytes < _LARGE else self._bulk or self._first

    def mailbox(self, peer: int) -> Mailbox | None:
        """Short messages to another rank and from it, through memory; None where the group's ranks do not share it."""
        backend = self.control.backend
        return backend.mailbox(peer) if isinstance(backend, Shm) else None

    def carry_by(self, group: dist.ProcessGroup) -> None:
        """Let another group of the same ranks carry the tensors of its devices; before the first of them travels."""
        self._device_group = group

    @property
    def direct(self) -> Backend:
        """The connections between pairs of ranks, even where the ranks share memory."""
        return self._first.backend

    def data(self, device: torch.device) -> Collectives:
        """The communicator for tensors on ``device``; the control communicator where the group has none for it."""
        comm = self._data.get(device.type)
        if comm is None:
            group = self._device_group or self._group
            backend = None if group is None else over(group, device)
            comm = self._data[device.type] = Collectives(backend, self.name) if backend else self.control
        return comm

    @property
    def _is_connected(self) -> bool:
        return hasattr(self, "control")

    @property
    def _gloo(self) -> Gloo | None:
        """What connects the ranks, where it is gloo."""
        backend = self._first.backend if self._is_connected else None
        return backend if isinstance(backend, Gloo) else None

    def groups(self) -> list[dist.ProcessGroup]:
        """The group, and the one that was made beside it, where there is one."""
        made = [self._gloo._group] if self._gloo else []
        return made if self._group is None else [self._group, *made]

    def let_go(self) -> None:
        """The group is no more: keep nothing of it alive until the garbage collector comes."""
        self.monitor.detach()
        if self._gloo:
            self._gloo.monitor = None

    def stop(self) -> None:
        """End what is under way in shared memory: after an error nothing is written to the caller's tensors."""
        while self._shared:
            self._shared.pop().close()

    def hears_signals(self, between_two: bool) -> AbstractContextManager[bool | None]:
        """While this lasts, Ctrl-C ends the waits of the group."""
        return signals_wake_watchdog() if between_two or self._waits_in_cpp else _ALWAYS

    def recover(self, timeout: float, connect: Callable[[Attempt], T]) -> Recovered[T]:
        """After ranks were lost: agree with the other survivors, and connect them; this group is broken for good.

        Args:
            timeout: Seconds until ranks that are alive, and have not come, are left out.
            connect: Makes what the survivors go on with.

        Raises:
            EasydistError: As ``Recovery.run``.
            RuntimeError: The group has been recovered already.
        """
        leave(self.monitor)
        self.stop()
        if self._recovery is None:
            known: Monitor | None = getattr(self._group, "monitor", None)  # a group in shared memory has met
            has_met = known is not None or FirstMeeting(self._store, self.monitor).look(self.has_met, timeout)
            self._recovery = Recovery(known or self.monitor, self._store, has_met)
        return self._recovery.run(timeout, connect)

    def reconnect(self) -> None:
        """After a timeout or an interruption: new connections, once all ranks have come.

        Raises:
            EasydistError: What broke the old ones, where a process has ended or the group's store is not known; what
                ``Monitor.guard`` raises while ranks are missing.
        """
        broken = self.monitor.broken
        if self._group is None or self._store is None or (broken is not None and broken.is_final):
            self.monitor.raise_if_broken()
        assert self._group is not None
        assert self._store is not None
        self.stop()
        self.has_met = False
        self._rebuild(reconnect(self._group, self._store, self.monitor))

    def _rebuild(self, backend: Gloo) -> None:
        cpu = self._data.get("cpu")
        self._data = {kind: comm for kind, comm in self._data.items() if comm is not cpu}
        self._use(Collectives(backend, self.name))
        self._bulk = None
        self._meet()


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Seconds that a call may take, as the group's maker has set it."""
    if isinstance(own := getattr(group, "timeout", None), timedelta):  # a group written in Python has no backend
        return own.total_seconds()
    for kind in [] if group is None else group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            options: Any = group._get_backend(kind).options  # type: ignore[union-attr]
            return float(options._timeout.total_seconds())
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


_CACHE: dict[dist.ProcessGroup, Communicators] = {}
unregistered: set[dist.ProcessGroup] = set()
"""Groups that torch does not know of, as long as somebody uses them."""

_making = threading.RLock()
"""Held while communicators are made."""

SOLO = Communicators(Collectives(Solo(), "solo"))
"""The communicators of a process that is alone."""


def of_group(group: dist.ProcessGroup) -> Communicators:
    """The communicators of ``group``."""
    found = _CACHE.get(group)
    return _make(group) if found is None else found


def _make(group: dist.ProcessGroup) -> Communicators:
    with _making:  # two threads may come at once, and have to find each other's calls
        if (found := _CACHE.get(group)) is not None:
            return found
        kept = dist.distributed_c10d._world.pg_map.keys() | unregistered
        for gone in [known for known in _CACHE if known not in kept]:
            _CACHE.pop(gone).let_go()  # a destroyed group would hold its connections as long as it is known here
        if group in groups_of_parents:
            raise RuntimeError(NOT_A_RANK)
        backend = over(group)
        found = _CACHE[group] = Communicators(Collectives(backend, group.group_name) if backend else None, group)
        return found


def forget(group: dist.ProcessGroup) -> None:
    """Let the next call make new communicators, in which the ranks meet again; all ranks have to do it.

    Args:
        group: The group, whose store may be another one by then.
    """
    with _making:
        if (known := _CACHE.pop(group, None)) is not None:
            known.stop()
            known.let_go()


def _after_fork() -> None:
    global _making
    _making = threading.RLock()  # the parent's may have been taken
    keep([group for comms in _CACHE.values() for group in comms.groups()])


os.register_at_fork(after_in_child=_after_fork)


def of_comm(comm: Collectives) -> Communicators:
    """The communicators of a group that is given by a communicator on the CPU.

    Raises:
        ValueError: ``comm`` is not on the CPU, so that headers cannot travel on it.
    """
    if comm.get_device().type != "cpu":
        raise ValueError(f"group= needs a communicator on the CPU, or the ProcessGroup itself; got {comm!r}")
    with _making:
        if comm.communicators is None:
            comm.communicators = Communicators(comm.core())
    return cast(Communicators, comm.communicators)
