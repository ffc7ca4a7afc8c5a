"""``GroupCoordinator`` under another path."""

from easydist.parallel import GroupCoordinator

__all__ = ["GroupCoordinator"]
