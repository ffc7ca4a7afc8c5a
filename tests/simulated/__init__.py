"""A simulated GPU for machines without one: a device whose memory the CPU cannot touch, and collectives on it.

It shows whether code for an accelerator keeps to torch's operations, and waits for what it has begun. Speed, streams,
graphs and NCCL itself need a real one.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

from easydist.comms import making
from easydist.transport.backends.native import Native

NAME = "simulated"
"""The name of the type of device, and of the backend that connects such devices."""

IS_WANTED = (
    bool(os.environ.get("SIMULATED_GPU"))
    and not torch.cuda.is_available()
    and all(map(shutil.which, ("c++", "ninja")))  # which build it
)
_SOURCE = Path(__file__).with_name("device.cpp")
_MODULE = "simulated_device"


def register():
    """Make the device known to torch in this process; the first one builds it, in half a minute."""
    if hasattr(torch, NAME):
        return
    library = _built()
    spec = importlib.util.spec_from_file_location(_MODULE, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    dist.Backend.register_backend(NAME, module.collectives, devices=[NAME])
    making._nccl = lambda endpoint, *_: _backend(module.collectives, endpoint)  # what new_comm("nccl", …) makes


def _backend(collectives, endpoint):
    """Return the backend of a communicator."""
    device, told = torch.device(NAME, 0), (endpoint.store, endpoint.rank, endpoint.size)
    group = dist.ProcessGroup(*told)
    group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, collectives(*told, endpoint.timeout))
    return Native(group, device, NAME)


def _built():
    """Return the library; one process builds it, and the others wait."""
    from torch.utils import cpp_extension

    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]  # checkouts share the folder of all builds
    name = f"{_MODULE}-{torch.__version__}-{sys.version_info.minor}-{source}"
    folder = Path(cpp_extension.get_default_build_root(), name)
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_MODULE}.so"
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            flags = ["-O1", "-std=c++20"]
            cpp_extension.load(_MODULE, [str(_SOURCE)], extra_cflags=flags, build_directory=str(folder))
    return library


def _device_module():
    """Return ``torch.simulated``."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.manual_seed_all = lambda _: None
    module._is_in_bad_fork = lambda: False
    return module
