"""The scheduling of gloo's threads on hosts with few cores."""

import os
from pathlib import Path

import pytest

import easydist
from easydist.testing import distributed

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch threads")


def policies():
    """Return those of the threads with which gloo moves messages."""
    threads = [
        thread for thread in Path("/proc/self/task").iterdir() if "gloo_tcp_loop" in (thread / "comm").read_text()
    ]
    return {os.sched_getscheduler(int(thread.name)) for thread in threads}


@pytest.mark.parametrize(("shares_memory", "cores", "is_batch"), [("0", 3, True), ("0", 4, False), ("1", 3, False)])
@distributed(world_size=2)
def test_they_run_after_ranks_that_share_few_cores_and_no_memory(shares_memory, cores, is_batch, rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", shares_memory)
        patch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
        easydist.wait_for_everyone()
    assert policies() == {os.SCHED_BATCH if is_batch else os.SCHED_OTHER}
