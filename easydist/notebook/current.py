"""The cluster of this process, which has at most one."""

from __future__ import annotations

from easydist.notebook.cluster import Cluster

_current: list[Cluster] = []


def running() -> Cluster | None:
    """Return the cluster started last; None if there is none, or it was stopped."""
    return _current[0] if _current and _current[0].is_running else None


def replace(size: int) -> Cluster:
    """Start a cluster, after stopping the running one, if any."""
    if (before := running()) is not None:
        print(f"the {before.size} ranks that ran before are stopped")
        before.stop()
    _current[:] = [cluster := Cluster(size)]
    return cluster
