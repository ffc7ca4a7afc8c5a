import pytest
from slurm_cluster import missing, slurm_cluster


@pytest.fixture(scope="session")
def slurm():
    """A SLURM cluster of two nodes; tests that need it are skipped where SLURM is missing."""
    if reason := missing():
        pytest.skip(reason)
    with slurm_cluster() as cluster:
        yield cluster
