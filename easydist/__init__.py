"""A library that moves nested data between the processes of a PyTorch program: one call, any structure."""

import sys

import lazy_loader

from easydist.base import forks as _forks  # registers a hook that has to see every fork

__version__ = "0.1.0.dev0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


_ELSEWHERE = {
    "all_gather": "easydist.gather, of which every rank gets the result",
    "all_gather_object": "easydist.gather_object, of which every rank gets the result",
    "all_reduce": "easydist.reduce, of which every rank gets the result",
    "barrier": "easydist.wait_for_everyone",
    "get_rank": "easydist.ProcessState().process_index",
    "get_world_size": "easydist.ProcessState().num_processes",
    "init": "easydist.ProcessState, or nothing: the first call begins",
    "init_process_group": "easydist.ProcessState, or nothing: the first call begins",
    "rank": "easydist.ProcessState().process_index",
    "recv": "easydist.recv_tensor_dict or easydist.recv_object",
    "send": "easydist.send_tensor_dict or easydist.send_object",
    "world_size": "easydist.ProcessState().num_processes",
}
"""Names of other libraries, and what stands for them here."""


def __getattr__(name: str) -> object:
    if name in __all__:
        return _load(name)
    hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])
