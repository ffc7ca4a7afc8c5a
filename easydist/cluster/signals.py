"""Signals to processes on the nodes of the cluster, for actors that are busy and so cannot be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from easydist.cluster.facts import Facts

_SECONDS = 2.0
"""Seconds within which the tasks should have run."""


def interrupt(processes: Iterable[Facts]) -> None:
    """Send SIGINT to processes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    by_node: dict[str, list[int]] = {}
    for one in processes:
        by_node.setdefault(one.node, []).append(one.pid)
    task = ray.remote(num_cpus=0, max_retries=0)(_sender())
    there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in by_node}
    sent = [task.options(scheduling_strategy=there[node]).remote(pids) for node, pids in by_node.items()]
    ray.wait(sent, num_returns=len(sent), timeout=_SECONDS)


def _sender() -> Callable[[Sequence[int]], None]:
    """Return a function that travels by its code, because a node may have no easydist outside of the ranks."""

    def send(pids: Sequence[int]) -> None:
        import contextlib
        import os
        import signal

        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    return send
