"""The ranks of each group of a layout."""

import pytest

from easydist.parallel import rank_lists


def test_groups_along_each_axis_and_along_two():
    lists = rank_lists(8, {"dp": 2, "pp": 2, "tp": 2}, {"ep": ("dp", "tp")})
    assert lists == {
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "ep": [[0, 1, 4, 5], [2, 3, 6, 7]],
    }


@pytest.mark.parametrize("axes", [{"tp": 3}, {"pp": 2, "tp": 4}])
def test_a_layout_needs_as_many_ranks_as_there_are(axes):
    with pytest.raises(ValueError, match=r"a layout of .* needs \d+ ranks, but the world has 4"):
        rank_lists(4, axes)


def test_an_axis_has_at_least_one_rank():
    with pytest.raises(ValueError, match="at least one rank along each axis, got pp=0"):
        rank_lists(4, {"pp": 0, "tp": 4})
