"""The ends of waits, and the state afterwards: late ranks, faults in the middle, forks, many groups, lost transfers."""

import contextlib
import functools
import gc
import os
import re
import warnings
from datetime import timedelta
from pathlib import Path

import launching
import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import BACKENDS, TREE, check_works, made, no_memory_from, of_all, outcome

import easydist
from easydist import CollectiveTimeout, memory
from easydist.testing import distributed

SCRIPT = Path(__file__).parent.parent / "scripts" / "timeouts.py"
LOSSES = ["kill_source/gloo", "kill_receiver/gloo", "kill_sender/gloo"]
CASES = ["warn/shm", "warn/gloo", "one_warns/shm", "one_warns/gloo", "quiet/shm", "quiet/gloo", "check/shm", *LOSSES]
AT = r"at \S*timeouts.py:\d+"

VERBS = {
    "gather": lambda **options: easydist.gather(torch.ones(2), **options),
    "broadcast": lambda **options: easydist.broadcast(torch.ones(2), **options),
    "copy_tensor_to_devices": lambda **options: easydist.copy_tensor_to_devices(torch.ones(2), **options),
    "scatter": lambda **options: easydist.scatter(torch.ones(2), **options),
    "all_to_all": lambda **options: easydist.all_to_all(torch.ones(2), **options),
    "reduce": lambda **options: easydist.reduce(torch.ones(2), **options),
    "pad_across_processes": lambda **options: easydist.pad_across_processes(torch.ones(2), **options),
    "gather_object": lambda **options: easydist.gather_object("x", **options),
    "broadcast_object_list": lambda **options: easydist.broadcast_object_list(["x"], **options),
    "scatter_object_list": lambda **options: easydist.scatter_object_list([None], ["x", "y"], **options),
    "broadcast_tensor_dict": lambda **options: easydist.broadcast_tensor_dict({"x": torch.ones(2)}, **options),
}


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, CASES)[0]


@pytest.mark.slow
@BACKENDS
def test_a_long_wait_is_mentioned_in_the_log_again_and_again(backend):
    rows, statuses = launched()[f"warn/{backend}"]
    assert statuses == [0, 0]
    # On a busy machine the other one may be late for the next call.
    assert [text for text in rows[1]["warnings"] if "rank 1: waits in gather, call 3" in text] == []
    assert len(rows[0]["warnings"]) >= 2
    for text in rows[0]["warnings"]:
        assert re.fullmatch(
            r"gather: 1 of 2 ranks did not come within [\d.]+ s\n"
            rf"  rank 0: waits in gather, call 3, {AT}\n"
            rf"  rank 1: missing; last seen in gather, call 2, {AT}; process \d+ on \S+ is alive\n"
            r"Still waiting\.",
            text,
        ), text
    assert [(row["error"], row["gathered"]) for row in rows.values()] == [(None, [0, 1])] * 2


@pytest.mark.slow
@BACKENDS
def test_the_lowest_waiting_rank_of_a_host_warns_for_all(backend):
    rows, statuses = launched()[f"one_warns/{backend}"]
    assert statuses == [0, 0, 0]
    assert len(rows[1]["warnings"]) >= 2
    # Rank 2 may warn before rank 1 has come, or when that has left the call already.
    assert not any("  rank 1: waits in gather, call 3" in text for text in rows[2]["warnings"])
    assert [(row["error"], row["gathered"]) for row in rows.values()] == [(None, [0, 1, 2])] * 3


@pytest.mark.slow
@BACKENDS
def test_a_shorter_wait_is_not_mentioned_in_the_log(backend):
    rows, statuses = launched()[f"quiet/{backend}"]
    assert statuses == [0, 0]
    for rank in range(2):
        assert (rows[rank]["error"], rows[rank]["warnings"]) == ("CollectiveTimeout", [])
        assert rows[rank]["gathered"] == [0, 1]


@pytest.mark.slow
def test_easydist_check_0_compares_no_calls():
    rows, statuses = launched()["check/shm"]
    assert statuses == [0, 0]
    found = [rows[rank]["found"] for rank in range(2)]
    assert [one["gather None"] for one in found] == [[0, 5, 1, 5]] * 2
    assert [one["broadcast None"] for one in found] == [[0, 5]] * 2
    assert [one["reduce None"] for one in found] == [[0.5, 5.0]] * 2
    assert [one["all_to_all None"] for one in found] == [[0, 1], [5, 5]]
    assert [one["pad_across_processes None"] for one in found] == [[0, 5], [1, 5]]
    assert [rows[rank]["gathered"] for rank in range(2)] == [[0, 1]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["gather", "all_to_all", "pad_across_processes", "broadcast", "reduce"])
def test_check_of_one_call_outweighs_easydist_check_0(verb):
    rows, _ = launched()["check/shm"]
    text = f"{verb}: ranks disagree on 2 of 2 leaves"
    assert [rows[rank]["found"][f"{verb} True"] for rank in range(2)] == [text, text]


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES)
def test_a_process_killed_while_large_data_is_on_its_way_is_lost(case):
    rows, statuses = launched()[case]
    assert statuses == [0, 0, -9]
    for rank in range(2):
        assert rows[rank]["kinds"] == ["PeerLostError", "PeerLostError"], "this call, and the next one"
        assert rows[rank]["lost"] == 2
        assert rows[rank]["seconds"] < launching.within(10)


@pytest.mark.parametrize("limit", [0, 0.0, -1, -0.5, timedelta(0), timedelta(seconds=-1)], ids=repr)
@distributed(world_size=[1, 2])
def test_a_timeout_that_leaves_no_time_is_refused_before_anything_is_sent(rank, world_size, limit):
    assert easydist.gather(rank).tolist() == list(range(world_size))
    if rank == 0:  # nobody else makes these calls, or hears of them
        for name, call in VERBS.items():
            with pytest.raises(ValueError, match=rf"^{name}: timeout={re.escape(repr(limit))} is not positive$"):
                call(timeout=limit)
    assert easydist.gather(rank).tolist() == list(range(world_size))


@pytest.mark.parametrize(
    "limit", [np.timedelta64(60_000_000_000), np.timedelta64(1, "s"), np.complex64(1), True], ids=repr
)
def test_a_timeout_in_units_of_its_own_is_refused(limit):
    for name, call in VERBS.items():
        with pytest.raises(TypeError, match=f"^{name}: timeout= takes seconds or a datetime.timedelta, got "):
            call(timeout=limit)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.3, timedelta(milliseconds=300)], ids=repr)
@BACKENDS
@distributed(world_size=3)
def test_the_call_after_a_timeout_connects_anew_every_time(rank, backend, limit):
    with made(backend) as group:
        check_works(group, backend)
        for _ in range(2):
            dist.barrier()
            if rank < 2:
                with pytest.raises(CollectiveTimeout, match=r"did not come within 0\.3 s\n") as caught:
                    easydist.gather(rank, group=group, timeout=limit)
                assert 2 in caught.value.missing
            dist.barrier()
            if rank == 2:  # hears of it, although it has given itself more time
                with pytest.raises(CollectiveTimeout, match=r"did not come within 0\.3 s\n"):
                    easydist.gather(rank, group=group)
            check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"timeout": timedelta(seconds=2)}, {}], ids=["group's", "call's"])
@BACKENDS
@distributed(world_size=3)
def test_the_first_call_of_a_group_ends_in_time_and_for_all(rank, backend, limit):
    with made(backend, **limit) as group:
        if rank == 2:
            dist.barrier()
        with pytest.raises(CollectiveTimeout, match=r"^gather: 1 of 3 ranks did not come within 2 s\n") as caught:
            easydist.gather(rank, group=group, timeout=2 if rank < 2 and not limit else None)
        assert caught.value.missing == (2,)
        assert "\n  rank 2: missing; not seen in this group yet\n" in str(caught.value)
        if rank < 2:
            dist.barrier()
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=2)
def test_a_forked_child_is_refused_and_its_parent_goes_on(rank, backend):
    with made(backend) as group:
        check_works(group, backend)
        gc.collect()  # gloo groups of earlier tests, if the child were to collect them, would end it with SIGSEGV
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking a process with threads
            child = os.fork()
        if child == 0:
            try:
                for call in VERBS.values():
                    with pytest.raises(RuntimeError, match="this process is a child of a rank of the group"):
                        call(group=group)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0
        check_works(group, backend)


MANY = 132 if launching.IS_STRESS else 16


@contextlib.contextmanager
def many_groups(backend):
    """Groups that are all in use; afterwards what they held is free again, for the tests to come."""
    with made(backend) as first:
        groups = [first, *(dist.new_group() for _ in range(MANY - 1))]
        try:
            for group in groups:
                assert easydist.gather(group.rank(), group=group).tolist() == [0, 1]
            yield groups
        finally:
            for group in groups:
                dist.destroy_process_group(group)
            easydist.wait_for_everyone()  # the first call of another group forgets those that are destroyed
            gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("backend", launching.sampled(["shm", "gloo"]))
@distributed(world_size=2)
def test_many_groups_work_and_a_timeout_in_one_of_them_comes_to_all_and_is_repaired(rank, backend):
    with many_groups(backend) as groups:
        for group in (groups[0], groups[-1]):
            check_works(group, backend)
        late, found = groups[-2], None
        if rank == 0:
            found = outcome(lambda: easydist.gather(rank, group=late, timeout=0.3))
        dist.barrier()
        if rank == 1:
            found = outcome(lambda: easydist.gather(rank, group=late, timeout=5).tolist())
        assert of_all(found) == ["CollectiveTimeout"] * 2
        assert of_all(outcome(lambda: easydist.gather(rank, group=late, timeout=5).tolist())) == [[0, 1]] * 2


FAULTS = {
    "gather": (lambda **options: easydist.gather(TREE, **options), (1, 2)),
    "reduce": (lambda **options: easydist.reduce(TREE, **options), (1, 2)),
    "broadcast": (lambda **options: easydist.broadcast(TREE, 1, **options), (1,)),
    "gather_object": (lambda **options: easydist.gather_object(b"x" * 300_000, **options), (2, 3)),
    "all_to_all": (lambda **options: easydist.all_to_all(TREE, **options), (1,)),
    "scatter": (lambda **options: easydist.scatter(TREE, 1, **options), (1,)),
}
FAULT_CASES = [(verb, number) for verb in FAULTS for number in FAULTS[verb][1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "verb", "number"),
    [("shm", *case) for case in FAULT_CASES] + launching.sampled([("gloo", *case) for case in FAULT_CASES], 4),
)
@distributed(world_size=3)
def test_one_rank_without_memory_for_the_data_fails_the_call_on_all(rank, backend, verb, number):
    found = None
    with made(backend) as group:
        check_works(group, backend)
        with no_memory_from(number) if rank == 1 else contextlib.nullcontext():
            try:
                FAULTS[verb][0](group=group, timeout=launching.within(10))
            except (MemoryError, easydist.EasydistError) as error:
                found = f"{type(error).__name__}: {error}"
        told = (
            f"RemoteError: {verb}: rank 1 failed during the call\n"
            "  rank 1: MemoryError: no memory for a result\n"
            "The next call of the group reconnects."
        )
        assert of_all(found) == [told, "MemoryError: no memory for a result", told]
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.skipif(not memory._HAS_HUGE_PAGES, reason="needs Linux")
@distributed(world_size=2)
def test_what_dropped_results_leave_behind_has_a_limit():
    gc.collect()
    memory.release()
    held = [easydist.gather(torch.ones(1 << 23)) for _ in range(5)]  # 64 MiB each: 320 in all
    held.append(easydist.reduce(torch.ones(1 << 23)))
    del held
    assert 0 < memory._kept() <= 256 << 20
    for turn in range(6):
        easydist.gather({"x": torch.ones((turn + 1) << 18), "y": torch.ones(1 << 20)})
        assert 0 < memory._kept() <= 256 << 20
    memory.release()
    assert memory._kept() == 0
