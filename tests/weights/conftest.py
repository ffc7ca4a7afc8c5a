import pytest
from actors import members
from launching import within


@pytest.fixture(scope="session")
def actors(cluster):
    """Four actors that no test ends; all have started."""
    import easydist.ray

    found = members(4)
    easydist.ray.create_group(found, "first", timeout=within(60))
    return found
