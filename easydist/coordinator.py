"""Another import path for ``GroupCoordinator``."""

from easydist.parallel import GroupCoordinator

__all__ = ["GroupCoordinator"]
