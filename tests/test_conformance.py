import pytest

from easydist.testing import check_comm
from easydist.testing.conformance import default_group, solo


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_communicator_over_the_default_group(world_size):
    check_comm(default_group, [world_size])


def test_solo():
    check_comm(solo, [1])
