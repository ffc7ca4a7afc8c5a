"""How waits end and what is left afterwards: late ranks, faults in the middle, forks, many groups, lost transfers."""

import contextlib
import functools
import gc
import os
import re
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import launching
import pytest
import torch
import torch.distributed as dist

import easydist
from easydist import CollectiveTimeout, ProcessState, RemoteError, memory
from easydist.comms import Communicators
from easydist.comms.sentry import sentry
from easydist.comms.watch import Watch
from easydist.testing import distributed

SCRIPT = Path(__file__).parent / "scripts" / "timeouts.py"
LOSSES = ["kill_source/gloo", "kill_receiver/gloo", "kill_sender/gloo"]
CASES = ["warn/shm", "warn/gloo", "quiet/shm", "quiet/gloo", "check/shm", *LOSSES]
AT = r"at \S*timeouts.py:\d+"

BACKENDS = pytest.mark.parametrize("backend", ["shm", "gloo"])
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


@contextlib.contextmanager
def made(way, **options):
    """A new group of all ranks, over shared memory or over gloo alone, also when it is connected anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", str(int(way == "shm")))
        yield dist.new_group(**options)


def check_works(group, backend):
    """Small and large data come to every rank of the group, the way that is meant."""
    rank, size = group.rank(), group.size()
    assert easydist.gather(torch.tensor([rank]), group=group).tolist() == list(range(size))
    got = easydist.gather(torch.full((200_000,), rank), group=group).view(size, -1)
    assert (got == torch.arange(size)[:, None]).all()
    assert easydist.reduce(torch.full((200_000,), rank + 1), "sum", group=group).unique().tolist() == [
        size * (size + 1) // 2
    ]
    assert ProcessState().communicators(group).control.get_backend() == backend


def outcome(call):
    """The name of the error that ``call`` raises, or its result."""
    try:
        return call()
    except easydist.EasydistError as error:
        return type(error).__name__


def of_all(value):
    """What every rank has here; by torch's own means, so that all ranks compare the same values."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@functools.cache
def launched():
    """What the ranks of all cases met."""
    return launching.launched(SCRIPT, CASES)[0]


@pytest.mark.slow
@BACKENDS
def test_a_long_wait_is_mentioned_in_the_log_again_and_again(backend):
    rows, statuses = launched()[f"warn/{backend}"]
    assert statuses == [0, 0]
    assert rows[1]["warnings"] == []
    assert len(rows[0]["warnings"]) >= 2
    for text in rows[0]["warnings"]:
        assert re.fullmatch(
            r"gather: 1 of 2 ranks did not come within [\d.]+ s\n"
            rf"  rank 0: waits in gather, call 2, {AT}\n"
            rf"  rank 1: missing; last seen in gather, call 1, {AT}; process \d+ on \S+ is alive\n"
            r"Still waiting\.",
            text,
        ), text
    assert [(row["error"], row["gathered"]) for row in rows.values()] == [(None, [0, 1])] * 2


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
        assert rows[rank]["seconds"] < 20


@pytest.mark.parametrize("limit", [0, 0.0, -1, -0.5, timedelta(0), timedelta(seconds=-1)], ids=repr)
@distributed(world_size=[1, 2])
def test_a_timeout_that_leaves_no_time_is_refused_before_anything_is_sent(rank, world_size, limit):
    assert easydist.gather(rank).tolist() == list(range(world_size))
    if rank == 0:  # nobody else makes these calls, or hears of them
        for name, call in VERBS.items():
            with pytest.raises(ValueError, match=rf"^{name}: timeout={re.escape(repr(limit))} leaves no time$"):
                call(timeout=limit)
    assert easydist.gather(rank).tolist() == list(range(world_size))


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
                    with pytest.raises(RuntimeError, match="this process was forked from one of the group's"):
                        call(group=group)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0
        check_works(group, backend)


MANY = 132  # the page on which a process says what it does has room for the calls of 128


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
@distributed(world_size=2)
def test_many_groups_of_one_process_work():
    with many_groups("shm") as groups:
        for group in (groups[0], groups[-1]):
            check_works(group, "shm")


@pytest.mark.slow
@BACKENDS
@distributed(world_size=2)
def test_a_timeout_in_one_of_many_groups_comes_to_all_and_is_repaired(rank, backend):
    with many_groups(backend) as groups:
        late, found = groups[130], None
        if rank == 0:
            found = outcome(lambda: easydist.gather(rank, group=late, timeout=0.3))
        dist.barrier()
        if rank == 1:
            found = outcome(lambda: easydist.gather(rank, group=late, timeout=5).tolist())
        assert of_all(found) == ["CollectiveTimeout"] * 2
        assert of_all(outcome(lambda: easydist.gather(rank, group=late, timeout=5).tolist())) == [[0, 1]] * 2


TREE = {"large": torch.ones(300_000), "small": [torch.ones(1000) for _ in range(30)], "whole": torch.arange(9000)}
FAULTS = {
    "gather": (lambda **options: easydist.gather(TREE, **options), (1, 2)),
    "reduce": (lambda **options: easydist.reduce(TREE, **options), (1, 2)),
    "broadcast": (lambda **options: easydist.broadcast(TREE, 1, **options), (1,)),
    "gather_object": (lambda **options: easydist.gather_object(b"x" * 300_000, **options), (2, 3)),
    "all_to_all": (lambda **options: easydist.all_to_all(TREE, **options), (1,)),
    "scatter": (lambda **options: easydist.scatter(TREE, 1, **options), (1,)),
}
FAULT_CASES = [(verb, number) for verb in FAULTS for number in FAULTS[verb][1]]


@contextlib.contextmanager
def no_memory_from(number):
    """The memory for this result, counted from 1, and for all that follow is not to be had."""
    inner, count = memory.empty, 0

    def empty(*args):
        nonlocal count
        count += 1
        if count >= number:
            raise MemoryError("no memory for a result")
        return inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "empty", empty)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "number"), FAULT_CASES)
@BACKENDS
@distributed(world_size=3)
def test_one_rank_without_memory_for_the_data_fails_the_call_on_all(rank, backend, verb, number):
    found = None
    with made(backend) as group:
        check_works(group, backend)
        with no_memory_from(number) if rank == 1 else contextlib.nullcontext():
            try:
                FAULTS[verb][0](group=group, timeout=20)
            except (MemoryError, easydist.EasydistError) as error:
                found = f"{type(error).__name__}: {error}"
        told = (
            f"RemoteError: {verb}: rank 1 failed in the middle\n"
            "  rank 1: MemoryError: no memory for a result\n"
            "The next call of the group connects anew."
        )
        assert of_all(found) == [told, "MemoryError: no memory for a result", told]
        check_works(group, backend)


def broadcast_tensor_dict(group, turn):
    sent = {"x": torch.arange(20_000) + turn, "y": torch.ones(3)}
    return easydist.broadcast_tensor_dict(sent if group.rank() == 0 else None, group=group, timeout=20)["x"][0]


def send_and_gather(group, turn):
    if group.rank() == 0:
        easydist.send_tensor_dict({"x": torch.tensor(turn)}, 2, group=group, timeout=20)
    elif group.rank() == 2:
        assert easydist.recv_tensor_dict(0, group=group, timeout=20) == {"x": torch.tensor(turn)}
    return easydist.gather(turn, group=group, timeout=20)[0]


FOLLOWING = {
    "gather": lambda group, turn: easydist.gather(turn, group=group, timeout=20)[group.size() - 1],
    "broadcast_tensor_dict": broadcast_tensor_dict,
    "send_tensor_dict": send_and_gather,
}


@pytest.mark.slow
@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("verb", ["broadcast", "scatter"])
@BACKENDS
@distributed(world_size=3)
def test_calls_stay_in_step_after_a_failure_that_some_do_not_notice(rank, backend, verb, following):
    with made(backend) as group:
        check_works(group, backend)
        with no_memory_from(1) if rank == 1 else contextlib.nullcontext():
            try:
                found = outcome(lambda: getattr(easydist, verb)(TREE, 0, group=group, timeout=20) and "a result")
            except MemoryError:
                found = "MemoryError"
        assert found in (["MemoryError"] if rank == 1 else ["RemoteError", "a result"])
        for turn in range(3):
            assert FOLLOWING[following](group, turn) == turn


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_who_gives_up_while_the_group_connects_anew_fails_the_call_on_all(rank, backend):
    """Rank 0 gives up three calls before the others come to the first of them; all raise in each."""
    with made(backend) as group:
        check_works(group, backend)
        store = group.get_group_store()
        if rank > 0:
            store.wait(["rank 0 gave up"])
        for _ in range(3):
            with pytest.raises(CollectiveTimeout, match=r"2 of 3 ranks did not come within 0\.2 s"):
                easydist.gather(rank, group=group, timeout=0.2 if rank == 0 else 20)
        if rank == 0:
            store.set("rank 0 gave up", "")
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=20)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_who_is_interrupted_alone_fails_the_call_on_all(rank, backend):
    """Rank 0 is interrupted in two calls, the second time while it connects anew; the others come later."""
    with made(backend) as group:
        check_works(group, backend)
        store = group.get_group_store()
        for _ in range(2 if rank == 0 else 0):
            timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                easydist.gather(rank, group=group)
            timer.join()
        store.set("interrupted", "") if rank == 0 else store.wait(["interrupted"])
        for _ in range(0 if rank == 0 else 2):
            with pytest.raises(RemoteError, match=r"^gather: rank 0 was interrupted \(KeyboardInterrupt\)\n"):
                easydist.gather(rank, group=group, timeout=20)
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=20)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["others wait", "others come later"])
@pytest.mark.parametrize("has_met", [False, True], ids=["first call", "later call"])
@BACKENDS
@distributed(world_size=3)
def test_a_rank_that_waits_for_another_in_vain_leaves_all_in_step(rank, backend, has_met, is_late):
    with made(backend) as group:
        if has_met:
            check_works(group, backend)
        store = group.get_group_store()
        if rank == 0:
            with pytest.raises(
                CollectiveTimeout, match=r"^recv_tensor_dict: 1 of 3 ranks did not come within 0\.3 s\n"
            ):
                easydist.recv_tensor_dict(1, group=group, timeout=0.3)
            store.set("rank 0 gave up", "")
        elif is_late:
            store.wait(["rank 0 gave up"])
        if is_late and rank == 0:  # rank 2 has to come to a call, too: all are connected anew
            got = easydist.recv_tensor_dict(1, group=group, timeout=20)
            assert torch.equal(got["x"], torch.arange(5))
        if is_late and rank == 1:
            with pytest.raises(
                CollectiveTimeout, match=r"^recv_tensor_dict: 1 of 3 ranks did not come within 0\.3 s\n"
            ):
                easydist.send_tensor_dict({"x": torch.arange(3)}, 0, group=group, timeout=20)
            easydist.send_tensor_dict({"x": torch.arange(5)}, 0, group=group, timeout=20)
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=20)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
        assert len(set(of_all(ProcessState().communicators(group).watch.number))) == 1
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_a_group_without_a_cpu_backend_connects_in_its_first_call(rank, backend):
    with made(backend, backend="cuda:gloo") as group:
        if rank == 2:
            dist.barrier()
        with pytest.raises(CollectiveTimeout, match=r"^gather: 1 of 3 ranks did not come within 2 s\n"):
            easydist.gather(rank, group=group, timeout=2 if rank < 2 else None)
        if rank < 2:
            dist.barrier()
        check_works(group, backend)
    with made(backend, backend="cuda:gloo") as group:
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [3, 1 << 19])
@BACKENDS
@distributed(world_size=3)
def test_two_ranks_talk_before_the_third_has_come(rank, backend, numel):
    with made(backend) as group:
        store = group.get_group_store()
        if rank == 0:
            easydist.send_tensor_dict({"x": torch.arange(numel)}, 1, group=group, timeout=20)
        elif rank == 1:
            got = easydist.recv_tensor_dict(0, group=group, timeout=20)
            assert torch.equal(got["x"], torch.arange(numel))
            store.set("received", "")
        else:
            store.wait(["received"])
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "place"), [("shm", "sched_yield"), ("shm", "hears_signals"), ("gloo", "hears_signals")]
)
@distributed(world_size=3)
def test_ctrl_c_at_an_awkward_moment_is_told_and_nothing_runs_on(rank, backend, place):
    def interrupt(*args):
        setattr(owner, place, inner)
        os.kill(os.getpid(), signal.SIGINT)
        return inner(*args)

    owner = os if place == "sched_yield" else Communicators
    inner = getattr(owner, place)
    with made(backend) as group:
        check_works(group, backend)
        store = group.get_group_store()
        setattr(owner, place, interrupt) if rank == 1 else store.wait(["interrupted"])
        try:
            found = outcome(lambda: easydist.gather(torch.tensor([5]), group=group, timeout=20).tolist())
        except KeyboardInterrupt:
            found = "KeyboardInterrupt"
        store.set("interrupted", "") if rank == 1 else None
        assert found in (["KeyboardInterrupt"] if rank == 1 else ["RemoteError", [5, 5, 5]])
        for turn in range(5):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=20)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]


@contextlib.contextmanager
def sentry_late_by_one_call():
    """The sentry finds out why a wait is in vain, but says so only when the next call connects anew."""
    find, begin_anew = Watch._late, Watch.begin_anew
    anew, ticked = threading.Event(), threading.Event()

    def late(*args):
        if threading.current_thread().name == "easydist-sentry":
            anew.wait(20)
        return find(*args)

    def begin(watch):
        before = begin_anew(watch)
        anew.set()
        sentry().add(ticking := Watch(0, 1, 1.0))
        ticking.publish = ticked.set  # looked at after the wait that had ended
        assert ticked.wait(20)
        return before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "_late", late)
        patch.setattr(Watch, "begin_anew", begin)
        yield


@pytest.mark.slow
@distributed(world_size=3)
def test_a_look_at_a_wait_that_has_ended_meanwhile_breaks_nothing(rank):
    with made("gloo") as group, sentry_late_by_one_call() if rank == 2 else contextlib.nullcontext():
        check_works(group, "gloo")
        store, key = group.get_group_store(), "rank 0 gave up"
        if rank == 1:
            store.wait([key])
        with pytest.raises(CollectiveTimeout, match="1 of 3 ranks did not come"):
            easydist.gather(rank, group=group, timeout=(1.0, 20.0, 0.1)[rank])
        if rank == 0:
            store.set(key, "")
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=20)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]


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
