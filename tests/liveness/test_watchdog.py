"""The watchdog ends waits even if the process has no descriptors left, or the store holds values that mean nothing."""

import functools
import re
from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "watchdog.py"
CASES = ["many/late", "many/interrupt", "none/late", "none/interrupt", "seen/late", "log/late", "log/interrupt"]


@functools.cache
def launched():
    """Return the outcome of the ranks of all cases."""
    return launching.launched(SCRIPT, CASES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_wait_ends_while_the_other_rank_stays_away(case):
    rows, statuses = launched()[case]
    assert statuses == [0, 0]
    assert rows[1]["released"], "rank 0 gave up only after rank 1 had ended"
    if case.endswith("interrupt"):
        assert rows[0]["type"] == "KeyboardInterrupt"
    elif case in ("many/late", "none/late"):
        assert rows[0]["type"] == "CollectiveTimeout"
        assert re.search(
            r"rank 1: missing; last seen in gather, call 2, .*; process \d+ on \S+ is alive", rows[0]["text"]
        )
    else:
        assert rows[0]["type"] in ("CollectiveTimeout", "RemoteError", "WireError"), rows[0]
