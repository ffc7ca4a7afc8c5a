"""Ranks that are stopped at any moment of a call over gloo, and go on when the others have given it up."""

from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "stops.py"


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("seed", launching.sampled(range(2)))
def test_a_rank_that_was_stopped_never_hangs(seed):
    """One in 150 stops met a message that gloo had lost."""
    stops = launching.examples(10)
    out, _ = launching.forked(SCRIPT, 5, stops, seed, seconds=30 + 2 * stops, GLOO_SOCKET_IFNAME="lo")
    assert out == "well\n"
