"""Results that several threads keep."""

import gc

from easydist.base.recent import Recent

MOST = 32


def test_a_result_may_be_kept_at_any_moment_of_another_thread():
    """A collection of garbage may drop a message, which starts a thread, and then other threads run."""
    kept, others = Recent(MOST), iter(range(1 << 30))

    def run_another_thread(phase, info):
        if phase == "stop":
            kept.keep(("other", next(others)), 0)

    threshold, *older = gc.get_threshold()
    gc.freeze()  # what other tests have left, which would be looked at each time
    for more in range(1, 2 * MOST):
        for key in range(MOST):
            kept.keep(("filled", more, key), 0)
        gc.collect()  # also drops the memory of former tuples, so that each new tuple brings the next collection nearer
        gc.callbacks.append(run_another_thread)
        gc.set_threshold(gc.get_count()[0] + more)
        try:
            kept.keep(more, more)
        finally:
            gc.set_threshold(threshold, *older)
            gc.callbacks.remove(run_another_thread)
        assert kept.find(more) == more
    gc.unfreeze()
