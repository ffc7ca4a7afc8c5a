"""The examples print what the documentation says."""

import contextlib
import importlib
import io
import sys

import pytest
from launching import ROOT, python

from easydist.testing import default_pool


def on_ranks(count, example):
    """What an example prints on several ranks."""
    out, _ = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, ROOT / "examples" / example
    )
    return out


@pytest.mark.slow
def test_metrics_exactly_right():
    out = on_ranks(2, "metrics_exactly_right.py")
    assert out in (ROOT / "docs" / "tutorial_metrics.md").read_text()
    lines = on_ranks(3, "metrics_exactly_right.py").splitlines()
    assert [line.endswith("wrong") for line in lines[2:]] == 4 * [True] + 3 * [False]
    assert {line[30:] for line in lines[6:]} == {out.splitlines()[1][30:]}


def evaluate():
    """What examples/evaluate.py prints on this rank of a pool, which starts sooner than a launcher's ranks."""
    sys.path.insert(0, str(ROOT / "examples"))  # the pool sets the path of each run
    example = importlib.import_module("evaluate")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        example.main()
    return out.getvalue()


@pytest.mark.slow
def test_evaluate_gives_the_same_on_any_number_of_ranks():
    printed = [default_pool().run(evaluate, count)[0].splitlines() for count in (1, 2, 3, 4)]
    assert [lines[0] for lines in printed] == [
        "1 ranks, [599] images each",
        "2 ranks, [300, 299] images each",
        "3 ranks, [200, 200, 199] images each",
        "4 ranks, [150, 150, 150, 149] images each",
    ]
    assert printed[0][1:] == printed[1][1:] == printed[2][1:] == printed[3][1:]
    assert printed[0][-1] == "equal to the single-process run, to the last digit"
    assert on_ranks(2, "evaluate.py").splitlines() == printed[1]
