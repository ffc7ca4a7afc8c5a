"""The driver's connection to a Ray cluster, and the environment in which it starts ranks there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from easydist.base.wording import needs

_lock = threading.RLock()  # a signal handler may close ranks at any moment
_users: dict[str, int] = {}
"""The connections that ``connect`` has made, each with the number of its users."""

_PINS_FOR = "RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S"
"""Ray's variable for the seconds in which it keeps uploaded folders that no process uses yet."""

_CANNOT_SHIP = (
    "Ranks: this version of Ray ({}) cannot send easydist to the nodes. Install it there and pass ship=False, or call "
    'ray.init(runtime_env={{"py_modules": [easydist]}}) first'
)

_NO_CLIENT = "{} is an address for Ray's client, which needs grpcio: run pip install 'ray[client]'"
_NO_SERVER = (
    "no connection to {}: {}\nThe server of Ray's client is on the head node, which needs 'ray[client]', too; its "
    "port, 10001 or that of ray start --ray-client-server-port, has to be open for this machine."
)


def connect(address: str | None, cpus: float, *, shows_output: bool = True) -> str:
    """Connect to a cluster, or use the connection that is there; start a cluster on this machine if there is none.

    Args:
        address: As in ``ray.init``.
        cpus: The CPUs that a cluster on this machine must count, as ranks may share its cores.
        shows_output: False to keep Ray from printing the output of actors, and what its daemons report.

    Returns:
        The connection, for ``disconnect``.

    Raises:
        ConnectionError: There is no cluster at this address.
        ImportError: Ray is not installed, or its client is not, which the address needs.
    """
    demand_ray()
    import ray

    with _lock:
        if not ray.is_initialized():
            _begin(address, cpus, shows_output)
            _users[current()] = 0
        connection = current()
        if connection in _users:
            _users[connection] += 1
        return connection


def _begin(address: str | None, cpus: float, shows_output: bool) -> None:
    import ray

    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": shows_output}
    if (address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        with contextlib.suppress(ValueError):  # there is a cluster, which counts its CPUs itself
            ray.init(address, num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)), **options)
            return
    where = address or ""
    if where in ("", "auto"):  # for Ray, too, the variable counts more than "auto"
        where = os.environ.get("RAY_ADDRESS", where)
    with _client_errors(where) if where.startswith("ray://") else contextlib.nullcontext():
        ray.init(address, **options)


def current() -> str:
    """Return what tells this process's connection to a cluster from others; empty if there is none."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


@contextlib.contextmanager
def _client_errors(address: str) -> Iterator[None]:
    """Say what Ray's client needs if it cannot connect."""
    if find_spec("grpc") is None:
        raise ImportError(_NO_CLIENT.format(address))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out")  # the error says more
            yield
    except ConnectionError as error:
        raise ConnectionError(_NO_SERVER.format(address, str(error).strip())) from None


def demand_ray() -> None:
    """Make sure that Ray is installed.

    Raises:
        ImportError: It is not.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ImportError(needs("easydist.ray.Ranks", "ray", "ray")) from error


def disconnect(connection: str) -> None:
    """Give a connection back. The last user of one that ``connect`` has made ends it, and the cluster made for it.

    Args:
        connection: The result of ``connect``; one that the program has ended itself is forgotten.
    """
    import ray

    with _lock:
        if connection not in _users:
            return
        _users[connection] -= 1
        if not _users[connection]:
            del _users[connection]
            if connection == current():
                ray.shutdown()


def environment(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return a user's runtime environment, with local folders replaced by uploaded copies.

    Raises:
        TypeError: A value has a type that Ray does not take.
        ValueError: A path does not exist, a folder is too large, or two fields exclude each other.
    """
    from ray.runtime_env import RuntimeEnv

    env = dict(runtime_env or {})
    if {"py_modules", "working_dir"} & env.keys():
        env = _uploaded(env)
    RuntimeEnv(**env)  # raises
    return env


def with_package(env: dict[str, Any], ship: bool | None) -> dict[str, Any]:
    """Return a runtime environment that also brings this process's easydist.

    Args:
        env: The result of ``environment``.
        ship: False to return it as it is; None to do so if all nodes are this machine.
    """
    import ray

    if is_here() if ship is None else not ship:
        return env
    # Ray would leave out those of ray.init: a field of an actor's environment replaces that of the job's.
    modules = (env if "py_modules" in env else ray.get_runtime_context().runtime_env).get("py_modules", ())
    return _uploaded(env | {"py_modules": [*modules, str(Path(__file__).parents[1])]})


def is_here(nodes: int = 1, resources: Mapping[str, float] | None = None) -> bool:
    """True if all nodes are this machine.

    Args:
        nodes: The number of nodes that are needed; others have to join if there are fewer.
        resources: The resources that are needed, in use or free; others have to join if there is less.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    for name, amount in (resources or {}).items():
        if sum(node["Resources"].get(name, 0) for node in alive) < amount:
            return False
    return len(alive) >= nodes and {node["NodeManagerHostname"] for node in alive} <= {socket.gethostname()}


def _uploaded(env: dict[str, Any]) -> dict[str, Any]:
    """Upload local folders, which Ray itself does only in ``ray.init``."""
    import ray

    try:
        from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
        from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
    except ImportError as error:
        raise RuntimeError(_CANNOT_SHIP.format(ray.__version__)) from error
    with tempfile.TemporaryDirectory(prefix="easydist-") as folder, _nothing_pinned_by_client():
        for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
            try:
                env = upload(env, include_gitignore=True, scratch_dir=folder)
            except ray.exceptions.RuntimeEnvSetupError as error:
                raise ValueError(f"Ranks: runtime_env: {error.error_message}") from error
    return env


@contextlib.contextmanager
def _nothing_pinned_by_client() -> Iterator[None]:
    """Let Ray's client keep no reference to what it uploads: its server answers that request before ray.init only.

    The client would repeat the request forever.
    """
    import ray

    before = os.environ.get(_PINS_FOR)
    if ray.util.client.ray.is_connected():
        os.environ[_PINS_FOR] = "0"
    try:
        yield
    finally:
        os.environ.pop(_PINS_FOR, None)
        os.environ.update({} if before is None else {_PINS_FOR: before})
