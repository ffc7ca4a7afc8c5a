"""The scheduling of gloo's threads on hosts with few cores."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

import easydist
from easydist.comms import new_comm
from easydist.testing import distributed

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch threads"),
    pytest.mark.skipif(torch.__version__ < (2, 13), reason="gloo's threads had no names"),
]


def policies():
    """Return those of the threads with which gloo moves messages, by thread; some are of earlier groups."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if "gloo_tcp_loop" in (thread / "comm").read_text():
                found[thread.name] = os.sched_getscheduler(int(thread.name))
    return found


@distributed(world_size=2)
def test_so_do_those_of_communicators_over_gloo(rank):
    before = policies().keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: range(3))
        comm = new_comm("gloo", torch.device("cpu"), "batch")
    after = policies()
    assert {after[thread] for thread in after.keys() - before} == {os.SCHED_BATCH}
    comm.finalize()


@pytest.mark.parametrize(("shares_memory", "cores", "is_batch"), [("0", 3, True), ("0", 4, False), ("1", 3, False)])
@distributed(world_size=2)
def test_they_run_after_ranks_that_share_few_cores_and_no_memory(shares_memory, cores, is_batch, rank):
    before = policies().items()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", shares_memory)
        patch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
        easydist.wait_for_everyone()
    after = policies()
    if is_batch:
        assert {*after.values()} == {os.SCHED_BATCH}
    else:
        assert all(policy == os.SCHED_OTHER for _, policy in after.items() - before)
