"""Shared memory between the processes of one host."""

from easydist.shm.segment import Segment

__all__ = ["Segment"]
