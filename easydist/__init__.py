"""A library that moves nested data between the processes of a PyTorch program: one call, any structure."""

import sys

import lazy_loader

from easydist.base import forks as _forks  # registers a hook that has to see every fork
from easydist.base.version import VERSION

__version__ = VERSION

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


_ELSEWHERE = {
    "Accelerator": "accelerate's own, beside easydist: easydist.accelerate.enable()",
    "GroupCoordinator": "easydist.parallel.GroupCoordinator",
    "MessageQueue": "easydist.queue.MessageQueue",
    "all_gather": "easydist.gather, of which every rank gets the result",
    "all_gather_object": "easydist.gather_object, of which every rank gets the result",
    "all_reduce": "easydist.reduce, of which every rank gets the result",
    "allgather": "easydist.gather, of which every rank gets the result",
    "allreduce": "easydist.reduce, of which every rank gets the result",
    "barrier": "easydist.wait_for_everyone",
    "bcast": "easydist.broadcast, or easydist.broadcast_object_list for objects",
    "broadcast_object": "easydist.broadcast_object_list",
    "device": "easydist.ProcessState().device",
    "distributed_loader": "easydist.metrics.distributed_loader",
    "get_rank": "easydist.ProcessState().process_index",
    "get_world_size": "easydist.ProcessState().num_processes",
    "init": "easydist.ProcessState, or nothing: the first call begins",
    "init_process_group": "easydist.ProcessState, or nothing: the first call begins",
    "is_main_process": "easydist.ProcessState().is_main_process",
    "local_rank": "easydist.ProcessState().local_process_index",
    "new_comm": "easydist.comms.new_comm",
    "new_group": "torch.distributed.new_group, and pass the group as group=",
    "num_processes": "easydist.ProcessState().num_processes",
    "print": "easydist.ProcessState().print",
    "process_index": "easydist.ProcessState().process_index",
    "rank": "easydist.ProcessState().process_index",
    "recv": "easydist.recv_tensor_dict or easydist.recv_object",
    "send": "easydist.send_tensor_dict or easydist.send_object",
    "size": "easydist.ProcessState().num_processes",
    "world_size": "easydist.ProcessState().num_processes",
}
"""Names of other libraries, and what stands for them here."""


def __getattr__(name: str) -> object:
    if name in __all__:
        return _load(name)
    hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])
