"""Ranks of a Ray cluster whose nodes are hosts of their own, with a network between them."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import launching
import namespaces
import pytest
from launching import SCRIPTS, within
from namespaces import address, on

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.slow

PORT = 6379
HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 12_000, "health_check_failure_threshold": 1}
"""Ray notices a killed raylet at once, and a cut link after 13 s, which is later than the ranks do."""

AFTER = 4
NBYTES = 4 << 20
"""The bytes of the broadcast."""

OWN = launching.OWN | {
    "EASYDIST_UNREACHABLE_AFTER": str(AFTER),
    "PYTHONPATH": os.pathsep.join([launching.OWN["PYTHONPATH"], str(SCRIPTS)]),
    "RAY_ADDRESS": f"{address(1)}:{PORT}",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_NUM_REDIS_GET_RETRIES": str(round(within(20))),  # all start at once; others wait so many seconds for the head
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
}
SAYS = """
import os, easydist
print(os.environ["NODE_RANK"], os.environ["MASTER_ADDR"], "py_modules" in easydist.__file__)
"""


@contextlib.contextmanager
def node(pid, number, folder):
    """Start Ray on a host, with which it ends. The head has most CPUs, so the first rank is there."""
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={json.dumps(HEALTH)}"]
    own = [*head, "--num-cpus=4"] if number == 1 else [f"--address={address(1)}:{PORT}", "--num-cpus=2"]
    own += [f"--object-store-memory={80 << 20}", f"--temp-dir={folder}", "--disable-usage-stats", "--block"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address(number)}"]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with tempfile.TemporaryFile("w+") as out:
        with subprocess.Popen(on(pid, *ray, *own), env=os.environ | OWN, stdout=out, **streams) as process:
            try:
                yield
            finally:
                process.kill()
        out.seek(0)
        print(out.read()[-4000:])  # for a test that fails


@contextlib.contextmanager
def cluster_of(count):
    """Start a Ray cluster of several hosts, and yield a function that runs Python on the first one."""
    folder = tempfile.mkdtemp(prefix="ray")  # short, because the paths of sockets must be
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        pids = stack.enter_context(namespaces.hosts(count, private=folder))
        for number, pid in enumerate(pids, 1):
            stack.enter_context(node(pid, number, folder))
        yield functools.partial(run, pids[0])


def run(pid, folder, *arguments):
    """Run Python on a host, in a folder, and return its output."""
    process = launching.start(*on(pid, "env", "-C", folder, sys.executable, *arguments), env=os.environ | OWN)
    ((out, err),) = launching.finished(process, seconds=60)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the lines of a command, and what the script tells of the ranks, of a killed raylet and of a cut link."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SAYS)
    with cluster_of(3) as python:
        said = python(folder, "-m", "easydist", "run", "--on", "ray", "-n", 3, "--nodes", 3, "script.py").splitlines()
        rows = [json.loads(row) for row in python(SCRIPTS, "ray_hosts.py").splitlines() if row.startswith(("{", "["))]
    return said, rows


def test_a_script_that_waits_for_nodes_is_sent_to_them_and_shows_their_output(outcomes):
    said, (ranks, *_) = outcomes
    assert sorted(said) == [f"[rank {rank}] {rank} {ranks[0]['address']} True" for rank in range(3)]


def test_ranks_know_their_nodes_and_communicate_over_the_link(outcomes):
    _, (ranks, *_) = outcomes
    assert sorted(row["address"] for row in ranks) == [address(number) for number in (1, 2, 3)]
    assert [row["node"] for row in ranks] == [[rank, 3, 1] for rank in range(3)]
    assert {row["store"] for row in ranks} == {ranks[0]["address"]}
    assert 1 <= sum(row["broadcast"] for row in ranks) / (2 * NBYTES) < 1.2  # once to each of the others


def named(found):
    """Check that the error names a rank, its process and its node, and that others have replaced it."""
    assert found["is_its_process"]
    rank = found["rank"]
    where = rf"process \d+ on host\d \({found['address']}\)"
    assert re.match(rf"run: rank {rank} is lost: {where}: its node has died\n  ranks? .* raised", found["text"])
    assert found["address"] not in found["after"]


def test_a_rank_whose_raylet_is_killed_is_named_and_replaced(outcomes):
    _, (_, killed, _) = outcomes
    named(killed)


def test_a_rank_whose_link_is_cut_is_named_by_the_others_before_ray_notices(outcomes):
    _, (*_, cut) = outcomes
    named(cut)
    text = rf"PeerLostError: gather: rank 2 is lost: process \d+ on host\d: its host has not answered for {AFTER} s;"
    assert re.search(text, cut["text"])
