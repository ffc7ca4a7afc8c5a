"""Tools for tests of distributed code: real processes, started once, and a conformance test for communicators."""

from easydist.testing.conformance import check_comm
from easydist.testing.decorator import distributed
from easydist.testing.pool import Died, Pool, Stuck, default_pool

__all__ = ["Died", "Pool", "Stuck", "check_comm", "default_pool", "distributed"]
