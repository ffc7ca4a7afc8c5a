"""The exit statuses of ranks in a launch with survivors."""

from easydist.cli.survivor import statuses


def test_statuses_come_in_the_order_of_ranks(tmp_path):
    for rank, status in ((10, 1), (9, -9), (2, 0)):
        (tmp_path / str(rank)).write_text(str(status))
    assert [*statuses(str(tmp_path)).items()] == [(2, 0), (9, -9), (10, 1)]
