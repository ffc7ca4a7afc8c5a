"""Communicators: ``TorchComm``, torchcomms' API, over a ``Backend`` that moves the bytes."""

from easydist.groups.communicators import SOLO, Communicators, of_comm, of_group
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo, Native, over
from easydist.transport.backends.hierarchical import Hierarchical
from easydist.transport.backends.shm import Shm
from easydist.transport.backends.solo import Solo
from easydist.transport.comm import TorchComm
from easydist.transport.reduce_op import RedOpType, ReduceOp, combine
from easydist.transport.work import TorchWork

__all__ = [
    "SOLO",
    "Backend",
    "Communicators",
    "Gloo",
    "Hierarchical",
    "Native",
    "RedOpType",
    "ReduceOp",
    "Shm",
    "Solo",
    "TorchComm",
    "TorchWork",
    "of_comm",
    "of_group",
    "combine",
    "over",
]
