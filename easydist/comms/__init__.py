"""Communicators: torchcomms' API over gloo, NCCL and shared memory; ``new_comm`` makes one, ``wrap`` adopts a group."""

from easydist.comms import device_mesh, objcol
from easydist.comms.batch import BatchP2POptions, BatchSendRecv, P2POp, P2POpType
from easydist.comms.comm import TorchComm
from easydist.comms.failures import CommDisagreement, CommLeftOut, CommPeerLost, CommRemoteError, CommTimeout
from easydist.comms.hooks import HookArgs, RemovableHandle
from easydist.comms.making import Endpoint, register_backend
from easydist.comms.new_comm import new_comm, wrap
from easydist.comms.options import CommOptions
from easydist.comms.window import RegisteredWindow, SignalCmpOp, TorchCommWindow
from easydist.groups.communicators import Communicators
from easydist.groups.known import SOLO, of_comm, of_group
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo
from easydist.transport.backends.hierarchical import Hierarchical
from easydist.transport.backends.native import Native, over
from easydist.transport.backends.shm import Shm
from easydist.transport.backends.solo import Solo
from easydist.transport.reduce_op import RedOpType, ReduceOp, combine
from easydist.transport.work import TorchWork

__all__ = [
    "SOLO",
    "Backend",
    "BatchP2POptions",
    "BatchSendRecv",
    "CommDisagreement",
    "CommLeftOut",
    "CommOptions",
    "CommPeerLost",
    "CommRemoteError",
    "CommTimeout",
    "Communicators",
    "Endpoint",
    "Gloo",
    "Hierarchical",
    "HookArgs",
    "Native",
    "P2POp",
    "P2POpType",
    "RedOpType",
    "ReduceOp",
    "RegisteredWindow",
    "RemovableHandle",
    "Shm",
    "SignalCmpOp",
    "Solo",
    "TorchComm",
    "TorchCommWindow",
    "TorchWork",
    "combine",
    "device_mesh",
    "new_comm",
    "objcol",
    "of_comm",
    "of_group",
    "over",
    "register_backend",
    "wrap",
]


def __getattr__(name: str) -> object:
    hint = ""
    if name == "create_window":
        hint = ": use comm.window_allocate(window_size)"
    elif hasattr(TorchComm, name) and not name.startswith("_"):
        hint = f": it is a method, comm.{name}(…)"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)
