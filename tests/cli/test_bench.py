"""``easydist bench``: rows, JSON and the plot; the figures themselves are nobody's promise."""

import json

import pytest
from click.testing import CliRunner

from easydist.cli.bench import _summary, bench


def invoke(*arguments):
    said = CliRunner().invoke(bench, ["--seconds", "0.01", *arguments])
    return said.exit_code, said.stdout


@pytest.mark.slow
def test_the_table_and_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    status, said = invoke("--only", "gather 10 small", "--plot", str(tmp_path / "bench.svg"))
    assert status == 0
    (row,) = [line for line in said.splitlines() if "gather 10 small leaves" in line]
    assert row.split()[0] == "2"
    assert row.split()[9] == "accelerate"
    assert "gather 10 small leaves" in (tmp_path / "bench.svg").read_text()


@pytest.mark.slow
def test_json_and_several_world_sizes():
    status, said = invoke("--only", "gather 10 small", "--json", "-n", "2", "-n", "3")
    assert status == 0
    rows = json.loads(said)["rows"]
    assert [(row["ranks"], row["work"], row["peer"]) for row in rows] == [
        (size, "gather 10 small leaves", "accelerate") for size in (2, 3)
    ]
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in rows)


def test_a_ratio_is_the_peers_time_over_ours():
    row = _summary(2, ("gather", "gloo", [(1.0, 2.0), (2.0, 8.0), (1.0, 3.0)]))
    assert (row["least"], row["ratio"], row["most"], row["easydist"], row["theirs"]) == (2, 3, 4, 1, 3)


@pytest.mark.slow
def test_a_row_that_is_not_there_is_said():
    status, _ = invoke("--only", "no such row")
    assert status == 2


@pytest.mark.slow
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path):
    pytest.importorskip("matplotlib")
    for path, text in (("none/bench.svg", "there is no folder"), ("bench.txt", "matplotlib draws no .txt, but ")):
        said = CliRunner().invoke(bench, ["--plot", str(tmp_path / path)])
        assert (said.exit_code, text in said.output) == (2, True), said.output
    assert not list(tmp_path.iterdir())
