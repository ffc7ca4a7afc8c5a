"""The world as the launcher describes it in environment variables, and the kinds of worlds."""

from __future__ import annotations

import enum
import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from easydist.settings import NO, YES


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that were launched together.

    Attributes:
        launcher: ``"torchrun"`` (also accelerate launch), ``"mpi"``, ``"slurm"``, ``"none"``.
        rank: The rank of this process, from 0.
        size: The number of processes.
        local_rank: The rank of this process among those on its host.
        local_size: The number of processes on this host; that of all processes if the launcher does not tell.
        address: The host name of rank 0, where the ranks meet.
        port: The port at which the ranks meet.
        tells_local_size: True if the launcher tells ``local_size``.
        node_rank: The number of this host, from 0; None if the launcher does not tell.
        num_nodes: The number of hosts; None if the launcher does not tell.
    """

    launcher: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    tells_local_size: bool = True
    node_rank: int | None = 0
    num_nodes: int | None = 1


class DistributedType(str, enum.Enum):
    """The kinds of worlds; the values are accelerate's, and compare equal to them."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    # Never the kind of a ProcessState; they exist for scripts that compare with them.
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


_MPI = (
    # Open MPI; Intel MPI and MPICH (hydra); MVAPICH
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_NODES = {"torchrun": ("GROUP_RANK", "GROUP_WORLD_SIZE"), "slurm": ("SLURM_NODEID", "SLURM_STEP_NUM_NODES")}
_MPI_JOB = ("PMIX_NAMESPACE", "I_MPI_HYDRA_UUID")
_ACCELERATE_ALONE = (
    "accelerate launch started one process although it was asked for several: on the CPU it starts more only through "
    "mpirun (a MULTI_CPU configuration with mpirun_config). This process works alone; to have N, launch with "
    "torchrun --nproc-per-node N"
)


_HALF = (
    "{}={} is set, but {} is not, so this process works alone. Start the script with a launcher (torchrun, easydist "
    "run), or set both, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
)
_EXPORTED = (
    "RANK={} is not the number of this task of srun, {} of {}, which easydist takes. A RANK that is exported before "
    "srun is the same in all tasks: do not export RANK, LOCAL_RANK and WORLD_SIZE; under srun nothing needs them"
)
_ARBITRARY = (
    "srun has placed the tasks in an order of your own (--distribution=arbitrary), so rank 0 need not be on the first "
    "host: export MASTER_ADDR with the name of its host"
)


def has_agent(env: Mapping[str, str] = os.environ) -> bool:
    """True if the launcher serves the store in which the ranks meet, as torchrun's agent does; else rank 0 does."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_key(env: Mapping[str, str] = os.environ) -> str:
    """Return what tells the ranks that a launcher starts from those that it has started before.

    After a failure torchrun restarts them, and serves the same store; it also does so when the world has grown. A store
    that rank 0 serves is new each time. The count does not matter there, and may differ between nodes: an agent counts
    only the failures of its own ranks.
    """
    count = env.get("TORCHELASTIC_RESTART_COUNT", 0) if has_agent(env) else 0
    return f"{count}/{env.get('WORLD_SIZE', '')}"


def launched(env: Mapping[str, str] = os.environ, has_group: bool = False) -> World:
    """Return the world that the launcher describes; a world of one process if there is no launcher.

    Torchrun's variables (``RANK`` and ``WORLD_SIZE``, which accelerate launch sets as well) take precedence over those
    of Open MPI, Intel MPI, MPICH and MVAPICH, and these over SLURM's, which count only inside a job step
    (``SLURM_STEP_ID``).

    Args:
        env: The environment.
        has_group: True if there is already a process group. Then there is no warning that this process works alone,
            and no place to meet is needed.

    Example:
        >>> launched({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "1234"}).size
        4
        >>> launched({}).launcher
        'none'

    Raises:
        ValueError: A variable is not a number, the rank is outside the world, or nothing tells where rank 0 is.
    """
    is_described, in_step = _has(env, "RANK", "WORLD_SIZE"), _has(env, "SLURM_STEP_ID", *_SLURM[:2])
    address = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1")
    port = _port(env, ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if is_described and not _is_of_another_task(env):
        is_step = in_step and env["WORLD_SIZE"] == env["SLURM_STEP_NUM_TASKS"]
        place = (address, port) if is_step else ("127.0.0.1", 29500)
        return _world(env, "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), *place)
    for names in _MPI:
        if _has(env, *names[: 3 if in_step else 2]):  # srun also sets PMI_RANK, but no rank on the host
            known = "127.0.0.1" if has_group else None  # the ranks of a group have met already
            return _world(env, "mpi", names, known, _port(env, _MPI_JOB))
    if in_step:
        if is_described and not has_group:
            about = env["RANK"], env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
            warnings.warn(_EXPORTED.format(*about), RuntimeWarning, stacklevel=2)
        if not (has_group or env.get("MASTER_ADDR")) and _is_in_own_order(env):
            raise ValueError(_ARBITRARY)
        return _world(env, "slurm", _SLURM, address, port)
    if not has_group and (text := _why_alone(env)):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return World()


def _why_alone(env: Mapping[str, str]) -> str:
    """Return what is missing, if these variables look as if there should be several processes."""
    # accelerate launch sets these variables only if it was asked for more than one process.
    if _has(env, "ACCELERATE_USE_CPU", "MASTER_ADDR", "MASTER_PORT"):
        return _ACCELERATE_ALONE
    for name, other, of_one in (("WORLD_SIZE", "RANK", "1"), ("RANK", "WORLD_SIZE", "0")):
        if (env.get(name) or of_one) != of_one and not env.get(other):
            return _HALF.format(name, env[name], other)
    return ""


def flag(name: str, env: Mapping[str, str] = os.environ) -> bool:
    """True if the variable is a yes; False if it is a no, or not set.

    Args:
        name: The variable.
        env: The environment.

    Raises:
        ValueError: It is neither yes nor no; an empty text is neither.

    Example:
        >>> flag("DEBUG", {"DEBUG": "Yes"}), flag("DEBUG", {"DEBUG": "off"}), flag("DEBUG", {})
        (True, False, False)

    Source: accelerate's ``parse_flag_from_env``; distutils' ``strtobool``.
    """
    value = env.get(name, "no").lower()
    if value not in (*YES, *NO):
        raise ValueError(f"invalid truth value {value} of {name}: use one of {', '.join((*YES, *NO))}")
    return value in YES


def _has(env: Mapping[str, str], *names: str) -> bool:
    return all(env.get(name) for name in names)


def _world(
    env: Mapping[str, str], launcher: str, names: tuple[str, str, str, str], address: str | None, port: int
) -> World:
    rank, size = _int(env, names[0]), _int(env, names[1])
    if not 0 <= rank < size:
        raise ValueError(f"{names[0]}={rank} is outside the world of {names[1]}={size}")
    local_rank = _int(env, names[2], rank)
    tells = bool(env.get(names[3]))
    local_size = _tasks_here(env, names[3]) if launcher == "slurm" and tells else _int(env, names[3], size)
    address = env.get("MASTER_ADDR") or address or _only_host(env, launcher, size, local_size)
    port = _int(env, "MASTER_PORT", 0) or port or _port_without_a_job(size == local_size)
    node = _node(env, _NODES.get(launcher, ()), alone=size == 1 or (tells and local_size == size))
    return World(launcher, rank, size, local_rank, local_size, address, port, tells or size == 1, *node)


def _is_of_another_task(env: Mapping[str, str]) -> bool:
    """True if this task of a step has got the rank that was exported before all of them began."""
    if not _has(env, "SLURM_STEP_ID", *_SLURM[:2]) or env["WORLD_SIZE"] == "1" or env["RANK"] == env["SLURM_PROCID"]:
        return False
    try:
        began = Path("/proc/self/environ").read_bytes().split(b"\0")
        is_task = Path(f"/proc/{os.getppid()}/comm").read_text().strip() == "slurmstepd"
    except OSError:
        return False
    return is_task and f"RANK={env['RANK']}".encode() in began


def _is_in_own_order(env: Mapping[str, str]) -> bool:
    """True if the first host of a step need not have its first task."""
    return env.get("SLURM_DISTRIBUTION") == "arbitrary" and env.get("SLURM_STEP_NUM_NODES", "1") != "1"


def _node(env: Mapping[str, str], names: tuple[str, ...], alone: bool) -> tuple[int | None, int | None]:
    """Return the number of this host and the number of hosts; None if nothing tells them."""
    if not names or not _has(env, *names):
        return (0, 1) if alone else (None, None)
    rank, count = (_int(env, name) for name in names)
    if rank >= count:
        raise ValueError(f"{names[0]}={rank} is outside of the hosts of {names[1]}={count}")
    return rank, count


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\s*\d+\s*", text or ""):
        raise ValueError(f"{name}={text!r} is not a number")
    return int(text or "")


def _tasks_here(env: Mapping[str, str], name: str) -> int:
    """Return the number of tasks on this host, from SLURM's ``4(x2),3``: 4 on two hosts, 3 on the third."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", env[name])
    counts = [int(count) for count, times in runs for _ in range(int(times or 1))]
    node = _int(env, "SLURM_NODEID", 0)
    if node >= len(counts):
        raise ValueError(f"{name}={env[name]!r} does not say how many tasks are on host {node}")
    return counts[node]


def _only_host(env: Mapping[str, str], launcher: str, size: int, local_size: int) -> str:
    """Return the host of rank 0 for ranks of MPI: this one, or the first of a SLURM job."""
    if size != local_size:
        if nodes := env.get("SLURM_JOB_NODELIST"):
            return first_host(nodes)
        raise ValueError(
            f"{size} ranks were launched by {launcher} on several hosts, but MASTER_ADDR is not set: export it with "
            "the host name of rank 0 (mpirun -x MASTER_ADDR=… with Open MPI, -genv MASTER_ADDR … with Intel MPI, MPICH)"
        )
    return "127.0.0.1"


def _port(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Return a port derived from the job's name, so that two jobs on a host do not meet; 0 without a name."""
    job = "/".join(env[name] for name in names if env.get(name))
    return 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "little") % 12000 if job else 0


def _port_without_a_job(on_one_host: bool) -> int:
    """Return a port for MPICH, which names no job: one derived from the parent's pid, which ranks of one host share."""
    return 20000 + os.getppid() % 12000 if on_one_host else 29500


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list.

    Example:
        >>> first_host("gpu[003-007,012],login1")
        'gpu003'
        >>> first_host("a1,b2")
        'a1'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)  # up to a comma outside brackets
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodelist)
