"""The actor of one rank. It loads torch only after the driver has compared the versions."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from easydist.cluster.facts import Facts, versions

_SECONDS = 1800.0
"""The limit of torch's own waits in the store; torch's default."""


class Actor:
    """An actor of a rank, which tells its process, and serves the store of a world.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stores: list[Any] = []

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray begins each line of its output with it

    def facts(self) -> Facts:
        """Return the facts about this process."""
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        gpus = ", ".join(map(str, ray.get_gpu_ids()))
        return Facts(os.getpid(), socket.gethostname(), node, address, versions(), gpus)

    def serve(self) -> int:
        """Serve the store of the next world, and return its port."""
        import ray

        from easydist.liveness.timed_store import served

        store = served(ray.util.get_node_ip_address(), 0, _SECONDS)
        self._stores = [*self._stores[-1:], store]  # the ranks are still in the world of the last one
        port: int = store.port
        return port


class RankActor(Actor):
    """The actor in which a rank runs. It serves one call at a time, in its main thread.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray starts its processes with it blocked

    def enter(self, variables: dict[str, str]) -> None:
        """Enter the world that these variables describe, and leave the one before; they may hold the job's key."""
        import ray

        from easydist.cluster.world import enter

        enter(variables, ray.util.get_node_ip_address())

    def call(self, message: bytes) -> Any:
        """Call a function; return an ``Outcome``."""
        from easydist.cluster.world import outcome

        return outcome(message)

    def part_if_awaited(self) -> None:
        """Do as ``world.part_if_awaited``."""
        from easydist.cluster.world import part_if_awaited

        part_if_awaited()
