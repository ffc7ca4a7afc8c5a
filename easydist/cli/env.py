"""``easydist env``: the environment for a bug report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
from typing import Any

import click

from easydist import settings
from easydist.base.version import VERSION
from easydist.cli.loading import loading

_PACKAGES = ("torch", "accelerate", "transformers", "safetensors", "numpy", "psutil", "mpi4py", "ray")
_LIBRARIES = ("ACCELERATE_", "CUDA_", "EASYDIST_", "GLOO_", "NCCL_", "OMP_", "SLURM_", "TORCH_", "TORCHELASTIC_")
_PREFIXES = (*_LIBRARIES, "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "MV2_COMM_WORLD_")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", *_MEETING)
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "JWT", "CREDENTIAL")


@click.command(epilog="\b\nExample:\n  easydist env\n  easydist env --json > env.json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> None:
    """Print versions, devices, limits and variables for a bug report."""
    found = environment()
    click.echo(json.dumps(found, indent=2) if as_json else _text(found))


def environment() -> dict[str, dict[str, Any]]:
    """Return the facts for a bug report, by section.

    The settings are all variables of easydist; the variables are those of launchers and communication libraries,
    without secrets.

    Example:
        >>> sorted(environment())
        ['devices', 'limits', 'network', 'settings', 'system', 'variables', 'versions']
    """
    return {
        "system": _system(),
        "versions": _versions(),
        "devices": _devices(),
        "limits": limits(),
        "network": interfaces(),
        "settings": settings.table(os.environ),
        "variables": variables(os.environ),
    }


def _system() -> dict[str, Any]:
    import psutil

    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
    }


def _versions() -> dict[str, str]:
    found = {"easydist": VERSION}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _devices() -> dict[str, Any]:
    with loading():
        import torch
        import torch.distributed as dist

    found: dict[str, Any] = {"backends": _backends(dist) if dist.is_available() else "none"}
    if torch.cuda.is_available():
        found |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        found["CUDA"] = torch.version.cuda or f"HIP {torch.version.hip}"
    else:
        found["accelerator"] = "none"
    return found


def _backends(dist: Any) -> str:
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return ", ".join(name for name, is_there in known.items() if is_there())


def limits() -> dict[str, str]:
    """Return the resources of this process: open files, processes, and room in ``/dev/shm``."""
    found = {"open files": _limit(resource.RLIMIT_NOFILE), "processes": _limit(resource.RLIMIT_NPROC)}
    with contextlib.suppress(OSError):
        room = shutil.disk_usage("/dev/shm")
        found["/dev/shm"] = f"{room.free / 2**20:.0f} MiB free of {room.total / 2**20:.0f} MiB"
    return found


def _limit(which: int) -> str:
    limit = resource.getrlimit(which)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def interfaces() -> dict[str, str]:
    """Return the addresses of each active network interface, and the host's name with the address it resolves to."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: ", ".join(address.address for address in addresses if address.family in families)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
    return found | {"host name": f"{socket.gethostname()} ({_resolved()})"}


def _resolved() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"does not resolve: {error}"


def variables(env: Any) -> dict[str, str]:
    """Return the variables of launchers and communication libraries, with secrets hidden.

    Args:
        env: The environment.

    Example:
        >>> variables({"RANK": "0", "HOME": "/home/ann", "TORCHELASTIC_TOKEN": "4711"})
        {'RANK': '0', 'TORCHELASTIC_TOKEN': '(hidden)'}
    """
    return {
        name: "(hidden)" if any(secret in name for secret in _SECRETS) else env[name]
        for name in sorted(env)
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def _text(found: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, rows in found.items():
        lines += [section, *(f"  {name:<26} {value}" for name, value in rows.items())]
    return "\n".join(lines)
