"""Groups over NCCL whose ranks may share one GPU, and trees and streams of a GPU."""

import contextlib
import os
import warnings

import pytest
import simulated
import torch
import torch.distributed as dist

import easydist
from easydist import ProcessState, tree

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")
NEEDED = [
    pytest.mark.gpu,
    needs_cuda,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
"""The marks of tests that need CUDA."""

if simulated.IS_WANTED:
    simulated.register()

GPU, NATIVE = (simulated.NAME, simulated.NAME) if simulated.IS_WANTED else ("cuda", "nccl")
"""The type of device, and the backend that connects such devices."""

ON_ANY = NEEDED if GPU == "cuda" else [pytest.mark.gpu]
"""The marks of tests that a simulated GPU can run, too."""

MIXED = f"cpu:gloo,{GPU}:{NATIVE}"
"""The backend that ``ProcessState`` plans on a machine with a GPU."""

SHARING = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def on_groups(*groups):
    """Run a test for each of these backends and world sizes."""
    return pytest.mark.parametrize(("backend", "world_size"), groups, ids=str)


def share():
    """Let NCCL take this process for a host of its own: it refuses two ranks of one host on the same GPU."""
    if GPU != "cuda":
        return
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
    moved = tensor.detach().to(GPU)
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
    if GPU == "cuda":
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def own_stream():
    """Run a block on a stream of its own, which does not wait for the default one, nor the other way round."""
    if GPU != "cuda":  # it has only one
        yield torch.accelerator.current_stream()
        return
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
