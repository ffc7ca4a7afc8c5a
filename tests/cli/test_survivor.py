"""The exit statuses of ranks in a launch with survivors."""

from easydist.cli.survivor import shell_status, statuses


def test_statuses_come_in_the_order_of_ranks(tmp_path):
    for rank, status in ((10, 1), (9, -9), (2, 0)):
        (tmp_path / str(rank)).write_text(str(status))
    assert [*statuses(str(tmp_path)).items()] == [(2, 0), (9, -9), (10, 1)]


def test_a_signal_is_an_exit_status_as_in_a_shell():
    assert [shell_status(status) for status in (0, 3, -9)] == [0, 3, 137]
