"""The ranks on all nodes of a Ray cluster, seen by an actor on each host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from easydist.cli.ranks import LocalRanks, Rank, grouped, stack_of
from easydist.cluster import ranks as cluster
from easydist.cluster.connection import connect, disconnect, with_package
from easydist.liveness.peer import pid_namespace

_START, _SECONDS, _STACK = 60.0, 5.0, 20.0
"""The time for the first answer of a node, for each further one, and for a stack."""


def called(fn: Callable[[float], Any], ranks: int | None, timeout: float) -> list[Any]:
    """Call a function on ranks of a Ray cluster, as many on each node, and return the results.

    Args:
        fn: The function, which gets the time limit.
        ranks: The number of ranks; None for one on each node with a CPU.
        timeout: The seconds within which the ranks have to start.

    Raises:
        ConnectionError: There is no cluster.
        ImportError: Ray is not installed.
        EasydistError: The ranks did not start, or the function raised.
    """
    connection = connect("auto", 0, shows_output=False)
    try:
        import ray

        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes()) or 1
        size = ranks or nodes
        with cluster.Ranks(size, nodes=None if size % nodes else nodes, timeout=timeout) as started:
            return started.run(fn, timeout)
    finally:
        disconnect(connection)


class ClusterRanks:
    """The ranks of this user's processes on all nodes of a Ray cluster.

    Raises:
        ConnectionError: There is no cluster.
        ImportError: Ray is not installed.

    Attributes:
        silent: The nodes that did not answer, each with the reason.
    """

    def __init__(self) -> None:
        self.silent: list[str] = []
        self._connection = connect("auto", 0, shows_output=False)
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, env = ray, with_package({}, None)
        actor = ray.remote(num_cpus=0)(_Observer)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
        began = [
            (at, actor.options(scheduling_strategy=there[node], runtime_env=env).remote()) for node, at in nodes.items()
        ]
        places = self._answers([(at, one.place.remote()) for at, one in began], _START)
        seen = {place: one for place, one in zip(places, began, strict=True) if place}
        self._observers = dict(seen.values())  # nodes of one host see the same processes
        self._lost = self.silent

    def look(self) -> list[list[Rank]]:
        """Return the ranks of each group, as ``LocalRanks.look`` does for one host.

        Raises:
            ConnectionError: Ray's client has lost the connection to the cluster.
        """
        self.silent = [*self._lost]
        told = self._answers([(at, one.look.remote()) for at, one in self._observers.items()], _SECONDS)
        pairs = zip(self._observers, told, strict=True)
        return grouped([rank.at(host) for host, ranks in pairs for rank in ranks or ()])

    def stack(self, rank: Rank) -> str:
        """Return the stacks of a rank's threads, or the reason why there are none."""
        asked = [(rank.host, self._observers[rank.host].stack.remote(rank.pid))]
        stack: str = self._answers(asked, _STACK)[0] or "no stack: the node does not answer"
        return stack

    def _answers(self, asked: list[tuple[str, Any]], seconds: float) -> list[Any]:
        """Return the answer of each node; None if it gives none in time, with a note of the reason."""
        if not asked:
            return []
        ready, _ = self._ray.wait([one for _, one in asked], num_returns=len(asked), timeout=seconds)
        return [self._answer(at, one, one in ready, seconds) for at, one in asked]

    def _answer(self, at: str, asked: Any, is_ready: bool, seconds: float) -> Any:
        if not is_ready:
            self.silent.append(f"{at} did not answer within {seconds:.0f} s")
            return None
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            self.silent.append(f"{at} cannot look: {str(error).partition(chr(10))[0]}")
            return None

    def close(self) -> None:
        """End the actors, which end by themselves if the connection to the cluster is lost."""
        if not self._ray.is_initialized():
            return
        for one in self._observers.values():
            with contextlib.suppress(ConnectionError):
                self._ray.kill(one)
        disconnect(self._connection)


class _Observer:
    """A process of a node that looks at the ranks of its host."""

    def __init__(self) -> None:
        self._ranks = LocalRanks()

    def place(self) -> str:
        """Return a text that only observers of the same processes share."""
        return pid_namespace()

    def look(self) -> list[Rank]:
        return [rank for ranks in self._ranks.look() for rank in ranks]

    def stack(self, pid: int) -> str:
        return stack_of(pid)
