"""Checks of this host that need no other ranks, with advice."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from typing import Any, Literal

from easydist import settings
from easydist.base.wording import some

_FILES = 256
"""The open files that a rank needs with a hundred others: a connection to each, its libraries and data."""

_SHARED_NBYTES = 64 << 20
"""The room needed for the slots of eight ranks and a message queue."""

_MEMORY_NBYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: Its name.
        state: ``"ok"``; ``"warning"``: it works, but not as well as it could; or ``"fault"``.
        said: The result.
        advice: A remedy; empty if all is well.
    """

    check: str
    state: Literal["ok", "warning", "fault"]
    said: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as values for JSON."""
        return dataclasses.asdict(self)


def surroundings(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check versions, devices, memory, limits, network and variables of this host.

    Args:
        env: The environment.

    Example:
        >>> {finding.check for finding in surroundings({"GLOO_SOCKET_IFNAME": "eth9"}) if finding.state == "fault"}
        {'network'}
    """
    return [_versions(), _devices(), _memory(), _shared_memory(), _files(), _network(env), _settings(env)]


def _settings(env: Mapping[str, str]) -> Finding:
    if malformed := settings.fault(env):
        return Finding("settings", "fault", settings.text_of(malformed), "Correct it on all ranks.")
    if names := settings.unknown(env):
        return Finding("settings", "warning", f"unknown: {', '.join(names)}", "easydist env lists all variables.")
    changed = [name for name in settings.SETTINGS if name in env]
    return Finding("settings", "ok", f"{', '.join(changed) or 'none'} set")


def _versions() -> Finding:
    import torch
    import torch.distributed as dist

    said = f"torch {torch.__version__}"
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("versions", "fault", f"{said} without torch.distributed and gloo", "Install torch from PyPI.")
    return Finding("versions", "ok", f"{said}, gloo{', nccl' if dist.is_nccl_available() else ''}")


def _devices() -> Finding:
    import torch

    count = torch.cuda.device_count()
    gpus = f", {some(count, 'GPU', 'GPUs')}" if count else ""
    return Finding("devices", "ok", f"{os.cpu_count()} cores{gpus}")


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    said = f"{free / 2**30:.1f} GiB free"
    if free < _MEMORY_NBYTES:
        return Finding("memory", "warning", said, "Each rank takes about 250 MB before it has data. Start fewer ranks.")
    return Finding("memory", "ok", said)


def _shared_memory() -> Finding:
    advice = (
        "Ranks of one host exchange data there; without it they use gloo, which is slower. Give it 1 GiB: "
        "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm."
    )
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", "warning", str(error), advice)
    said = f"{free / 2**20:.1f} MiB free"
    return Finding("/dev/shm", "ok", said) if free >= _SHARED_NBYTES else Finding("/dev/shm", "warning", said, advice)


def _files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < _FILES:
        advice = (
            "A rank opens a connection to each other rank, and its own files. Raise the limit in the shell that starts "
            "it: ulimit -n 4096."
        )
        return Finding("open files", "fault", f"a process may open {limit}", advice)
    return Finding("open files", "ok", f"a process may open {limit}")


def _network(env: Mapping[str, str]) -> Finding:
    import psutil

    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    asked = [name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if missing := [name for name in asked if name not in up]:
        said = f"GLOO_SOCKET_IFNAME={','.join(asked)}, but {', '.join(missing)} does not exist or is down"
        return Finding("network", "fault", said, f"Name one of {', '.join(up)}, or unset it.")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        said = f"the host name {socket.gethostname()} does not resolve ({error})"
        return Finding("network", "warning", said, "Add it to /etc/hosts, or set GLOO_SOCKET_IFNAME.")
    return Finding("network", "ok", f"{', '.join(up)}; {socket.gethostname()} is {address}")
