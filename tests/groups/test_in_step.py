"""Calls after a failure: every rank raises in the same one, and their next ones meet."""

import contextlib
import os
import signal
import threading
from functools import partial

import launching
import pytest
import torch
import torch.distributed as dist
from groups import BACKENDS, TREE, check_works, made, no_memory_from, of_all, outcome

import easydist
from easydist import CollectiveTimeout, ProcessState, RemoteError
from easydist.comms import Communicators
from easydist.liveness.monitor import Monitor
from easydist.liveness.watchdog import watchdog
from easydist.shm import streams
from easydist.testing import distributed
from easydist.verbs.gather import Gather

LONG = launching.within(10)
"""Seconds that a call may take; none of these tests waits for its end."""

TOLD = {
    "Ctrl-C": (RemoteError, r"^gather: rank 0 was interrupted \(KeyboardInterrupt\)\n"),
    "timeout": (CollectiveTimeout, r"^gather: 2 of 3 ranks did not come within 0\.5 s\n"),
}
"""The error of the others, by what has ended the call of one rank."""

MISSING = r"_object: 1 of 3 ranks did not come within 2 s\n(?s:.*)rank 1: missing; (?s:.*)\nA message between two "


def broadcast_tensor_dict(group, turn):
    sent = {"x": torch.arange(20_000) + turn, "y": torch.ones(3)}
    return easydist.broadcast_tensor_dict(sent if group.rank() == 0 else None, group=group, timeout=LONG)["x"][0]


def send_and_gather(group, turn):
    if group.rank() == 0:
        easydist.send_tensor_dict({"x": torch.tensor(turn)}, 2, group=group, timeout=LONG)
    elif group.rank() == 2:
        assert easydist.recv_tensor_dict(0, group=group, timeout=LONG) == {"x": torch.tensor(turn)}
    return easydist.gather(turn, group=group, timeout=LONG)[0]


FOLLOWING = {
    "gather": lambda group, turn: easydist.gather(turn, group=group, timeout=LONG)[group.size() - 1],
    "broadcast_tensor_dict": broadcast_tensor_dict,
    "send_tensor_dict": send_and_gather,
}


@pytest.mark.slow
@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("verb", launching.sampled(["broadcast", "scatter"]))
@BACKENDS
@distributed(world_size=3)
def test_calls_stay_in_step_after_a_failure_that_some_do_not_notice(rank, backend, verb, following):
    with made(backend) as group:
        check_works(group, backend)
        with no_memory_from(1) if rank == 1 else contextlib.nullcontext():
            try:
                found = outcome(lambda: getattr(easydist, verb)(TREE, 0, group=group, timeout=LONG) and "a result")
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
                easydist.gather(rank, group=group, timeout=0.2 if rank == 0 else LONG)
        if rank == 0:
            store.set("rank 0 gave up", "")
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=LONG)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_who_is_interrupted_alone_fails_the_call_on_all(rank, backend):
    """Rank 0 is interrupted in two calls, the second time while it reconnects; the others come later."""
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
                easydist.gather(rank, group=group, timeout=LONG)
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=LONG)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "ends_by"), [("_own", "Ctrl-C"), ("leave", "Ctrl-C"), ("leave", "timeout")])
@BACKENDS
@distributed(world_size=3)
def test_ctrl_c_waits_until_the_others_know_that_a_rank_leaves_a_call(rank, backend, step, ends_by):
    """It strikes in a step of rank 0 towards telling them."""
    done = getattr(Monitor, step)

    def struck(monitor, *args):
        result = done(monitor, *args)
        signal.raise_signal(signal.SIGINT)
        return result

    with made(backend) as group:
        check_works(group, backend)
        store = group.get_group_store()
        if rank == 0:
            timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT if ends_by == "Ctrl-C" else 0])
            timer.start()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Monitor, step, struck)
                with pytest.raises(KeyboardInterrupt):
                    easydist.gather(torch.ones(100_000), group=group, timeout=0.5 if ends_by == "timeout" else LONG)
            timer.join()
            store.set("interrupted", "")
            store.wait(["told 1", "told 2"])  # its next call would tell them, too
        else:
            store.wait(["interrupted"])
            with pytest.raises(TOLD[ends_by][0], match=TOLD[ends_by][1]):
                easydist.gather(torch.ones(100_000), group=group, timeout=LONG)
            store.set(f"told {rank}", "")
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_ctrl_c_waits_until_the_others_know_that_a_rank_failed_in_a_call(rank, backend):
    own = Monitor._own

    def struck(monitor, text):
        error = own(monitor, text)
        signal.raise_signal(signal.SIGINT)
        return error

    with made(backend) as group, pytest.MonkeyPatch.context() as patch:
        check_works(group, backend)
        if rank == 0:
            patch.setattr(Gather, "exchange", fail)
            patch.setattr(Monitor, "_own", struck)
        with pytest.raises(
            KeyboardInterrupt if rank == 0 else RemoteError, match=None if rank == 0 else "rank 0 failed"
        ):
            easydist.gather(torch.ones(100_000), group=group, timeout=LONG)
        patch.undo()
        store = group.get_group_store()
        store.set(f"told {rank}", "")
        store.wait(["told 1", "told 2"])  # the next call of rank 0 would tell them, too
        check_works(group, backend)


def fail(*_):
    raise ZeroDivisionError


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
        if is_late and rank == 0:  # rank 2 has to come to a call, too: all are connected again
            got = easydist.recv_tensor_dict(1, group=group, timeout=LONG)
            assert torch.equal(got["x"], torch.arange(5))
        if is_late and rank == 1:
            with pytest.raises(
                CollectiveTimeout, match=r"^recv_tensor_dict: 1 of 3 ranks did not come within 0\.3 s\n"
            ):
                easydist.send_tensor_dict({"x": torch.arange(3)}, 0, group=group, timeout=LONG)
            easydist.send_tensor_dict({"x": torch.arange(5)}, 0, group=group, timeout=LONG)
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=LONG)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
        assert len(set(of_all(ProcessState().communicators(group).monitor.number))) == 1
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_a_message_that_has_to_reconnect_all_ranks_names_those_that_make_no_call(rank, backend):
    with made(backend) as group:
        check_works(group, backend)
        store = group.get_group_store()
        if rank != 1:
            with pytest.raises(CollectiveTimeout):
                easydist.gather(rank, group=group, timeout=0.3)
            store.set(f"gave up {rank}", "")
            message = partial(easydist.send_object, "x", 0) if rank == 2 else partial(easydist.recv_object, 2)
            with pytest.raises(CollectiveTimeout, match=MISSING) as caught:
                message(group=group, timeout=2)
            assert caught.value.missing == (1,)
            store.set(f"named {rank}", "")
        else:
            store.wait(["gave up 0", "gave up 2"])
            with pytest.raises(CollectiveTimeout):
                easydist.gather(rank, group=group, timeout=LONG)
            store.wait(["named 0", "named 2"])
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
            easydist.send_tensor_dict({"x": torch.arange(numel)}, 1, group=group, timeout=LONG)
        elif rank == 1:
            got = easydist.recv_tensor_dict(0, group=group, timeout=LONG)
            assert torch.equal(got["x"], torch.arange(numel))
            store.set("received", "")
        else:
            store.wait(["received"])
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "place"), [("shm", "give_core"), ("shm", "hears_signals"), ("gloo", "hears_signals")]
)
@distributed(world_size=3)
def test_ctrl_c_at_an_awkward_moment_is_told_and_nothing_runs_on(rank, backend, place):
    def interrupt(*args):
        setattr(owner, place, inner)
        os.kill(os.getpid(), signal.SIGINT)
        return inner(*args)

    owner = streams if place == "give_core" else Communicators
    inner = getattr(owner, place)
    with made(backend) as group:
        check_works(group, backend)
        store = group.get_group_store()
        setattr(owner, place, interrupt) if rank == 1 else store.wait(["interrupted"])
        try:
            found = outcome(lambda: easydist.gather(torch.tensor([5]), group=group, timeout=LONG).tolist())
        except KeyboardInterrupt:
            found = "KeyboardInterrupt"
        store.set("interrupted", "") if rank == 1 else None
        assert found in (["KeyboardInterrupt"] if rank == 1 else ["RemoteError", [5, 5, 5]])
        for turn in range(5):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=LONG)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]


@contextlib.contextmanager
def watchdog_late_by_one_call():
    """The watchdog finds out why a wait is in vain, but says so only when the next call reconnects."""
    find, begin_reconnecting = Monitor.late, Monitor.begin_reconnecting
    reconnecting, ticked = threading.Event(), threading.Event()

    def late(*args):
        if threading.current_thread().name == "easydist-watchdog":
            reconnecting.wait(20)
        return find(*args)

    def begin(monitor):
        before = begin_reconnecting(monitor)
        reconnecting.set()
        watchdog().add(ticking := Monitor(0, 1, 1.0))
        ticking.publish = ticked.set  # looked at after the wait that had ended
        assert ticked.wait(20)
        return before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "late", late)
        patch.setattr(Monitor, "begin_reconnecting", begin)
        yield


@pytest.mark.slow
@distributed(world_size=3)
def test_a_look_at_a_wait_that_has_ended_meanwhile_breaks_nothing(rank):
    with made("gloo") as group, watchdog_late_by_one_call() if rank == 2 else contextlib.nullcontext():
        check_works(group, "gloo")
        store, key = group.get_group_store(), "rank 0 gave up"
        if rank == 1:
            store.wait([key])
        with pytest.raises(CollectiveTimeout, match="1 of 3 ranks did not come"):
            easydist.gather(rank, group=group, timeout=(1.0, LONG, 0.1)[rank])
        if rank == 0:
            store.set(key, "")
        for turn in range(3):
            gathered = easydist.gather(10 * turn + rank, group=group, timeout=LONG)
            assert gathered.tolist() == [10 * turn + r for r in range(3)]
