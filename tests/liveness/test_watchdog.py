"""The watchdog ends waits even if the process has no descriptors left, or the store holds values that mean nothing."""

import asyncio
import functools
import re
import signal
import sys
import threading
import time
from pathlib import Path

import launching
import pytest
from launching import within

from easydist.liveness import watchdog
from easydist.liveness.monitor import Monitor
from easydist.testing import distributed

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


def test_a_context_that_ctrl_c_has_kept_from_beginning_can_be_left():
    """A call leaves what it has made, also if the interrupt came before the first line of ``__enter__``."""
    before = signal.set_wakeup_fd(-1)
    try:
        watchdog.signals_wake_watchdog().__exit__(None, None, None)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)


@distributed(world_size=1)
def test_asyncio_hears_of_a_signal_that_comes_during_a_wait_in_cpp(rank):
    async def main():
        heard, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        with watchdog.signals_wake_watchdog():
            signal.raise_signal(signal.SIGUSR1)
        await asyncio.wait_for(heard.wait(), within(5))

    asyncio.run(main())


@distributed(world_size=1)
def test_groups_that_threads_make_at_once_have_entries_of_their_own_and_are_all_watched(rank):
    made, switches = [], sys.getswitchinterval()

    def make():
        for _ in range(100):
            made.append(monitor := Monitor(0, 2, 1.0))
            watchdog.watchdog().add(monitor)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switches)
    assert len({monitor.entry for monitor in made}) == len(made) == 300
    assert {*made} <= {*watchdog.watchdog().monitors()}


@distributed(world_size=1)
def test_signals_other_than_ctrl_c_cause_no_checks_between_those_of_each_quarter_second(rank):
    watched, looks, began = Monitor(0, 2, 1.0), [], time.monotonic()
    watched.publish = lambda: looks.append(None)
    watchdog.watchdog().add(watched)
    for _ in range(200):
        watchdog.watchdog().sync_signals()
    assert len(looks) <= (time.monotonic() - began) / 0.25 + 2
