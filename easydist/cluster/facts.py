"""The facts about a rank's process, which it tells the driver before it loads torch."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import NamedTuple


class Facts(NamedTuple):
    """A rank's process.

    Attributes:
        pid: Its process id.
        host: The name of its host.
        node: The identifier of its node of the cluster.
        address: The address of that node.
        versions: The versions that have to be equal on all nodes, by name.
        gpus: The GPUs that it was given there, as text.
    """

    pid: int
    host: str
    node: str
    address: str
    versions: dict[str, str]
    gpus: str = ""


def versions() -> dict[str, str]:
    """Return the versions of this process that the ranks and the driver must share."""
    try:
        torch = metadata.version("torch").partition("+")[0]  # nodes with and without GPUs have different builds
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch}


def interface(address: str) -> str | None:
    """Return the network interface with this address: gloo would look up the host's name, which may be another one."""
    import psutil

    alike = "127.0.0.1" if address.startswith("127.") else address
    names = [name for name, found in psutil.net_if_addrs().items() if alike in [one.address for one in found]]
    return names[0] if names else None


def session_folder() -> str | None:
    """Return the folder of Ray's session on this node, for what a killed process leaves; None if Ray does not tell."""
    import ray

    node = getattr(ray._private.worker.global_worker, "node", None)
    return None if node is None else str(node.get_session_dir_path())
