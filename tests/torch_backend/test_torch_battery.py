"""Tests of torch itself for process groups, on ``easydist_shm``: a few here, all with ``make torch-tests``."""

import functools
import json
from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("expecttest", reason="torch's tests import expecttest")

SCRIPT = Path(__file__).parents[1] / "scripts" / "torch_battery.py"
SAMPLE = [
    "test_all_reduce_coalesced_full_group_max",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
]
NAMED = "test_accumulate_gradients_no_sync"
TIED = {
    **dict.fromkeys(
        [NAMED, *(f"{NAMED}_{end}" for end in ("allreduce_hook", "allreduce_with_then_hook", "grad_is_view"))],
        "trains on the CPU only if the backend is called gloo or mpi",
    ),
    "test_barrier_timeout_arg": "needs the very words of gloo's error",
    **dict.fromkeys(
        [
            f"test_monitored_barrier_{end}"
            for end in ("failure_order", "gloo", "gloo_rank_0_timeout", "gloo_subgroup", "wait_all_ranks")
        ],
        "torch offers monitored_barrier to a backend called gloo only",
    ),
}
"""The tests that torch ties to the name of gloo, each with the reason."""


def outcomes(backend, names=(), seconds=60):
    """Run tests on three ranks; return the outcome on each rank by the test's name."""
    out, _ = launching.forked(SCRIPT, backend, 3, 15, *names, seconds=seconds)
    return {row["test"]: row["ranks"] for row in map(json.loads, out.splitlines())}


@functools.cache
def sample():
    return outcomes("easydist_shm", SAMPLE, 120)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_test_of_torchs_passes(name):
    assert sample()[name] == ["passed"] * 3


@pytest.mark.stress
@pytest.mark.skipif(launching.examples(1200) <= 1200, reason="all of them take ten minutes: make torch-tests")
def test_all_tests_that_gloo_passes_pass_but_those_that_torch_ties_to_its_name():
    on_gloo = outcomes("gloo", seconds=1200)
    names = [name for name, ranks in on_gloo.items() if ranks == ["passed"] * 3]
    ours = outcomes("easydist_shm", names, 1200)
    failed = {name: ranks for name, ranks in ours.items() if ranks != ["passed"] * 3}
    print(f"gloo passes {len(names)} tests, easydist_shm {len(names) - len(failed)} of them")
    assert {name: ranks for name, ranks in failed.items() if name not in TIED} == {}
