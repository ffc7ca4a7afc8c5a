"""The ranks of a coordinator, and the process groups that it creates for them."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb, run
from easydist.base import torch_groups
from easydist.base.arguments import integer, integers
from easydist.base.wording import counted
from easydist.groups.communicators import Communicators
from easydist.groups.connecting import connect, registered_group
from easydist.groups.known import SOLO, of_group, unregistered
from easydist.groups.pickled import OfThisProcess
from easydist.state import ProcessState
from easydist.state.groups import default_group, is_recovered

_GroupPair = tuple["dist.ProcessGroup | None", "dist.ProcessGroup | None"]
"""The group for the CPU, and the group for the accelerator."""

_alone = itertools.count()
_counts: dict[str, itertools.count[int]] = {}
_known: weakref.WeakValueDictionary[str, Members] = weakref.WeakValueDictionary()


def named(unique_name: str) -> Members:
    """Return the coordinator with this name. Custom operators get the name in its place.

    Raises:
        LookupError: There is none, or it was destroyed.
    """
    found = _known.get(unique_name)
    if found is None or found.is_destroyed:
        raise LookupError(f"there is no GroupCoordinator {unique_name!r} in this process, or it was destroyed")
    return found


class _GroupCreation(Verb[_GroupPair]):
    """The agreement of all ranks of the world to create the same groups, and their creation by ``make``."""

    operation = "GroupCoordinator"
    needs_data = False
    lists: list[list[int]]
    """The groups as numbers, once all ranks have agreed on them."""

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        arguments: dict[str, Any],
        make: Callable[[Sequence[Sequence[int]], Communicators], _GroupPair] = lambda lists, comms: (None, None),
    ) -> None:
        self._lists, self._arguments, self._make = group_ranks, arguments, make

    def prepare(self, comms: Communicators) -> Call:
        self.lists = [_numbers(ranks) for ranks in self._lists]
        _check_lists(self.lists, comms.size)
        integer("GroupCoordinator: local_rank", self._arguments["local_rank"], "a rank")
        told = {name: value for name, value in self._arguments.items() if name != "local_rank"}
        return Call({"group_ranks": self.lists, **told})

    def exchange(self, comms: Communicators, agreed: Agreement) -> _GroupPair:
        return self._make(self.lists, comms)

    def result(self, comms: Communicators, agreed: Agreement, arrived: _GroupPair) -> _GroupPair:
        return arrived


def _numbers(ranks: Any) -> list[int]:
    """Return a list of ranks as numbers; it may be a tensor, as the rows of a layout are."""
    try:
        return integers("group_ranks", ranks, "a list of ranks")
    except TypeError:
        raise TypeError(f"group_ranks has {ranks!r}; pass lists of ranks, such as [[0, 1], [2, 3]]") from None


def _check_lists(lists: Sequence[Sequence[int]], size: int) -> None:
    every = [rank for ranks in lists for rank in ranks]
    if unordered := [ranks for ranks in lists if list(ranks) != sorted(ranks)]:
        raise ValueError(f"group_ranks has {unordered[0]}; torch.distributed accepts ranks in ascending order only")
    if outside := sorted({rank for rank in every if not 0 <= rank < size}):
        raise ValueError(f"group_ranks has rank {outside[0]}, but the world has {counted(size)}")
    if twice := sorted({rank for rank in every if every.count(rank) > 1}):
        raise ValueError(f"group_ranks has rank {twice[0]} twice; each rank belongs to one group of a coordinator")
    if missing := sorted(set(range(size)) - set(every)):
        raise ValueError(
            f"group_ranks={lists} does not have rank {missing[0]}; add a group for each rank, [{missing[0]}]"
        )


class Members(OfThisProcess):
    """The ranks of the group, this rank's place among them, and the process groups.

    Attributes:
        rank: The rank of this process in the world.
        ranks: The members of the group, as ranks of the world.
        group_ranks: All groups, as they were given.
        torch_distributed_backend: The name of the backend of ``device_group``.
        world_size: The number of members.
        rank_in_group: The rank of this process in the group.
        local_rank: The rank of this process on its host, as it was given.
        device: The device of this process.
        device_index: Its index, the local rank.
        cpu_group: The gloo group for objects and tensors on the CPU; None in a world of one without a launcher.
        device_group: The group for tensors on the accelerator; if its backend is gloo, ``cpu_group`` itself.
        hosts: An identifier of each rank's host, in rank order.
        unique_name: The given name and a number.
        use_device_communicator: The constructor's argument.
        device_communicator: None: there is no further object for the accelerator; call the coordinator's methods.
        use_custom_op_call: True: in a compiled function the collectives are operators.
        weights_only: True if objects are decoded with the restricted decoder.
    """

    weights_only: bool
    device_communicator = None
    use_custom_op_call = True

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: Any,
        use_device_communicator: bool,
        group_name: str | None,
        options: Mapping[str, Any],
    ) -> None:
        backend = str(torch_distributed_backend or "gloo")
        state = ProcessState()
        told = {"backend": backend, "use_device_communicator": bool(use_device_communicator), **options}
        make = functools.partial(_groups, ["gloo", backend])
        creation = _GroupCreation(group_ranks, {**told, "local_rank": local_rank}, make)
        groups = run(creation, state.communicators())
        self.use_device_communicator, self.torch_distributed_backend = bool(use_device_communicator), backend
        self._join(creation.lists, state.process_index, index(local_rank), group_name, groups)

    def _join(
        self, lists: list[list[int]], rank: int, local_rank: int, group_name: str | None, groups: _GroupPair
    ) -> None:
        """Join groups that exist, together with all other members."""
        self.group_ranks, self.ranks = lists, next(ranks for ranks in lists if rank in ranks)
        self.rank, self.local_rank, self.device_index = rank, local_rank, local_rank
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)
        self.device = _device(ProcessState().device, local_rank)
        self.unique_name = _unique(group_name or "anonymous")
        self.cpu_group, self.device_group = groups
        self._communicators: Communicators | None = self._meet()
        hosts = self._communicators.hosts
        assert hosts is not None  # the members have met
        self.hosts = hosts
        _known[self.unique_name] = self

    def _meet(self) -> Communicators:
        if self.cpu_group is None:
            return SOLO
        comms = of_group(self.cpu_group)
        if self.use_device_communicator and self.device_group is not self.cpu_group:
            assert self.device_group is not None
            comms.carry_by(self.device_group)
        return comms.met()

    def _agree(self, options: Mapping[str, Any]) -> None:
        """Make sure that all members have passed the same options; if they have not, leave the groups and raise."""
        try:
            run(_GroupCreation([self.ranks], {**options, "local_rank": self.local_rank}), self.communicators)
        except BaseException:
            self._leave()
            raise

    @property
    def is_destroyed(self) -> bool:
        """True once ``destroy`` was called."""
        return self._communicators is None

    @property
    def communicators(self) -> Communicators:
        """The communicators of the group, for the verbs.

        Raises:
            RuntimeError: The coordinator was destroyed.
        """
        if self._communicators is None:
            raise self._destroyed()
        return self._communicators

    def _destroyed(self) -> RuntimeError:
        return RuntimeError(f"{self!r} was destroyed; make a new GroupCoordinator")

    @property
    def cpu_timeout(self) -> timedelta:
        """The time limit of a call."""
        return timedelta(seconds=self.communicators.monitor.timeout)

    def make_sibling_device_group(self, group_desc: str | None = None) -> dist.ProcessGroup:
        """Create another process group like ``device_group``, for operations beside those of the coordinator.

        All ranks of the world call it. The caller destroys the group.

        Args:
            group_desc: A description of the group, for torch's logs.

        Raises:
            RuntimeError: The coordinator is ``stateless``, or the process alone, without a launcher, so that there is
                no group of torch.
        """
        if self.cpu_group is None or self.cpu_group in unregistered:
            raise RuntimeError(f"{self!r} has no group of torch.distributed, so it cannot have a sibling")
        told = {"local_rank": self.local_rank, "sibling": self.torch_distributed_backend}
        make = functools.partial(_groups, [self.torch_distributed_backend], description=group_desc)
        _, made = run(_GroupCreation(self.group_ranks, told, make), ProcessState().communicators())
        assert made is not None
        return made

    @property
    def first_rank(self) -> int:
        """The first rank of the group, as a rank of the world."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The last rank of the group, as a rank of the world."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        """True if this process is the first rank of the group."""
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        """True if this process is the last rank of the group."""
        return self.rank == self.last_rank

    @property
    def next_rank(self) -> int:
        """The rank of the world after this one in the group; after the last comes the first."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """The rank of the world before this one in the group; before the first comes the last."""
        return self.ranks[(self.rank_in_group - 1) % self.world_size]

    def _leave(self) -> None:
        """Destroy the process groups."""
        if self._communicators is not None:
            self._communicators.leave()
        groups = {id(group): group for group in (self.cpu_group, self.device_group) if group is not None}
        self.cpu_group = self.device_group = self._communicators = None
        for group in groups.values():
            unregistered.discard(group)
            if torch_groups.is_known(group):
                dist.destroy_process_group(group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.unique_name!r}, ranks={self.ranks}, rank_in_group={self.rank_in_group})"


def _device(device: torch.device, local_rank: int) -> torch.device:
    return device if device.type in ("cpu", "mps") else torch.device(device.type, local_rank)


def _unique(name: str) -> str:
    return f"{name}:{next(_counts.setdefault(name, itertools.count()))}"


def _groups(
    backends: Sequence[str], lists: Sequence[Sequence[int]], comms: Communicators, description: str | None = None
) -> _GroupPair:
    """Create the groups of all lists, in the same order on all ranks.

    Returns:
        This process's groups of the first and of the last backend.
    """
    world = ProcessState().process_group if comms.size == 1 else default_group()
    own: _GroupPair = None, None
    if world is None:
        return own
    make = _in_own_store if is_recovered(world) else functools.partial(_by_torch, description=description)
    backends, count = list(dict.fromkeys(backends)), torch_groups.count()
    try:
        for number, ranks in enumerate(lists):
            made = [make(comms, world, [*ranks], name, number) for name in backends]
            own = (made[0], made[-1]) if comms.rank in ranks else own
    finally:
        # The names that torch gives have numbers, which must be equal on all ranks after a failure, too.
        if make is not _in_own_store:
            torch_groups.set_count(count + len(lists) * len(backends))
    return own


def _by_torch(
    comms: Communicators,
    world: dist.ProcessGroup,
    ranks: list[int],
    backend: str,
    number: int,
    description: str | None,
) -> Any:
    limit = timedelta(seconds=comms.monitor.timeout)  # torch would use its own default
    make = functools.partial(dist.new_group, ranks, limit, backend, group_desc=description)
    return connect(make, limit.total_seconds(), comms.monitor, _check_of(ranks, comms))


def _check_of(ranks: Sequence[int], comms: Communicators) -> Callable[[], None]:
    """Return the check of ranks that make a group, or wait for others that do, in a call of the world."""
    return functools.partial(comms.monitor.guard, [rank for rank in ranks if rank in comms.monitor.peers])


def _in_own_store(comms: Communicators, world: dist.ProcessGroup, ranks: list[int], backend: str, number: int) -> Any:
    """Create a group of survivors, whom torch's default group cannot connect: its store may be gone."""
    if comms.rank not in ranks:
        return None
    limit = timedelta(seconds=comms.monitor.timeout)
    call = comms.monitor.number or f"alone-{next(_alone)}"  # a world of one does not count its calls
    name = f"{world.group_name}/coordinator/{call}/{number}/{backend}"
    store, every = PrefixStore("coordinators", world.get_group_store()), dist.get_process_group_ranks(world)
    told = [every[rank] for rank in ranks], ranks.index(comms.rank), backend, store, name, limit
    return registered_group(*told, comms.monitor, _check_of(ranks, comms))
