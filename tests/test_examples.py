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
    for count in (3, 4):
        lines = on_ranks(count, "metrics_exactly_right.py").splitlines()
        assert [line.endswith("wrong") for line in lines[2:]] == 4 * [True] + 3 * [False]
        assert {line[30:] for line in lines[6:]} == {out.splitlines()[1][30:]}
