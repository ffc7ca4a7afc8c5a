import pytest
from actors import members
from launching import within


@pytest.fixture(scope="session")
def trio(cluster):
    """Three actors that no test ends."""
    return members(3)


@pytest.fixture(scope="session")
def actors(trio):
    """Four actors that no test ends; all have started."""
    import easydist.ray

    found = [*trio, *members(1)]
    easydist.ray.create_group(found, "first", timeout=within(60))
    return found
