"""Shared memory between the processes of one host."""

from easydist.shm.page import OwnPage, PeerPage, own_page
from easydist.shm.segment import Segment

__all__ = ["OwnPage", "PeerPage", "Segment", "own_page"]
