"""Real Ray actors: a cluster of this test process alone, actors without methods, and calls on all of them."""

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from launching import free_port, within

import easydist

HEAD, SECOND, MORTAL = "127.0.0.2", "127.0.0.3", "127.0.0.4"
"""The addresses of the nodes on this machine's loopback. Ray replaces 127.0.0.1 by another address."""

MARKS = [
    pytest.mark.slow,
    # Ray's own warnings about processes and sockets that it leaves to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextlib.contextmanager
def private_cluster():
    """Start a private cluster, with files in its own folder and free ports. Yield Ray's ``Cluster``.

    Its ``client`` is the address for drivers outside of it, if grpcio is installed.
    """
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray")  # short, because the paths of sockets must be
    node = {"temp_dir": folder, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(easydist.__file__)))
        patch.setenv("RAY_worker_niceness", "0")  # otherwise other processes have priority over the tests
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(ray._private.utils, "write_ray_address", lambda *_: None)  # do not announce it
        patch.setattr(ray._private.node, "time", PatientClock())
        cluster = Cluster()
        cluster.node = node
        try:
            quick = {
                "health_check_period_ms": 1000,
                "health_check_failure_threshold": 2,
            }  # so that a killed node is found dead within some seconds
            own = {"num_cpus": 4, "resources": {"first": 100, "rank": 4}, "_system_config": quick}
            if importlib.util.find_spec("grpc") is not None:
                patch.setenv("RAY_AUTH_MODE", "disabled")  # its clients look for a token elsewhere
                own["ray_client_server_port"] = port = free_port()
                cluster.client = f"ray://{HEAD}:{port}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # Ray forgets the log files of its clients' server
                cluster.add_node(node_ip_address=HEAD, **own, **node)
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False, _node_ip_address=HEAD)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def logs(cluster):
    """Return all that Ray and its processes have written to their logs."""
    files = Path(cluster.node["temp_dir"]).glob("session_*/logs/**/*")
    return "".join(file.read_text(errors="replace") for file in files if file.is_file())


class PatientClock:
    """A replacement for the module ``time`` where Ray gives a node 30 seconds to start, whatever the load."""

    def __init__(self):
        self._patience = within(1)

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self):
        return time.monotonic() / self._patience


class Member:
    """An actor without methods of its own: groups and calls need none."""


def members(count, node="first"):
    """Create actors on a node. They start in the background."""
    import ray

    return [ray.remote(num_cpus=0, resources={node: 1})(Member).remote() for _ in range(count)]


def begun(actors, call, *args):
    """Begin a call on every actor: ``call(actor, rank, *args)`` stores values in the actor that it needs later."""
    return [one.__ray_call__.remote(call, rank, *args) for rank, one in enumerate(actors)]


def start(actors, call, *args):
    """Begin a call on every actor: ``call(rank, *args)``."""
    return begun(actors, lambda _, rank, *given: call(rank, *given), *args)


def each(actors, call, *args, seconds=60):
    """Return the result of ``call(rank, *args)`` on every actor."""
    import ray

    return ray.get(start(actors, call, *args), timeout=within(seconds))


def outcome(call):
    """Return the error that a call raises, as its class and text; or its result."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def travels(module):
    """Let actors run functions of a test module, which they cannot import."""
    import ray

    for one in (module, __name__):
        ray.cloudpickle.register_pickle_by_value(sys.modules[one])
