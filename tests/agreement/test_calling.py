"""One call at a time in a group: a second one of the same process is an error at once, and the first stays right."""

import ctypes
import inspect
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import BACKENDS, check_works, made

import easydist
from easydist import CollectiveTimeout, DisagreementError, OverlappingCallError, ProcessState, RemoteError
from easydist.agreement.calling import calling
from easydist.liveness.monitor import Monitor
from easydist.liveness.rules import CallProtocol
from easydist.testing import distributed

DEADLINE = 20.0


def in_call(group):
    """Return once another thread of this process is in a call of the group."""
    comms, until = ProcessState().communicators(group), time.monotonic() + DEADLINE
    while not comms.under_way:
        assert time.monotonic() < until
        time.sleep(0.001)


def begun(call):
    """A thread in which the call runs, and the list into which its result comes."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), name="worker")
    thread.start()
    return thread, results


def wait_until(group, key):
    """Wait for a key in the group's store: for what another rank has done."""
    dist.distributed_c10d._get_default_store().wait([key], timedelta(seconds=DEADLINE))


def tell(key):
    dist.distributed_c10d._get_default_store().set(key, "1")


@pytest.mark.parametrize("is_first", [False, True])
@BACKENDS
@distributed(world_size=2)
def test_a_second_call_of_another_thread_is_an_error_and_the_first_stays_right(rank, backend, is_first):
    with made(backend) as group:
        if not is_first:
            check_works(group, backend)
        if rank == 1:
            wait_until(group, "refused")
            assert easydist.gather(torch.arange(3) + 1, group=group).tolist() == [0, 1, 2, 1, 2, 3]
        else:
            thread, results = begun(lambda: easydist.gather(torch.arange(3), group=group))
            in_call(group)
            for _ in range(3):
                with pytest.raises(OverlappingCallError) as caught:
                    easydist.reduce(torch.ones(2), group=group)
            lines = str(caught.value).splitlines()
            assert lines[0] == "reduce: another call of the group is under way in this process"
            assert lines[1].startswith("  worker: gather at tests/agreement/test_calling.py:")
            assert lines[2].startswith("  MainThread: reduce at tests/agreement/test_calling.py:")
            assert "new_group" in lines[3]
            tell("refused")
            thread.join(DEADLINE)
            assert results[0].tolist() == [0, 1, 2, 1, 2, 3]
        check_works(group, backend)


@BACKENDS
@distributed(world_size=2)
def test_a_call_in_a_signal_handler_is_an_error_and_the_one_under_way_stays_right(rank, backend):
    refused = []

    def handler(number, frame):
        try:
            easydist.gather(torch.ones(1), group=group)
        except RuntimeError as error:
            refused.append(str(error))

    with made(backend) as group:
        check_works(group, backend)
        if rank == 0:
            before = signal.signal(signal.SIGUSR2, handler)
            main = threading.Thread(target=lambda: (in_call(group), os.kill(os.getpid(), signal.SIGUSR2), tell("sent")))
            main.start()
        else:
            wait_until(group, "sent")
        assert easydist.gather(torch.tensor([rank]), group=group).tolist() == [0, 1]
        if rank == 0:
            main.join(DEADLINE)
            signal.signal(signal.SIGUSR2, before)
            assert all("another call of the group is under way" in text for text in refused)
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=2)
def test_what_a_rank_sent_before_it_gave_up_is_no_part_of_a_result(rank, backend):
    with made(backend) as group:
        check_works(group, backend)
        if rank == 1:
            wait_until(group, "given up")
        with pytest.raises(CollectiveTimeout):
            easydist.gather(torch.arange(3), group=group, timeout=None if rank else 0.2)
        if rank == 0:
            tell("given up")
        check_works(group, backend)


@BACKENDS
@distributed(world_size=2)
def test_an_error_that_all_ranks_raise_together_leaves_the_connections_as_they_are(rank, backend):
    with made(backend) as group:
        check_works(group, backend)
        before = ProcessState().communicators(group).control
        for error, call in {
            DisagreementError: lambda: easydist.gather(torch.ones(2, 2 + rank), group=group),
            RemoteError: lambda: easydist.gather(rank, dst=2 * rank, group=group),
            ValueError: lambda: easydist.gather(rank, dst=2, group=group),
        }.items():
            with pytest.raises(error):
                call()
            check_works(group, backend)
        assert ProcessState().communicators(group).control is before


@distributed(world_size=2)
def test_threads_with_groups_of_their_own_do_not_disturb_each_other(rank):
    groups = [dist.new_group() for _ in range(3)]
    pairs = [begun(lambda g=g: [int(easydist.reduce(i, "sum", group=g)) for i in range(50)]) for g in groups]
    for thread, _ in pairs:
        thread.join(DEADLINE)
    assert [results for _, results in pairs] == [[[2 * i for i in range(50)]]] * 3


@distributed(world_size=2)
def test_operations_that_have_begun_on_one_thread_are_no_second_call(rank):
    comm = ProcessState().communicators().met().control
    outputs = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    works = [
        comm.all_gather_single(output, torch.tensor([rank + i]), async_op=True) for i, output in enumerate(outputs)
    ]
    assert easydist.gather(rank).tolist() == [0, 1]
    for work in works:
        work.wait()
    assert [output.tolist() for output in outputs] == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize("limit", ["60", [1], True, "x", 1j], ids=repr)
@distributed(world_size=[1, 2])
def test_a_timeout_of_another_type_is_refused(rank, world_size, limit):
    with pytest.raises(TypeError, match=r"^gather: timeout= takes seconds or a datetime\.timedelta, got "):
        easydist.gather(rank, timeout=limit)
    with pytest.raises(TypeError, match=r"^ProcessState: timeout= takes seconds"):
        ProcessState(timeout=limit)
    assert easydist.gather(rank, timeout=np.int64(20)).tolist() == list(range(world_size))


@distributed(world_size=2)
def test_a_peer_may_be_a_numpy_integer_even_in_a_report(rank):
    store, peer = dist.distributed_c10d._get_default_store(), np.int64(1 - rank)
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1: missing"):
            easydist.send_tensor_dict({"x": torch.ones(1)}, peer, timeout=0.05)
        assert "easydist-watchdog" in [thread.name for thread in threading.enumerate()]
        store.set("given up", "")
    else:
        wait_until(None, "given up")
    assert easydist.gather(rank).tolist() == [0, 1]


@BACKENDS
@distributed(world_size=2)
def test_calls_of_one_backward_pass_in_several_threads_take_turns(rank, backend):
    """autograd has a thread for each device; threads of the test stand for them."""
    with made(backend) as group:
        check_works(group, backend)
        x = torch.ones(3, requires_grad=True)
        first, second = (easydist.reduce(x * n, "sum", differentiable=True, group=group) for n in (1, 2))
        if rank == 1:
            wait_until(group, "second has begun")
            first.sum().backward()
            second.sum().backward()
        else:
            one, _ = begun(first.sum().backward)
            in_call(group)
            with pytest.raises(OverlappingCallError, match="another call of the group is under way"):
                easydist.gather(rank, group=group)
            second.register_hook(lambda gradient: tell("second has begun"))
            other, _ = begun(second.sum().backward)
            one.join(DEADLINE)
            other.join(DEADLINE)
        assert x.grad.tolist() == [6, 6, 6]
        check_works(group, backend)


class Struck(Exception):
    pass


def struck(call, line):
    """Make a call in which an exception strikes at a line of what begins it, as that of a signal handler may."""
    left = line

    def in_function(frame, event, arg):
        nonlocal left
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise Struck(f"{frame.f_code.co_name}, line {frame.f_lineno}")
        return in_function

    sys.settrace(lambda frame, event, arg: in_function if frame.f_code in BEGINNINGS else None)
    try:
        return call()
    finally:
        sys.settrace(None)


def deep(call, depth):
    """Make a call when the stack is as deep as this."""
    return call() if depth <= 0 else deep(call, depth - 1)


def full(call, left):
    """Make a call when the stack has room for so many functions."""
    return deep(call, sys.getrecursionlimit() - len(inspect.stack(0)) - left)


BEGINNINGS = [calling._begin.__code__, Monitor.begin.__code__, CallProtocol.begin_call.__code__]
FAILING = {"struck": (struck, range(1, 55)), "full": (full, range(8, 60))}


@pytest.mark.parametrize("kind", FAILING)
@BACKENDS
@distributed(world_size=2)
def test_an_exception_anywhere_in_the_beginning_of_a_call_leaves_the_ranks_in_step(rank, backend, kind):
    fails, places = FAILING[kind]
    with made(backend) as group:
        check_works(group, backend)
        monitor, failures = ProcessState().communicators(group).monitor, 0
        for place in places:
            before, call = monitor.number, lambda place=place: easydist.gather({"place": place}, group=group)
            try:
                call() if rank else fails(call, place)
            except RemoteError:
                assert rank == 1, place
            except (Struck, RecursionError, ctypes.ArgumentError):
                assert rank == 0, place
                failures += 1
                if monitor.number == before:  # the other rank waits for this call, and hears of nothing
                    call()
            assert easydist.gather(rank, group=group).tolist() == [0, 1], place
        assert failures >= (10 if rank == 0 else 0)
