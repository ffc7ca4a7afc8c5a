"""The state of this process: its rank, its world and its process group."""

from easydist.state.environment import DistributedType
from easydist.state.process_state import PartialState, ProcessState, communicators, wait_for_everyone
from easydist.state.recovering import recover
from easydist.state.together import together

__all__ = [
    "DistributedType",
    "PartialState",
    "ProcessState",
    "communicators",
    "recover",
    "together",
    "wait_for_everyone",
]
