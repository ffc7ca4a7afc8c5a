import weakref
from datetime import timedelta

import launching
import numpy as np
import pytest
import torch
import torch.distributed as dist
from queues import eventually
from torch.distributed import PrefixStore

from easydist.comms import Gloo, Native, ReduceOp, TorchComm
from easydist.groups.connecting import gloo_beside
from easydist.testing import check_comm, distributed
from easydist.testing.conformance import default_group, solo


def native(rank, world_size):
    """The backend for nccl and its like; gloo has the same collectives."""
    return TorchComm(Native(dist.group.WORLD, torch.device("cpu"), "gloo"))


def unregistered(rank, world_size):
    """The same over a group that torch does not know by name, as ``new_comm("nccl")`` makes one."""
    cpu, store = torch.device("cpu"), PrefixStore("unregistered", dist.group.WORLD.get_group_store())
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, timedelta(seconds=30))
    group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, gloo)
    return TorchComm(Native(group, cpu, "gloo"))


def beside(rank, world_size):
    """The gloo group that carries headers for a group without a CPU backend."""
    return TorchComm(gloo_beside(dist.group.WORLD, PrefixStore("beside", dist.group.WORLD.get_group_store()), 30.0))


def sub_group(rank, world_size):
    """A new group with its ranks in the same order."""
    from easydist.state import communicators

    return communicators(dist.new_group(list(range(world_size)))).met().control


@pytest.mark.slow
@pytest.mark.parametrize("world_size", launching.sampled([1, 2, 4, 3]))
def test_over_the_default_group(world_size):
    check_comm(default_group, [world_size])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "world_size"),
    launching.sampled([(native, 1), (native, 3), (unregistered, 2), (beside, 2), (sub_group, 3)]),
)
def test_over_other_groups(make, world_size):
    check_comm(make, [world_size])


@pytest.mark.slow
def test_solo():
    check_comm(solo, [1])


@distributed(world_size=2)
def test_arguments_of_other_types_are_refused_before_anything_begins():
    comm = default_group(0, 2)
    with pytest.raises(TypeError, match=r"^timeout must be a timedelta, got 5$"):
        comm.barrier(async_op=False, timeout=5)
    with pytest.raises(TypeError, match=r"^root=0\.5 is not a rank: pass an integer$"):
        comm.broadcast(torch.ones(2), 0.5, async_op=False)
    comm.barrier(async_op=False, timeout=timedelta(seconds=20))


BETWEEN = {
    "all_gather_single": lambda comm, output, input: comm.all_gather_single(output, input, async_op=False),
    "all_gather_v": lambda comm, output, input: comm.all_gather_v([output], input, async_op=False),
    "all_gather_parts": lambda comm, output, input: comm.all_gather_parts([output], [input], [None], async_op=False),
    "all_reduce_from": lambda comm, output, input: comm.all_reduce_from(output, input, ReduceOp.SUM, async_op=False),
    "all_reduce_parts": lambda comm, output, input: comm.all_reduce_parts([output], [input], SUM, async_op=False),
    "all_to_all": lambda comm, output, input: comm.all_to_all([output], [input], async_op=False),
    "gather": lambda comm, output, input: comm.gather([output], input, 0, async_op=False),
    "reduce_scatter": lambda comm, output, input: comm.reduce_scatter(output, [input], ReduceOp.SUM, async_op=False),
    "reduce_scatter_single": lambda comm, output, input: comm.reduce_scatter_single(
        output, input, ReduceOp.SUM, async_op=False
    ),
    "scatter": lambda comm, output, input: comm.scatter(output, [input], 0, async_op=False),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_an_output_that_does_not_fit_the_input_is_refused(name):
    comm, grid = solo(0, 1), torch.zeros(3, 2)
    for output, text in (
        (torch.zeros(3, 2, dtype=torch.int32), "all tensors must have one dtype, got"),
        (torch.zeros(7), "own .* must fit|elements"),
        (torch.zeros(1, 1).expand(3, 2), "must be contiguous or strided; .* share memory"),
        (torch.zeros(3, 2, device="meta"), "tensor is on meta, the communicator on cpu"),
    ):
        with pytest.raises(RuntimeError, match=text):
            BETWEEN[name](comm, output, grid)
    BETWEEN[name](comm, torch.zeros(6), grid)
    BETWEEN[name](comm, torch.zeros(2, 3).t(), grid)


def test_several_are_reduced_without_a_factor():
    parts = [torch.ones(3), torch.ones(2)]
    with pytest.raises(RuntimeError, match="all_reduce_parts: op must have no factor"):
        solo(0, 1).all_reduce_parts([torch.empty(3), torch.empty(2)], parts, ReduceOp.PREMUL_SUM(2), async_op=False)


@distributed(world_size=2)
def test_what_is_still_to_be_sent_is_not_written(rank):
    """Only this rank's part may stay where it is. Of the others, large ones arrived changed."""
    comm, data = default_group(rank, 2), torch.arange(4.0) + 10 * rank
    mine, other = data.view(2, 2)[rank], data.view(2, 2)[1 - rank]
    shared = [
        lambda: comm.all_gather([*data.view(2, 2)], other, async_op=False),
        lambda: comm.all_gather_single(data, other, async_op=False),
        lambda: comm.all_gather_single(data, data[1:3], async_op=False),
        lambda: comm.all_to_all([*data.view(2, 2)], [*data.view(2, 2)], async_op=False),
        lambda: comm.gather([*data.view(2, 2)], other, rank, async_op=False),
        lambda: comm.gather_single(data, other, rank, async_op=False),
        lambda: comm.scatter(other, [*data.view(2, 2)], rank, async_op=False),
    ]
    for call in shared:
        with pytest.raises(RuntimeError, match="output and input must not share memory, except for this rank's part"):
            call()
    comm.all_gather([*data.view(2, 2)], mine, async_op=False)
    comm.all_gather_single(data, mine, async_op=False)
    assert data.tolist() == [0, 1, 12, 13]


def gloo(rank, world_size):
    return TorchComm(Gloo(dist.group.WORLD, torch.device("cpu"), "gloo"))


@pytest.mark.parametrize("numel", [9, 150_000])
@pytest.mark.parametrize("make", [default_group, gloo])
@distributed(world_size=3)
def test_floats_are_reduced_in_rank_order(rank, make, numel):
    comm = make(rank, 3)
    every = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    want = every[0] + every[1] + every[2]
    one, other, third = every[rank].clone(), torch.empty(numel), every[rank].clone()
    comm.all_reduce(one, ReduceOp.SUM, async_op=False)
    comm.all_reduce_from(other, every[rank], ReduceOp.SUM, async_op=False)
    comm.reduce(third, 1, ReduceOp.SUM, async_op=False)
    part = torch.empty(numel // 3)
    comm.reduce_scatter_single(part, every[rank], ReduceOp.SUM, async_op=False)
    assert torch.equal(one, want)
    assert torch.equal(other, want)
    assert torch.equal(third, want if rank == 1 else every[rank])
    assert torch.equal(part, want.view(3, -1)[rank])


NUMEL = 1 << 18
SUM = ReduceOp.SUM
BEGIN = {
    "all_gather_single": lambda comm, new: comm.all_gather_single(new(2), new(), async_op=True),
    "all_gather_v": lambda comm, new: comm.all_gather_v([new(), new()], new(), async_op=True),
    "all_gather_parts": lambda comm, new: comm.all_gather_parts([new(2)], [new()], [None], async_op=True),
    "all_reduce": lambda comm, new: comm.all_reduce(new(), SUM, async_op=True),
    "all_reduce_from": lambda comm, new: comm.all_reduce_from(
        new(), new() if comm.backend.shares_memory else copied(), SUM, async_op=True
    ),
    "all_reduce_parts": lambda comm, new: comm.all_reduce_parts(
        [new(), new()], [new() if comm.backend.shares_memory else copied() for _ in range(2)], SUM, async_op=True
    ),
    "all_to_all": lambda comm, new: comm.all_to_all([copied(), new()], [copied(), new()], async_op=True),
    "broadcast": lambda comm, new: comm.broadcast(new(), 0, async_op=True),
    "broadcast_parts": lambda comm, new: comm.broadcast_parts([new(), new()], 0, async_op=True),
    "multicast": lambda comm, new: comm.multicast(new(), 0, [1], async_op=True),
    "gather here": lambda comm, new: comm.gather([new(), new()], copied(), 0, async_op=True),
    "gather there": lambda comm, new: comm.gather([copied(), copied()], new(), 1, async_op=True),
    "reduce here": lambda comm, new: comm.reduce(new(), 0, SUM, async_op=True),
    "reduce there": lambda comm, new: comm.reduce(new(), 1, SUM, async_op=True),
    "reduce_scatter": lambda comm, new: comm.reduce_scatter(new(), [copied(), new()], SUM, async_op=True),
    "scatter from here": lambda comm, new: comm.scatter(copied(), [copied(), new()], 0, async_op=True),
    "scatter from there": lambda comm, new: comm.scatter(new(), [copied(), copied()], 1, async_op=True),
}


def copied():
    """A tensor that rank 0 need not hold, because it is copied, or not looked at, when the operation begins."""
    return torch.zeros(NUMEL, dtype=torch.float64)


@pytest.mark.parametrize("name", BEGIN)
@pytest.mark.parametrize("make", [default_group, gloo])
@distributed(world_size=2)
def test_tensors_live_as_long_as_their_operation(rank, make, name):
    """Nobody but the operation holds them; rank 1 begins only when rank 0 has looked."""
    comm, memory = make(rank, 2), []

    def new(times=1):
        array = np.zeros(times * NUMEL)
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    if rank == 1:
        dist.barrier()
    work = BEGIN[name](comm, new)
    if rank == 0:
        assert all(array() is not None for array in memory)
        dist.barrier()
    work.wait()
    eventually(lambda: all(array() is None for array in memory))  # gloo's thread frees them after the end


def lanes():
    """Return the backends of four lanes of the default group."""
    first = Gloo(dist.group.WORLD, torch.device("cpu"), "gloo")
    return [first, *(first.among(range(2), lane) for lane in (1, 2, 3))]


def all_arrive(rank, begin):
    """Make sure that tensors from rank 0 arrive in the calls that send them; rank 1 begins these in opposite order."""
    tensors = [torch.tensor([number if rank == 0 else -1]) for number in range(len(begin))]
    order = list(enumerate(begin)) if rank == 0 else list(enumerate(begin))[::-1]
    for work in [call(tensors[number]) for number, call in order]:
        work.wait()
    assert [t.item() for t in tensors] == list(range(len(begin)))


@distributed(world_size=2)
def test_what_is_sent_on_one_lane_meets_nothing_of_another(rank):
    comms = [TorchComm(backend) for backend in lanes()]
    begin = [lambda t, comm=comm: comm.broadcast(t, 0, async_op=True) for comm in comms]
    begin += [
        lambda t, comm=comm: comm.send(t, 1, async_op=True) if rank == 0 else comm.recv(t, 0, async_op=True)
        for comm in comms
    ]
    all_arrive(rank, begin)


@distributed(world_size=2, timeout=launching.within(10))
def test_messages_that_nobody_describes_stay_on_their_lane_too(rank):
    """Those of a collective, ``send`` and broadcasts: their tags are the only difference."""
    backends = lanes()
    assert all(backend.call is None for backend in backends)
    begin = [lambda t, one=one: one.scatter(t, [] if rank else [t, t], 0) for one in backends]
    begin += [lambda t, one=one: one.recv(t, 0) if rank else one.send(t, 1) for one in backends]
    begin += [lambda t, one=one: one.broadcast(t, 0) for one in backends]
    all_arrive(rank, begin)
