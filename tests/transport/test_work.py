"""Laws of operations under way, and of those of several steps that run one after another."""

import threading
from datetime import timedelta

import pytest

from easydist.transport.backends.hierarchical import RunQueue
from easydist.transport.work import TorchWork

SECOND = timedelta(seconds=1)


class Message:
    """Comes when it is waited for; notes with which time limits."""

    def __init__(self):
        self.limits = []

    def wait(self, *limits):
        self.limits += limits or [None]

    def is_completed(self):
        return bool(self.limits)


@pytest.mark.parametrize(("given", "limit"), [(None, None), (timedelta(0), None), (SECOND, SECOND)])
def test_no_time_limit_and_one_of_zero_are_the_communicators_own(given, limit):
    message, later = Message(), Message()
    TorchWork([message]).followed_by(lambda: [later]).within(given).wait()
    assert message.limits == later.limits == [limit]
    TorchWork([TorchWork([message]), TorchWork([later])]).within(given).wait()
    assert message.limits == later.limits == [limit] * 2


def test_an_operation_that_failed_fails_again_and_is_not_polled_for_ever():
    work = TorchWork().followed_by(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
        assert work.is_completed()


def test_steps_begin_in_the_order_of_the_operations_whichever_is_waited_for():
    begun = []

    def steps(number):
        for step in "ab":
            begun.append((number, step))
            yield TorchWork([Message()])

    line = RunQueue()
    works = [line.begin(steps(number)) for number in range(3)]
    assert begun == [(0, "a")]
    works[1].wait()
    assert begun == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [work.is_completed() for work in works] == [True, True, False]
    works[0].wait()
    works[2].wait()
    assert begun[4:] == [(2, "a"), (2, "b")]


class NotingLock:
    """A lock that notes each time when a thread has tried to take it at once."""

    def __init__(self):
        self._lock, self.tried = threading.Lock(), threading.Semaphore(0)
        self.release = self._lock.release

    def acquire(self, blocking=True):
        taken = self._lock.acquire(blocking=False)
        self.tried.release()
        return taken or (blocking and self._lock.acquire())


def test_an_operation_in_the_background_ends_even_if_another_thread_runs_those_before_it():
    arrival, end = threading.Event(), threading.Event()

    class Late(Message):
        def wait(self, *limits):
            assert arrival.wait(60)

    def steps():
        yield Message()
        end.set()

    line = RunQueue()
    line.lock = NotingLock()
    for parts in (iter([Late()]), steps()):
        work = line.begin(parts)
        assert line.lock.tried.acquire(timeout=60)
        work.in_background()
        assert line.lock.tried.acquire(timeout=60)
    arrival.set()
    assert end.wait(10)


def test_an_operation_that_fails_between_steps_ends_those_behind_it():
    def fail():
        yield TorchWork([Message()])
        raise ZeroDivisionError("in the middle")

    line = RunQueue()
    first, second = line.begin(fail()), line.begin(iter([TorchWork([Message()])]))
    with pytest.raises(ZeroDivisionError):
        first.wait()
    for call in (second.wait, lambda: line.begin(iter([]))):
        with pytest.raises(RuntimeError, match=r"^this communicator can no longer be used: in the middle$"):
            call()
    assert second.is_completed()
