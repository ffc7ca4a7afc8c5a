"""Objects from one writer to many readers, through shared memory and TCP."""

from easydist.queue.end import Handle
from easydist.queue.queue import MessageQueue

__all__ = ["Handle", "MessageQueue"]
