"""The cluster of this process; it has one at most."""

from __future__ import annotations

from easydist.notebook.cluster import Cluster

_current: list[Cluster] = []


def running() -> Cluster | None:
    """The cluster that has been started last; None where there is none, or it has been stopped."""
    return _current[0] if _current and _current[0].is_running else None


def replace(size: int) -> Cluster:
    """Start a cluster in the place of the one that runs, if one does."""
    if (before := running()) is not None:
        print(f"the {before.size} ranks that ran before are stopped")
        before.stop()
    _current[:] = [cluster := Cluster(size)]
    return cluster
