"""When a dump of all stacks has been written to its end."""

import contextlib
import faulthandler
import functools
import os
import signal
import tempfile
import threading

import pytest

import easydist
from easydist.testing import Stuck, default_pool, distributed
from easydist.testing.pool import is_whole


def failures(world_size, fn):
    with pytest.raises(Exception, match="ranks failed") as caught:
        default_pool().run(fn, world_size)
    return caught.value.exceptions


def dumped():
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        return os.pread(file.fileno(), 1 << 24, 0).decode()


def at_depth(depth, call):
    return at_depth(depth - 1, call) if depth else call()


def in_code_like_the_outermost_frame():
    names = {"dumped": dumped}
    exec(compile("dump = dumped()", "<string>", "exec"), names)
    return names["dump"]


def with_threads(count, depth, call):
    """Return the result of ``call`` while so many threads wait, each with a stack of that depth."""
    end, started = threading.Event(), threading.Barrier(count + 1)
    wait = functools.partial(at_depth, depth, lambda: started.wait() >= 0 and end.wait())
    threads = [threading.Thread(target=wait, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    started.wait()
    try:
        return call()
    finally:
        end.set()
        for thread in threads:
            thread.join()


DUMPS = {
    "one thread": (0, 0, dumped),
    "several threads": (5, 3, dumped),
    "deep threads": (3, 150, dumped),
    "all deep": (3, 150, lambda: at_depth(150, dumped)),
    "exec": (2, 3, in_code_like_the_outermost_frame),
    "more threads than are shown": (150, 3, dumped),
}


@pytest.mark.parametrize("name", DUMPS)
@distributed(world_size=1)
def test_a_dump_is_whole_at_its_end_and_not_before(name):
    first, dump = dumped().rpartition("\n\n")[2], with_threads(*DUMPS[name])  # in one line, so that both end alike
    lines = dump.splitlines(keepends=True)
    assert is_whole(dump, first)
    assert [n for n in range(len(lines)) if is_whole("".join(lines[:n]), first)] == []
    assert not is_whole(dump[:-1], first)
    assert dump.endswith("...\n") or not is_whole(dump, "")  # of a worker that has not come so far


def fail_or_wait(rank):
    if rank == 1:
        easydist.wait_for_everyone()
        raise ValueError("boom")
    with contextlib.suppress(easydist.EasydistError):  # rank 1 may have failed before this one has seen that all came
        easydist.wait_for_everyone()
    threading.Event().wait()


def get_stuck_with_threads(rank):
    """Ranks 0 and 2 get stuck with long stacks, once all have got so far; rank 1 fails."""
    with_threads(60, 80, functools.partial(fail_or_wait, rank))


def take_the_signal(rank):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as an event loop leaves it that handled the signal


def test_stacks_are_shown_after_a_task_that_took_the_signal(monkeypatch):
    monkeypatch.setattr("easydist.testing.pool.GRACE", 0.1)
    default_pool().run(take_the_signal, 2)
    error, stuck = failures(2, fail_or_wait)
    assert (type(error), type(stuck)) == (ValueError, Stuck)
    assert "in fail_or_wait" in stuck.__notes__[-1]


@pytest.mark.slow
def test_long_stacks_are_shown_to_their_end(monkeypatch):
    monkeypatch.setattr("easydist.testing.pool.GRACE", 0.1)
    for _ in range(3):
        _, *stuck = failures(3, get_stuck_with_threads)
        assert [type(error) for error in stuck] == [Stuck, Stuck]
        notes = [error.__notes__[-1] for error in stuck]
        assert [note.count(" in at_depth") for note in notes] == [60 * 81] * 2, notes
        assert all("in get_stuck_with_threads" in note.rpartition("\n\n")[2] for note in notes)
