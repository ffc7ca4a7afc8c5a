"""The state of this process: its rank, its world and its process group."""

from easydist.state.process_state import (
    DistributedType,
    PartialState,
    ProcessState,
    communicators,
    together,
    wait_for_everyone,
)
from easydist.state.recovering import recover

__all__ = [
    "DistributedType",
    "PartialState",
    "ProcessState",
    "communicators",
    "recover",
    "together",
    "wait_for_everyone",
]
