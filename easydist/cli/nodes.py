"""The ranks on all nodes of a Ray cluster, seen by an actor on each host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from easydist.cli.ranks import Rank, Ranks, grouped, stack_of
from easydist.cluster.connection import connect, disconnect, environment

_START, _SECONDS = 60.0, 5.0
"""The time for the first answer of a node, and for each further one; a node that takes longer is left out."""


class ClusterRanks:
    """The ranks of this user's processes on all nodes of a Ray cluster.

    Args:
        job: A part of the ranks' command line; None: all processes.

    Raises:
        ConnectionError: There is no cluster.
        ImportError: Ray is not installed.
    """

    def __init__(self, job: str | None = None) -> None:
        self._has_connected = connect("auto", 0)
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._job, env = ray, job, environment(None, None)
        actor = ray.remote(num_cpus=0)(_Observer)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
        began = [
            actor.options(scheduling_strategy=there[node], runtime_env=env).remote(at) for node, at in nodes.items()
        ]
        places = self._answers([one.place.remote() for one in began], _START)
        seen = {place: (at, one) for place, at, one in zip(places, nodes.values(), began, strict=True) if place}
        self._observers = dict(seen.values())  # nodes of one host see the same processes

    def look(self) -> list[list[Rank]]:
        """Return the ranks of each group, as ``Ranks.look`` does for one host."""
        told = self._answers([one.look.remote() for one in self._observers.values()], _SECONDS)
        found = [rank for ranks in told for rank in ranks or ()]
        return grouped([rank for rank in found if self._job is None or self._job in rank.command])

    def stack(self, rank: Rank) -> str:
        """Return the stacks of a rank's threads, or the reason why there are none."""
        stack: str = self._ray.get(self._observers[rank.host].stack.remote(rank.pid))
        return stack

    def _answers(self, asked: list[Any], seconds: float) -> list[Any]:
        """Return the answer of each node; None if it gives none in time."""
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=seconds)
        return [self._answer(one) if one in ready else None for one in asked]

    def _answer(self, ready: Any) -> Any:
        try:
            return self._ray.get(ready)
        except self._ray.exceptions.RayError:  # the node has ended
            return None

    def close(self) -> None:
        """End the actors."""
        for one in self._observers.values():
            self._ray.kill(one)
        if self._has_connected:
            disconnect()


class _Observer:
    """A process of a node that looks at the ranks of its host."""

    def __init__(self, address: str) -> None:
        self._address, self._ranks = address, Ranks()

    def place(self) -> str:
        """Return a text that only observers of the same processes share."""
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.stat('/proc/self/ns/pid').st_ino}"

    def look(self) -> list[Rank]:
        return [rank.at(self._address) for ranks in self._ranks.look() for rank in ranks]

    def stack(self, pid: int) -> str:
        return stack_of(pid)
