"""Windows: memory of other ranks, its bounds, and signals."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import within

import easydist
from easydist.comms import CommTimeout, SignalCmpOp, Solo, TorchComm, new_comm
from easydist.testing import distributed

CPU = torch.device("cpu")


def made(backend="shm"):
    return new_comm(backend, CPU, "windows", timeout=timedelta(seconds=within(30)))


@pytest.mark.slow
@distributed(world_size=3)
def test_what_is_put_before_a_signal_is_there_when_it_is_seen(rank):
    comm = made("gloo")  # windows are shared memory, whatever the backend
    window = comm.window_allocate(4096 + 8, cpu_buf=True, signal_size=3)
    assert window.get_size() == 4104
    right, left = (rank + 1) % 3, (rank - 1) % 3
    mine = window.get_tensor(rank, (1024,), torch.float32, 0)
    other = window.get_tensor(rank, (2,), torch.float32, 1024)
    for turn in range(1, 300):
        waiting = window.wait_signal(left, turn, SignalCmpOp.GE, async_op=True)
        data = torch.full((2, 512), float(turn)).t()
        window.put(data, right, 0, async_op=turn % 2 == 0).wait()
        window.signal(rank, turn, right, async_op=False).wait()
        waiting.wait()
        assert waiting.is_completed()
        assert mine.unique().tolist() == [turn]
        comm.barrier(False)
    assert other.tolist() == [0, 0]
    view = window.get_tensor(right, (2,), torch.int64, 3)
    view.fill_(7)
    comm.barrier(False)
    assert window.get_tensor(rank, (4,), torch.int64, 2)[1:3].tolist() == [7, 7]


@pytest.mark.slow
@distributed(world_size=2)
def test_bounds_are_checked_and_sizes_agree(rank):
    comm = made()
    window = comm.window_allocate(64, signal_size=2)
    for call, text in (
        (lambda: window.put(torch.ones(17), 1, 0, False), r"Requested size \(68 bytes\) exceeds the window size \(64"),
        (lambda: window.put(torch.ones(1), 1, 16, False), r"Requested size \(68 bytes\) exceeds"),
        (lambda: window.put(torch.ones(1), 1, -1, False), "offset in the window must not be negative, got -1"),
        (lambda: window.put(torch.ones(1), 2, 0, False), r"dst_rank must be in range \[0, 2\)"),
        (lambda: window.get_tensor(0, (9,), torch.float64, 0), r"\(72 bytes\) exceeds"),
        (lambda: window.get_tensor(0, (-1,), torch.float64, 0), "must not be negative"),
        (lambda: window.get_tensor(5, (1,), torch.float64, 0), "rank must be in range"),
        (lambda: window.signal(2, 1, 0, False), r"signal_disp must be in range \[0, 2\), but got 2"),
        (lambda: window.signal(0, 1 << 63, 0, False), "64 bits"),
        (lambda: window.signal(0, -(1 << 63) - 1, 0, False), "64 bits"),
        (lambda: window.wait_signal(-1, 1, SignalCmpOp.EQ, False), "signal_disp must be in range"),
        (lambda: comm.window_allocate(8 * (1 + rank)), r"different windows: \[8, 16\] bytes"),
        (lambda: comm.window_allocate(8, signal_size=1 + rank), r"different windows: .*, \[1, 2\] signals"),
        (lambda: comm.window_allocate(-8), "cannot have -8 bytes"),
        (lambda: comm.window_allocate(1 << 62), "rank 0 has no room for"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
    with pytest.raises(TypeError, match="SignalCmpOp"):
        window.wait_signal(0, 1, "EQ", False)
    for number in (-5, (1 << 63) - 1, -(1 << 63)):
        window.signal(0, number, rank, False)
        window.wait_signal(0, number, SignalCmpOp.LE, False).wait()
    comm.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match=r"wait_signal timed out after 0.05 s: slot 1 of rank . holds 0"):
        window.wait_signal(1, 1, SignalCmpOp.EQ, False)
    assert not comm.is_broken


@pytest.mark.slow
@distributed(world_size=2)
def test_a_wait_that_times_out_says_that_a_sender_is_stopped(rank):
    comm, process = made(), easydist.gather(os.getpid())[1].item()
    window = comm.window_allocate(64)
    comm.set_timeout(timedelta(milliseconds=50))
    if rank == 1:
        os.kill(process, signal.SIGSTOP)
        return
    said, deadline = "", time.monotonic() + within(10)
    while "stopped" not in said and time.monotonic() < deadline:
        with pytest.raises(CommTimeout, match=r"^wait_signal timed out after 0.05 s: slot 0 of rank") as caught:
            window.wait_signal(0, 1, SignalCmpOp.EQ, False)
        said = str(caught.value)
    os.kill(process, signal.SIGCONT)
    assert re.search(rf"holds 0: process {process} on \S+ is alive but stopped \(SIGSTOP\)$", said), said


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@distributed(world_size=2)
def test_a_fault_of_one_rank_is_raised_on_all_and_a_rank_that_does_not_come_is_named(rank, backend):
    comm = made(backend)
    with pytest.raises(RuntimeError, match=r"^a window cannot have -1 bytes and 256 signals \(rank 1\)$"):
        comm.window_allocate(-rank)
    with pytest.raises(RuntimeError, match=r"^tensor_register: Tensor must be contiguous \(rank 0\)$"):
        comm.new_window(torch.ones(4)[:: 2 - rank])
    with pytest.raises(RuntimeError, match=r"^tensor_register: takes a tensor, got str \(rank 1\)$"):
        comm.new_window("x" if rank else torch.ones(4))
    window = comm.new_window(torch.full((2,), rank))
    assert window.map_remote_tensor(1 - rank).tolist() == [1 - rank] * 2
    comm.set_timeout(timedelta(milliseconds=50))
    if rank == 0:
        with pytest.raises(CommTimeout, match=r"^window in the communicator .*: timed out"):
            comm.window_allocate(8)
        assert comm.is_broken
    dist.barrier()


@pytest.mark.slow
@distributed(world_size=2)
def test_ranks_of_several_hosts_are_refused_on_all_of_them(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {rank}")
        comm = made("auto")
        assert comm.get_backend() == "gloo"
        with pytest.raises(RuntimeError, match=r"windows need ranks that share a host's memory; .* are on 2 hosts"):
            comm.window_allocate(8)
        with pytest.raises(RuntimeError, match=r"ranks are on several hosts.*Use gloo"):
            made("shm")
        comm.barrier(False)


@pytest.mark.slow
@distributed(world_size=2)
def test_registered_tensors_are_the_windows_memory(rank):
    comm, tensor = made(), torch.arange(6.0).view(2, 3) + 10 * rank
    window = comm.new_window()
    with pytest.raises(RuntimeError, match="no memory"):
        window.signal(0, False)
    with pytest.raises(RuntimeError, match="Tensor must be contiguous"):
        window.tensor_register(tensor.t())
    window.tensor_register(tensor)
    with pytest.raises(RuntimeError, match="registered already"):
        window.tensor_register(tensor)
    assert torch.equal(window.map_remote_tensor(1 - rank), torch.arange(6.0).view(2, 3) + 10 * (1 - rank))
    comm.barrier(False)
    for turn in range(1, 4):
        window.put(torch.full((2,), float(turn)), 1 - rank, 4, False)
        window.signal(1 - rank, False)
        window.wait_signal(1 - rank, False).wait()
        assert tensor[1].tolist() == [3 + 10 * rank, turn, turn]
        comm.barrier(False)
    window.tensor_deregister()
    assert tensor[1, 1].item() == 3
    with pytest.raises(RuntimeError, match="no tensor is registered"):
        window.tensor_deregister()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_wait_that_times_out_consumes_no_signal(async_op):
    comm = TorchComm(Solo())
    window = comm.new_window(torch.zeros(1))
    comm.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match="timed out"):
        window.wait_signal(0, async_op).wait()
    window.signal(0, False)
    window.wait_signal(0, False)


def test_signals_that_came_together_are_consumed_one_by_one():
    comm = TorchComm(Solo())
    window = comm.new_window(torch.zeros(1))
    comm.set_timeout(timedelta(milliseconds=20))
    window.signal(0, False)
    window.signal(0, False)
    for _ in range(2):
        window.wait_signal(0, False)
    with pytest.raises(RuntimeError, match="timed out"):
        window.wait_signal(0, False)


def test_a_window_outlives_nothing_but_its_views():
    view = TorchComm(Solo()).window_allocate(16).get_tensor(0, (2,), torch.int64, 0)
    view.fill_(3)
    assert view.tolist() == [3, 3]
    assert TorchComm(Solo()).window_allocate(0, signal_size=0).get_size() == 0
