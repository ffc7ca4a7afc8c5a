"""Communicators over NCCL: the battery, batches, futures on other streams, splits, and what they refuse."""

from datetime import timedelta

import pytest
import torch
from gpus import GPU, ON_ANY, busy, needs_cuda, own_stream, share

from easydist.comms import ReduceOp, new_comm
from easydist.testing import check_comm, distributed

pytestmark = ON_ANY


class Staged:
    """A communicator for tensors on the CPU: it copies them to the GPU, runs the operation there, and copies back."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        method = getattr(self._comm, name)
        if name.startswith("get_") or name in ("split", "finalize"):
            return method
        if name == "batch_op_create":
            return lambda: StagedBatch(method())
        return self._staged(method)

    def _staged(self, method):
        def call(*args, **kwargs):
            pairs = []
            work = method(*[there(arg, pairs) for arg in args], **kwargs)
            return StagedWork(work, pairs)

        return call


class StagedBatch:
    def __init__(self, batch):
        self._batch, self._pairs, self._sent = batch, [], []

    def send(self, tensor, dst):
        self._batch.send(there(tensor, self._sent), dst)

    def recv(self, tensor, src):
        self._batch.recv(there(tensor, self._pairs), src)

    def issue(self, async_op, *args):
        return StagedWork(self._batch.issue(async_op, *args), self._pairs)


class StagedWork:
    def __init__(self, work, pairs):
        self._work, self._pairs = work, pairs
        if work is not None and work.is_completed():
            self.wait()

    def wait(self):
        self._work.wait()
        for here, gpu in self._pairs:
            here.copy_(gpu)

    def is_completed(self):
        return self._work.is_completed()


def there(value, pairs):
    """Return the tensors of an argument on the GPU, with their strides, and note each pair."""
    if isinstance(value, (list, tuple)) and any(isinstance(item, (torch.Tensor, list, tuple)) for item in value):
        return [there(item, pairs) for item in value]
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    if 0 in value.stride() and value.numel() > 1:  # elements that share memory
        return torch.zeros(1, device=GPU, dtype=value.dtype).expand(value.shape)
    gpu = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU).copy_(value)
    pairs.append((value, gpu))
    return gpu


def nccl(name="gpu", **options):
    share()
    return new_comm("nccl", torch.device(GPU), name, timeout=timedelta(seconds=60), **options)


def staged(rank, world_size):
    return Staged(nccl("battery"))


def staged_part(rank, world_size):
    return Staged(nccl("battery").split(list(range(world_size)), "part"))


@pytest.mark.parametrize(("make", "world_size"), [(staged, 1), (staged, 2), (staged_part, 2)])
def test_communicators_over_nccl_pass_the_battery(make, world_size):
    from easydist.testing import default_pool

    default_pool().timeout = 300
    check_comm(make, [world_size])


@needs_cuda
@distributed(world_size=2)
def test_results_are_there_on_whichever_stream_waits(rank):
    comm = nccl()
    for finish in ("wait", "future", "polled", "twice"):
        with own_stream() as begun:
            data = torch.full((1 << 20,), -1.0, device="cuda")
            torch.cuda.synchronize()
            busy()
            data.fill_(rank + 1.0)
            work = comm.all_reduce(data, ReduceOp.SUM, async_op=True)
        with own_stream():
            if finish == "future":
                assert [got is data for got in work.get_future().wait()] == [True]
            if finish == "polled":
                while not work.is_completed():
                    pass
            if finish == "twice":
                with torch.cuda.stream(begun):
                    work.wait()
            if finish != "future":
                work.wait()
            assert (data + 0)[-1].item() == 3, finish
    comm.finalize()


@needs_cuda
@distributed(world_size=2)
def test_synchronous_operations_do_not_block_the_cpu(rank):
    comm = nccl()
    data = torch.ones(1 << 20, device="cuda")
    comm.all_reduce(data, ReduceOp.SUM, async_op=False)
    with own_stream() as stream:
        busy()
        comm.all_reduce(data, ReduceOp.SUM, async_op=False)
        assert not stream.query()
        work = comm.all_reduce(data, ReduceOp.SUM, async_op=True)
        work.wait_blocking()
        assert data[0].item() == 8
    comm.finalize()


@distributed(world_size=2)
def test_tensors_elsewhere_and_windows_are_refused(rank):
    comm = nccl()
    with pytest.raises(RuntimeError, match=GPU):
        comm.all_reduce(torch.ones(1), ReduceOp.SUM, async_op=False)
    with pytest.raises(RuntimeError, match="cpu"):
        comm.all_gather_single(torch.ones(2, device=GPU), torch.ones(1), async_op=False)
    total = torch.ones(1, device=GPU)
    comm.all_reduce(total, ReduceOp.SUM, async_op=False)
    assert total.item() == 2
    with pytest.raises(RuntimeError, match="CPU"):
        new_comm("shm", torch.device(GPU), "elsewhere", timeout=timedelta(seconds=20))
    with pytest.raises(RuntimeError, match="CPU"):
        new_comm("gloo", torch.device(GPU), "elsewhere too", timeout=timedelta(seconds=20))
    comm.finalize()


@needs_cuda
@distributed(world_size=2)
def test_a_graph_replays_the_communicators_operations(rank):
    comm = nccl()
    data = torch.ones(1000, device="cuda")
    comm.all_reduce(data, ReduceOp.SUM, async_op=False)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        comm.all_reduce(data, ReduceOp.SUM, async_op=False)
    data.fill_(rank + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert data[0].item() == 3
    graph.reset()  # NCCL ends its communicator only after the graphs that use it
    comm.finalize()
