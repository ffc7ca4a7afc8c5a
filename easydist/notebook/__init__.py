"""Many ranks from one notebook: ``cluster = easydist.notebook.start(4)``, then ``%%ranks`` in a cell."""

from easydist.notebook.cluster import Cluster
from easydist.notebook.failures import CellError, CellInterrupted, RankLostError
from easydist.notebook.launcher import notebook_launcher, start

__all__ = ["CellError", "CellInterrupted", "Cluster", "RankLostError", "notebook_launcher", "start"]
