"""Who am I, and with whom do I talk."""

from easydist.state.process_state import (
    DistributedType,
    PartialState,
    ProcessState,
    communicators,
    together,
    wait_for_everyone,
)

__all__ = ["DistributedType", "PartialState", "ProcessState", "communicators", "together", "wait_for_everyone"]
