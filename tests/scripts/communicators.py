"""Communicators in processes of their own, configured by the environment alone. Each rank prints its outcome."""

import gc
import multiprocessing
import os
import signal
import sys
from datetime import timedelta

import torch
import torch._dynamo  # the meshes need it; each rank would take seconds to load it
from launching import free_port, within
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import easydist.comms as torchcomms
from easydist.comms import ReduceOp, SignalCmpOp, device_mesh, making
from easydist.errors import PeerLostError
from easydist.groups import rendezvous

CPU = torch.device("cpu")


def launch(size, fn, *args):
    """Return exit statuses, and the answers of the ranks, sorted."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=run, args=(rank, size, port, answers, fn, args)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found = []
    while not answers.empty():
        found.append(answers.get())
    return [process.exitcode for process in ranks], sorted(found)


def run(rank, size, port, answers, fn, args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if (answer := fn(rank, *args)) is not None:
        answers.put(answer)


def sums(rank, backend):
    """Use the same name three times, and finalize in between."""
    for _ in range(3):
        comm = torchcomms.new_comm(backend, CPU, "main")
        tensor = torch.tensor([rank + 1.0])
        work = comm.all_reduce(tensor, ReduceOp.SUM, async_op=True)
        work.wait()
        comm.barrier(False)
        comm.finalize()
    return f"{backend}: rank {rank} sums {tensor.item():.0f}"


def death(rank, backend):
    comm = torchcomms.new_comm(backend, CPU, "main", timeout=timedelta(seconds=120))
    comm.barrier(False)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.recv(torch.empty(1), 1, True).wait()  # its beginning fails if the end was noticed before
    except RuntimeError as error:
        lost = error if isinstance(error, PeerLostError) else PeerLostError(str(error))
    return f"{backend}: rank 0 of 2 heard that rank {lost.rank} ended by {-(lost.exit_status or 0)}"


def death_in_connecting(rank):
    """A rank dies when all have met, but are not connected."""
    torchcomms.new_comm("gloo", CPU, "first").barrier(False)
    if rank == 1:
        making.gloo_connections = lambda *_args, **_where: os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: torchcomms.new_comm("gloo", CPU, "main", timeout=timedelta(seconds=within(2))))


def death_in_rendezvous(rank, size):
    """A rank dies when it has come, but the last one has not, and never comes."""
    torchcomms.new_comm("shm", CPU, "first").barrier(False)
    if rank == 1:
        rendezvous.Rendezvous.check = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if rank == size - 1:
        return None
    return error_of(lambda: torchcomms.new_comm("auto", CPU, "main", timeout=timedelta(seconds=within(60))))


def silence(rank):
    """Wait for signals of a rank that ends after its first one."""
    comm = torchcomms.new_comm("shm", CPU, "main", timeout=timedelta(seconds=120))
    window, other = comm.new_window(torch.zeros(1)), comm.window_allocate(8)
    if rank == 1:
        window.signal(0, False)
        os.kill(os.getpid(), signal.SIGKILL)
    window.wait_signal(1, False)
    waits = [lambda: window.wait_signal(1, False), lambda: other.wait_signal(0, 1, SignalCmpOp.EQ, True).wait()]
    return [error_of(wait) for wait in waits]


def stuck(rank, size):
    """Signal on among those who live, until all of them wait for a signal."""
    comm = torchcomms.new_comm("shm", CPU, "main", timeout=timedelta(seconds=120))
    window = comm.window_allocate(8)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        window.wait_signal(1, 1, SignalCmpOp.EQ, False)
        window.signal(0, 7, 0, False)
    if rank == 0:
        window.signal(1, 1, 1, False)
        window.wait_signal(0, 7, SignalCmpOp.EQ, False)
    return error_of(lambda: window.wait_signal(0, 8, SignalCmpOp.EQ, False))


def error_of(wait):
    try:
        wait()
    except PeerLostError as error:
        return f"rank {error.rank} ended by {-(error.exit_status or 0)}: {str(error).partition('(')[0]}"


def mesh(rank, backend):
    """Work without a default group: DDP along one dimension, tensors in parallel along the other."""
    world = torchcomms.new_comm(backend, CPU, "world")
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    tp = world.split(rows[rank // 2], "tp")
    dp = world.split(columns[rank % 2], "dp")
    grid = device_mesh.init_device_mesh((dp, tp), ("dp", "tp"), _global_comm=world)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    weights = {name: value.clone() for name, value in alone.state_dict().items()}
    inputs = torch.arange(8.0).view(2, 4)
    alone(inputs).sum().backward()

    replicated = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    replicated.load_state_dict(weights)
    parallel = DistributedDataParallel(replicated, device_mesh=grid["dp"])
    parallel(inputs[rank // 2 :][:1]).sum().backward()
    assert torch.allclose(replicated[0].weight.grad * 2, alone[0].weight.grad)

    split = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    split.load_state_dict(weights)
    parallelize_module(split, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    split(inputs).sum().backward()
    assert torch.allclose(split[0].weight.grad.full_tensor(), alone[0].weight.grad)

    whole = torch.arange(16.0).view(4, 4)
    assert torch.equal(distribute_tensor(whole, grid, [Shard(0), Shard(1)]).full_tensor(), whole)
    sharded(grid, weights, inputs, alone)
    torch.distributed.destroy_process_group()
    return f"{rank}"


def sharded(grid, weights, inputs, alone):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model.load_state_dict(weights)
    fully_shard(model, mesh=grid["dp"])
    model(inputs.clone()).clone().sum().backward()
    assert torch.allclose(model[0].weight.grad.full_tensor(), alone[0].weight.grad)


def abort(rank):
    comm = torchcomms.new_comm("gloo", CPU, "abort", True, timeout=timedelta(seconds=60))
    comm.barrier(False)
    if rank == 0:
        comm.recv(torch.empty(1), 1, False, timeout=timedelta(milliseconds=100))
    comm.recv(torch.empty(1), 0, False)


gc.collect()
gc.freeze()  # objects loaded before the fork are then not scanned and copied
for backend in ("gloo", "shm"):
    print(*launch(3, sums, backend)[1], sep="\n")
for backend in ("gloo", "shm"):
    print(*launch(2, death, backend)[1], sep="\n")
print(*launch(2, silence)[1][0], sep="\n")
for size in (3, 4):
    print(*launch(size, stuck, size)[1], sep="\n")
print(*launch(2, death_in_connecting)[1], sep="\n")
for size in (3, 4):
    print(*launch(size, death_in_rendezvous, size)[1], sep="\n")
for backend in ("gloo", "shm"):
    print(f"{backend} mesh: {len(launch(4, mesh, backend)[1])} ranks agree")
print("aborted:", launch(2, abort)[0][0])
sys.stdout.flush()
