"""The examples print what the documentation says."""

import pytest
from launching import ROOT, python


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


@pytest.mark.slow
def test_evaluate_gives_the_same_on_any_number_of_ranks():
    printed = [on_ranks(count, "evaluate.py").splitlines() for count in (1, 2, 3)]
    assert [lines[0] for lines in printed] == [
        "1 ranks, [599] images each",
        "2 ranks, [300, 299] images each",
        "3 ranks, [200, 200, 199] images each",
    ]
    assert printed[0][1:] == printed[1][1:] == printed[2][1:]
    assert printed[0][-1] == "equal to the single-process run, to the last digit"


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_ranks_compute_what_one_process_does():
    assert on_ranks(4, "tensor_parallel.py") == "tensor 2 × pipeline 2: equal to one process True\n"
