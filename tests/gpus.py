"""Groups over NCCL whose ranks may share one GPU, and trees and streams of a GPU."""

import contextlib
import os
import warnings

import pytest
import torch
import torch.distributed as dist

import easydist
from easydist import ProcessState, tree

NEEDED = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

MIXED = "cpu:gloo,cuda:nccl"
"""The backend that ``ProcessState`` plans on a machine with a GPU."""

SHARING = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def on_groups(*groups):
    """Run a test for each of these backends and world sizes."""
    return pytest.mark.parametrize(("backend", "world_size"), groups, ids=str)


def share():
    """Let NCCL take this process for a host of its own: it refuses two ranks of one host on the same GPU."""
    os.environ.update(SHARING, NCCL_HOSTID=f"process-{os.getpid()}")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def use(backend=MIXED):
    """Replace the default group of this worker by one of this backend."""
    if backend == "gloo":
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(backend, dist.group.WORLD.get_group_store())
    dist.barrier()  # nobody leaves the old group while others are still making it
    dist.destroy_process_group()
    ProcessState._reset_state()
    share()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def to_gpu(data):
    """Return the tree with its tensors on the GPU, and all else as it is."""
    return tree.map(lambda leaf: _moved(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def _moved(tensor):
    moved = tensor.detach().cuda()
    kept = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(moved) if kept else moved.requires_grad_(tensor.requires_grad)


def to_cpu(data):
    """Return the tree with its tensors on the CPU."""
    return tree.map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, data)


def devices(data):
    """Return the device types of the tensors, in the order of the leaves."""
    return [leaf.device.type for leaf in tree.leaves(data) if isinstance(leaf, torch.Tensor)]


def outcome(call):
    """Return the result of a call, or the type of its error."""
    try:
        return call()
    except (easydist.EasydistError, ValueError, TypeError, OverflowError) as error:
        return type(error).__name__


def busy(cycles=300_000_000):
    """Keep the current stream busy for about 0.2 s."""
    torch.cuda._sleep(cycles)


@contextlib.contextmanager
def own_stream():
    """Run a block on a stream of its own, which does not wait for the default one, nor the other way round."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


@contextlib.contextmanager
def never_waiting():
    """Let each operation of torch that makes the CPU wait for the GPU raise an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
