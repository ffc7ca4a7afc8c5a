"""Communicators: ``TorchComm``, torchcomms' API, over a ``Backend`` that moves the bytes."""

from easydist.comms.backend import Backend
from easydist.comms.c10d import Gloo, Native, over
from easydist.comms.comm import TorchComm
from easydist.comms.communicators import SOLO, Communicators, of_comm, of_group
from easydist.comms.hierarchical import Hierarchical
from easydist.comms.reduce_op import RedOpType, ReduceOp, combine
from easydist.comms.shm import Shm
from easydist.comms.solo import Solo
from easydist.comms.work import TorchWork

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
