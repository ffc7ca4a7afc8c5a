"""The threads that wait for messages in order: each ends with the group for which it waits."""

import gc
import threading

import launching

from easydist.liveness.background import in_line


class Owner:
    """A group."""


def test_a_thread_calls_in_order_and_ends_with_its_owner():
    owner, threads, done = Owner(), [], threading.Event()

    def drive():
        threads.append(threading.current_thread())
        if len(threads) == 3:
            done.set()

    for _ in range(3):
        in_line(owner, "to 1", drive)
    assert done.wait(launching.within(5))
    assert len(set(threads)) == 1
    del owner
    gc.collect()
    threads[0].join(launching.within(5))
    assert not threads[0].is_alive()
