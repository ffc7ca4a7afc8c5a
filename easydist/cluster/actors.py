"""The actors of ranks on a Ray cluster: their resources, their start, their answers, their interruption and end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from easydist.agreement.calling import seconds
from easydist.base.arguments import integer
from easydist.cluster import failures
from easydist.cluster.connection import connect, current, demand_ray, disconnect, environment, with_package
from easydist.cluster.facts import Facts
from easydist.cluster.placement import STRATEGIES, Placement
from easydist.cluster.worker import RankActor
from easydist.errors import PeerLostError
from easydist.typing import Timeout

_LOOKS_EVERY = 1.0
"""Seconds after which somebody may look what keeps the answers."""

_INTERRUPTS_WITHIN = 2.0
"""Seconds within which the tasks that send Ctrl-C should have run."""


CLOSED = "these ranks are closed; make others: easydist.ray.Ranks(...)"


class Actors:
    """One actor for each rank, in a placement group. ``start`` creates them, and asks the cluster for nothing before.

    Args:
        size: The number of ranks.
        resources: The resources of each; None is one CPU.
        strategy: The placement group's.
        nodes: The number of nodes, with the same number of ranks on each; None leaves it to ``strategy``.
        runtime_env: Ray's runtime environment; local folders are uploaded.
        address: The cluster, as in ``ray.init``.
        ship: True to send the driver's easydist along; None to do so unless all nodes are this machine.
        timeout: How long to wait for resources, and for a start.

    Attributes:
        facts: The processes of those that have started, by rank, also after their end.
        resources: The resources of each.
        limit: ``timeout`` in seconds.

    Raises:
        ValueError: ``size``, ``resources``, ``strategy`` or ``nodes`` cannot be met by any cluster.
        ImportError: Ray is not installed.
    """

    def __init__(
        self,
        size: int,
        *,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        nodes: int | None = None,
        runtime_env: dict[str, Any] | None = None,
        address: str | None = None,
        ship: bool | None = None,
        timeout: Timeout = 300.0,
    ) -> None:
        self.resources: dict[str, float] = {"CPU": 1} if resources is None else dict(resources)
        _demand_possible(size, self.resources, strategy, nodes)
        demand_ray()
        self._size, self._strategy, self._nodes = size, strategy, nodes
        self._asked_environment, self._address, self._ship = runtime_env, address, ship
        self.limit = seconds(timeout, "Ranks")
        self._by_rank = dict[int, Any]()
        self.facts = dict[int, Facts]()
        self._placement: Placement | None = None
        self._connection = ""

    @property
    def is_open(self) -> bool:
        """True until they are closed, or this program leaves the cluster, which ends them."""
        return self._placement is not None and self._connection == current()

    def __getitem__(self, rank: int) -> Any:
        return self._by_rank[rank]

    def items(self) -> Collection[tuple[int, Any]]:
        """Return ranks with their actors."""
        return [*self._by_rank.items()]  # another thread may close them

    def start(self, ranks: Collection[int]) -> float:
        """Start the actors of ranks, in place of those that they have; without all of them there is none.

        Args:
            ranks: The ranks.

        Returns:
            The time until which the ranks may take to meet, on the clock of ``time.monotonic``.

        Raises:
            TypeError: Ray does not take the runtime environment.
            ValueError: The same.
            PeerLostError: One has ended.
            RuntimeError: A node has other versions of Python or torch, or cannot set up the runtime environment.
            CollectiveTimeout: The resources were not free in time, or one has not been started in time.
        """
        if self._placement is None:
            self._connection = connect(self._address, self._size * self.resources.get("CPU", 0))
        deadline = time.monotonic() + self.limit
        if len(ranks) == self._size:  # what was sent before is gone ten minutes later if no rank is left that uses it
            env = environment(self._asked_environment)  # a wrong one is refused before the wait for resources
            if self._placement is None:
                self._placement = Placement(self._size, self.resources, self._strategy, self.limit, self._nodes)
            self._environment = with_package(env, self._ship)  # nodes may have joined meanwhile
        for rank in ranks:
            self.end(rank)
        try:
            self.facts |= self._started(ranks, deadline)
        except BaseException:
            for rank in ranks:
                self.end(rank)
            raise
        return deadline

    def _started(self, ranks: Collection[int], deadline: float) -> dict[int, Facts]:
        import ray

        found: dict[int, Facts] = {}
        asked = {self._begin(rank): rank for rank in ranks}
        for rank, answer in self.answers(asked, lambda: self.give_up(asked.values()), deadline):
            if not isinstance(answer, Exception):
                found[rank] = answer
            elif failures.is_of_node(answer):  # which Ray did not know to be dead when it placed the actor
                asked[self._begin(rank)] = rank
            elif isinstance(answer, ray.exceptions.RuntimeEnvSetupError):
                raise RuntimeError(f"Ranks: a node cannot set up runtime_env for rank {rank}: {answer.error_message}")
            else:
                raise PeerLostError(f"Ranks: rank {rank} did not start: {answer}")
        if (error := failures.unequal_versions(found.values())) is not None:
            raise error
        return found

    def _begin(self, rank: int) -> Any:
        """Start the actor of a rank, and return the reference of its process."""
        import ray

        assert self._placement is not None
        options = {"runtime_env": self._environment, "max_restarts": 0, **self._placement.options(rank)}
        self._by_rank[rank] = ray.remote(RankActor).options(**options).remote(rank)
        return self._by_rank[rank].facts.remote()

    def beside(self, rank: int, kind: type[Any], concurrency: int) -> Any:
        """Start another actor on the node of a rank, which takes no resources, and is not ended with these.

        Args:
            rank: The rank; the actor is created with it.
            kind: The class of the actor.
            concurrency: The calls that it serves at a time.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.facts[rank].node, soft=False)
        options = {"num_cpus": 0, "runtime_env": self._environment, "scheduling_strategy": there}
        return ray.remote(kind).options(max_concurrency=concurrency, **options).remote(rank)

    def answers(
        self, asked: dict[Any, int], late: Callable[[], object], deadline: float = 0.0
    ) -> Iterator[tuple[int, Any]]:
        """Yield ranks with their answers, or with Ray's errors, as they come; remove them from those that are asked.

        Args:
            asked: The ranks, by the references of the answers.
            late: Called if no answer has come before the deadline, and then every second.
            deadline: The time, on the clock of ``time.monotonic``.

        Raises:
            RuntimeError: Another thread has closed these actors.
        """
        import ray

        while asked:
            done = self._done(asked, 1, max(_LOOKS_EVERY, deadline - time.monotonic()))
            if not done:
                late()
                continue
            if len(asked) > 1:  # all that have come, in one look
                done = self._done(asked, len(asked), 0)
            for ref in done:
                rank, answer = asked.pop(ref), None
                try:
                    answer = ray.get(ref)
                except ray.exceptions.RayError as error:
                    answer = error
                yield rank, answer

    def _done(self, asked: Collection[Any], count: int, timeout: float) -> list[Any]:
        """Wait until so many answers have come, and return them.

        Raises:
            RuntimeError: Another thread has closed these actors.
        """
        import ray

        if self._placement is not None:  # otherwise Ray might begin a connection of its own
            done: list[Any] = ray.wait([*asked], num_returns=count, timeout=timeout)[0]
        if self._placement is None:
            raise RuntimeError(CLOSED)
        return done

    def give_up(self, ranks: Collection[int]) -> None:
        """Raise the error for ranks that have not started in time."""
        assert self._placement is not None
        raise self._placement.late(ranks, self.limit)

    def interrupt(self, ranks: Collection[int]) -> None:
        """Send SIGINT to the processes of ranks, by a task on each node: a busy actor cannot be called."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.facts[rank].node, []).append(self.facts[rank].pid)
        task = ray.remote(num_cpus=0, max_retries=0)(_interrupter())
        there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in by_node}
        sent = [task.options(scheduling_strategy=there[node]).remote(pids) for node, pids in by_node.items()]
        ray.wait(sent, num_returns=len(sent), timeout=_INTERRUPTS_WITHIN)

    def end(self, rank: int) -> None:
        """End the actor of a rank, if it has one."""
        import ray

        if (actor := self._by_rank.pop(rank, None)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def close(self) -> None:
        """End all, give their resources back, and leave the cluster; one that was started for them ends."""
        placement, self._placement = self._placement, None
        connection, self._connection = self._connection, ""
        if connection == current():
            for rank in [*self._by_rank]:
                self.end(rank)
            if placement is not None:
                placement.remove()
        disconnect(connection)


class Loan(NamedTuple):
    """The actors of ranks, while somebody else calls functions in them.

    Attributes:
        actors: The actors.
        replace: Start those of some ranks again.
        give_back: End the loan; the calls that have not returned are passed with their ranks.
    """

    actors: Actors
    replace: Callable[[Sequence[int]], object]
    give_back: Callable[[dict[Any, int]], None]


def _demand_possible(size: int, resources: Mapping[str, float], strategy: str, nodes: int | None) -> None:
    if size < 1:
        raise ValueError(f"Ranks: size={size} is less than 1")
    if strategy not in STRATEGIES:
        raise ValueError(f"Ranks: strategy={strategy!r} is none of {', '.join(STRATEGIES)}")
    if nodes is not None and (integer("nodes", nodes, "a number of nodes") < 1 or size % nodes):
        raise ValueError(f"Ranks: {size} ranks cannot be {size / max(nodes, 1):g} on each of nodes={nodes}")
    amounts: Collection[Any] = resources.values()
    if not any(amounts) or not all(isinstance(one, Real) and float(one) >= 0 for one in amounts):  # NaN is not
        raise ValueError(f"Ranks: resources={resources} name no amount of anything; one CPU is {{'CPU': 1}}")


def _interrupter() -> Callable[[Sequence[int]], None]:
    """Return a function that travels by its code, because a node may have no easydist outside of the ranks."""

    def send(pids: Sequence[int]) -> None:
        import contextlib
        import os
        import signal

        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    return send
