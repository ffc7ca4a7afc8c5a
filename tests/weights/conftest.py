import pytest
from actors import members, private_cluster
from launching import within


@pytest.fixture(scope="session")
def cluster():
    """One Ray for all tests of this process."""
    with private_cluster() as made:
        yield made


@pytest.fixture(scope="session")
def actors(cluster):
    """Four actors that no test ends; all have started."""
    import easydist.ray

    found = members(4)
    easydist.ray.create_group(found, "first", timeout=within(60))
    return found
