"""The one error of several ranks' failures, without ranks."""

import pytest

from easydist.cluster import failures
from easydist.cluster.facts import Facts, versions
from easydist.cluster.world import Outcome
from easydist.errors import PeerLostError

FACTS = [Facts(40 + rank, f"node{rank}", "abc"[rank], f"10.0.0.{rank}", versions()) for rank in range(3)]
GLOO = "RuntimeError: [gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.mark.parametrize("due", ["RemoteError: run: rank 1 failed", "PeerLostError: gather: rank 1 is lost", GLOO])
def test_the_first_failure_that_is_not_due_to_others_counts(due):
    own = Outcome(raised="ValueError: bad\nor worse", traceback="Traceback …\nValueError: bad\n")
    error = failures.raised({0: Outcome(raised=due), 1: own, 2: Outcome(raised=due)}, FACTS)
    assert error.rank == 1
    assert str(error).splitlines() == [
        "run: rank 1 of 3 raised ValueError: bad",
        "or worse",
        f"  ranks 0, 2 raised {due}",
        "on rank 1, process 41 on node1 (10.0.0.1):",
        "Traceback …",
        "ValueError: bad",
        "The ranks keep their variables. The next run() connects them in a new world: wrap models in DDP again.",
    ]


def test_without_such_a_failure_the_first_one_counts():
    both = {2: Outcome(raised=GLOO), 0: Outcome(raised="RemoteError: x")}
    assert str(failures.raised(both, FACTS)).startswith(
        f"run: rank 2 of 3 raised {GLOO}\n  rank 0 raised RemoteError: x\n"
    )


def test_all_lost_ranks_are_in_one_error():
    losses = {rank: PeerLostError(f"run: rank {rank} is lost: process {rank}\nRestart it.") for rank in (2, 1)}
    losses[2].rank = 2
    error = failures.all_lost(losses, {0: Outcome(raised="PeerLostError: gather: rank 2 is lost\nmore")})
    assert error.rank == 2
    assert str(error).splitlines() == [
        "run: rank 2 is lost: process 2",
        "run: rank 1 is lost: process 1",
        "  rank 0 raised PeerLostError: gather: rank 2 is lost",
        "ranks.restart([1, 2]) replaces what is lost; the other ranks keep their variables.",
    ]


def test_nodes_with_other_versions_are_named():
    assert failures.unequal_versions(FACTS) is None
    other = FACTS[1]._replace(versions={"Python": "3.9", "torch": "none"})
    lines = str(failures.unequal_versions([FACTS[0], other])).splitlines()
    assert lines[1:] == [
        "  10.0.0.1: Python 3.9, torch none",
        "Install the same versions there, or let Ray do so: runtime_env={'pip': [...]}",
    ]


def test_the_exit_status_is_what_ray_tells():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    assert failures.status_of(ray.exceptions.OutOfMemoryError("the node was running low on memory")) == -9
    assert failures.status_of(ray.exceptions.RayError("Worker exits with an exit code 3.")) == 3
    assert failures.status_of(ray.exceptions.RayError("connection error code 2. End of file.")) is None
