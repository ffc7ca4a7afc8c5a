"""The pool, the decorator and the battery: they tell the truth about what is broken, and go on working."""

import importlib.util
import os
import signal
import sys
import threading
import time
import types
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

import easydist
from easydist.testing import Died, Pool, Stuck, default_pool, distributed

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


class Odd(Exception):
    """Does not travel."""

    def __init__(self, text):
        super().__init__(text)
        self.text = lambda: text


def failures(world_size, fn, *args, **kwargs):
    """Return the errors of the ranks, in order."""
    with pytest.raises(ExceptionGroup) as caught:
        default_pool().run(fn, world_size, *args, **kwargs)
    errors = caught.value.exceptions
    assert caught.value.message == f"{len(errors)} of {world_size} ranks failed"
    return errors


class OneWay:
    """Cannot be decoded outside of the process that made it."""

    def __init__(self, pid=None):
        if pid not in (None, os.getpid()):
            raise ValueError("made in another process")

    def __reduce__(self):
        return OneWay, (os.getpid(),)


def after_a_while(value):
    time.sleep(1)
    return value


@pytest.mark.slow
def test_a_run_that_was_broken_off_leaves_no_outcomes_for_the_next():
    with Pool() as pool:
        timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
        pool.run(len, 2, "ready")
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(after_a_while, 2, "old")
        assert pool.run(len, 2, "new") == [3, 3]
        with pytest.raises(ValueError, match="made in another process"):
            pool.run(OneWay, 2)
        assert pool.run(len, 2, "newer") == [5, 5]


@pytest.mark.slow
def test_ctrl_c_between_runs_is_not_for_the_ranks():
    with Pool() as pool:
        pids = pool.run(os.getpid, 2)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert pool.run(os.getpid, 2) == pids
        for error in failures(2, signal.raise_signal, signal.SIGINT):
            assert str(error) == "KeyboardInterrupt: "


@pytest.mark.slow
def test_a_process_that_ends_between_runs_is_replaced_with_a_warning():
    with Pool() as pool:
        pids = pool.run(os.getpid, 2)
        os.kill(pids[0], signal.SIGKILL)
        pool._workers[0]._process.join()
        with pytest.warns(RuntimeWarning, match="the process ended with exit code -9 after its last run, which may"):
            again = pool.run(os.getpid, 2)
        assert again[0] == pids[1]


def rank_and_size(rank, world_size):
    return rank, world_size, dist.get_rank(), dist.get_world_size()


def fail_on(where, error, rank):
    if rank in where:
        raise error
    return rank


def fail_while_others_wait(rank):
    if rank == 1:
        raise ValueError("the cause")
    easydist.wait_for_everyone()


def block_each_other(end, rank):
    """Ranks 0 and 2 wait for each other, and do not notice how rank 1 ends."""
    if rank == 1:
        end()
    dist.recv(torch.zeros(1), src=2 - rank)


def raise_value_error():
    raise ValueError("boom")


def block():
    threading.Event().wait()


def exit_without_a_word():
    os._exit(3)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with_a_bare_assertion(rank):
    answer = 40 + rank
    assert answer < 41


def return_a_lambda():
    return lambda: 0


def skip_on(where, rank):
    if rank == where:
        pytest.skip("no such thing here")


def warn():
    warnings.warn("be careful", UserWarning, stacklevel=1)


def break_the_group(rank):
    """Leave rank 0 without a group, as a failed ``init_process_group`` does."""
    if rank == 0:
        dist.destroy_process_group()
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.1)
            )


def do_nothing():
    pass


def works(world_size=3):
    return default_pool().run(rank_and_size, world_size) == [(r, world_size, r, world_size) for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_run_returns_what_each_rank_returned(ranks, world_size):
    assert ranks is default_pool()
    assert works(world_size)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError)])
def test_a_run_needs_a_rank(size, error):
    """A test on no ranks would pass."""
    with pytest.raises(error, match=f"world_size={size!r}"):
        distributed(world_size=[size])(do_nothing)(world_size=size)


def test_arguments_without_a_parameter_are_refused():
    for error in failures(2, rank_and_size, 1, 2):
        assert "has no parameters for 2 of 2 arguments" in str(error)


def test_workers_stay():
    assert default_pool().run(os.getpid, 3) == default_pool().run(os.getpid, 3)


def test_a_forked_child_gets_a_pool_of_its_own_and_leaves_its_parents_alone(monkeypatch):
    with Pool() as parents:
        monkeypatch.setattr("easydist.testing.pool._default", parents)
        assert default_pool() is parents
        with monkeypatch.context() as child:
            child.setattr(parents, "_owner", os.getppid())
            parents.close()
            assert Path(parents._folder.name).exists()
            with default_pool() as own:
                assert own is not parents
                assert default_pool() is own
        assert not Path(own._folder.name).exists()


@pytest.mark.parametrize(("given", "told"), [({}, None), ({"timeout": 2.5}, 2.5)])
def test_the_decorator_passes_its_time_limit_on(monkeypatch, given, told):
    seen = []
    monkeypatch.setattr(Pool, "run_with", lambda self, fn, size, *options: seen.append((size, *options)))
    distributed(world_size=3, **given)(do_nothing)()
    assert seen == [(3, (), {}, told)]


@pytest.mark.slow
def test_two_pools_share_nothing():
    with Pool() as pool:
        assert not set(pool.run(os.getpid, 2)) & set(default_pool().run(os.getpid, 2))


def test_a_failure_carries_its_rank_and_traceback():
    (error,) = failures(3, fail_on, [1], ValueError("boom"))
    assert isinstance(error, ValueError)
    assert str(error) == "boom"
    assert error.__notes__[-1].startswith("on rank 1 of 3:\nTraceback")
    assert "in fail_on\n    raise error" in error.__notes__[-1]
    assert works()


def test_all_failures_are_raised_together():
    errors = failures(4, fail_on, [0, 2, 3], KeyError("k"))
    assert sorted(error.__notes__[-1][:12] for error in errors) == ["on rank 0 of", "on rank 2 of", "on rank 3 of"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_cause_comes_before_what_follows_from_it(world_size):
    for _ in range(4):
        assert str(failures(world_size, fail_while_others_wait)[0]) == "the cause"
    assert works()


@pytest.mark.slow
def test_ranks_that_never_talk_do_not_disturb_each_other():
    for _ in range(40):
        default_pool().run(do_nothing, 4)


@pytest.mark.slow
def test_a_group_that_was_not_made_leaves_no_trace():
    default_pool().run(break_the_group, 2)
    assert default_pool().run(rank_and_size, 2, timeout=5) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_a_bare_assertion_shows_the_values_in_it():
    (error,) = failures(2, fail_with_a_bare_assertion)
    assert "answer = 41" in error.__notes__[-1]


@pytest.mark.slow
def test_stuck_ranks_are_shown_with_their_stacks():
    first, *others = failures(3, block_each_other, raise_value_error)
    assert str(first) == "boom"
    assert [type(error) for error in others] == [Stuck, Stuck]
    assert sorted(map(str, others)) == ["rank 0 did not end", "rank 2 did not end"]
    assert all("in block_each_other" in error.__notes__[-1] for error in others)
    assert works()


@pytest.mark.slow
def test_ranks_get_the_time_that_the_caller_says():
    errors = failures(3, block_each_other, block, timeout=0.5)
    assert [type(error) for error in errors] == [Stuck, Stuck, Stuck]
    assert works()


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [(exit_without_a_word, 3), (kill_itself, -signal.SIGKILL)])
def test_a_rank_that_dies_is_named(end, code):
    first, *others = failures(3, block_each_other, end)
    assert isinstance(first, Died)
    assert str(first) == f"the process ended with exit code {code}"
    assert first.__notes__[-1].startswith("on rank 1 of 3:")
    assert [type(error) for error in others] == [Stuck, Stuck]
    assert works()


@pytest.mark.slow
def test_a_rank_that_dies_among_ranks_that_end_is_the_only_failure():
    (error,) = failures(1, exit_without_a_word)
    assert isinstance(error, Died)
    assert works()


@pytest.mark.parametrize("where", [0, 1])
def test_a_skip_on_a_rank_is_a_skip(where):
    with pytest.raises(pytest.skip.Exception, match="no such thing here"):
        default_pool().run(skip_on, 2, where)
    assert works()


def end_one_after_another(ends, rank):
    """Rank 1 ends when rank 0 has been heard, and leaves the group."""
    if rank:
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), src=0)
    ends[rank]()


def skip():
    pytest.skip("not here")


def expect_a_failure():
    pytest.xfail("known")


def skip_as_unittest_does():
    raise unittest.SkipTest("not here")


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ((skip_as_unittest_does, do_nothing), pytest.skip.Exception("not here")),
        ((expect_a_failure, do_nothing), pytest.xfail.Exception("known")),
        ((expect_a_failure, skip), pytest.xfail.Exception("known")),
        ((skip, raise_value_error), pytest.skip.Exception("not here")),  # it may have waited for the one that left
    ],
)
def test_what_the_first_rank_says_of_the_test_holds(ends, error):
    with pytest.raises(type(error), match=str(error)):
        default_pool().run(end_one_after_another, 2, ends)


def test_a_skip_does_not_hide_an_earlier_failure():
    with pytest.raises((ExceptionGroup, pytest.skip.Exception)) as caught:
        default_pool().run(end_one_after_another, 2, (raise_value_error, skip))
    assert [(type(error), str(error)) for error in caught.value.exceptions] == [(ValueError, "boom")]


def test_warning_filters_travel():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default_pool().run(warn, 2)
        warnings.filterwarnings("error", message="be care", category=UserWarning)
        assert [type(error) for error in failures(2, warn)] == [UserWarning, UserWarning]


def test_what_does_not_travel_comes_as_text():
    (error,) = failures(2, raise_odd)
    assert isinstance(error, RuntimeError)
    assert str(error) == "Odd: strange"
    assert len(failures(2, return_a_lambda)) == 2
    assert len(failures(2, raise_system_exit)) == 2
    assert works()


def raise_odd(rank):
    if rank == 0:
        raise Odd("strange")


def raise_system_exit():
    raise SystemExit(2)


def test_monkeypatch_is_refused(monkeypatch):
    """It would change the ranks' processes for all tests to come."""
    with pytest.raises(TypeError, match=r"^patch= belongs to the process of pytest"):
        distributed(world_size=2)(lambda patch: None)(patch=monkeypatch)


def test_an_async_function_is_refused():
    """Nobody would await it."""

    async def waits():
        pass

    with pytest.raises(TypeError, match="@distributed: waits is async; make it a function that calls"):
        distributed(world_size=2)(waits)


def test_a_local_function_is_refused():
    def local():
        pass

    text = "local cannot be imported by other processes: define it at the top of its module"
    with pytest.raises(ValueError, match=text):
        default_pool().run(local, 2)
    with pytest.raises(ValueError, match="cannot be imported by other processes"):
        default_pool().run(lambda: None, 2)
    assert works()


def test_arguments_that_do_not_travel_are_named_and_leave_the_pool_working():
    with pytest.raises(TypeError, match=r"^argument 1 cannot be pickled, so it cannot be sent to the ranks: .*lambda"):
        default_pool().run(fail_on, 2, [], lambda: None)
    with pytest.raises(TypeError, match=r"^lock= cannot be pickled"):
        default_pool().run(do_nothing, 2, lock=threading.Lock())
    assert works()


def test_an_argument_that_cannot_be_decoded_is_an_error_of_the_ranks():
    for error in failures(2, len, OneWay(os.getpid())):
        assert (type(error), str(error)) == (ValueError, "made in another process")
        assert "in __init__" in error.__notes__[-1]


def test_a_module_that_was_imported_by_its_file(tmp_path, monkeypatch):
    """As pytest does with --import-mode=importlib, which leaves sys.path as it is."""
    file = tmp_path / "aside" / "sized.py"
    file.parent.mkdir()
    file.write_text("from aside import other\ndef size(world_size):\n    return world_size, other.__name__")
    file.with_name("other.py").touch()
    monkeypatch.setitem(sys.modules, "aside", types.SimpleNamespace(other=None))
    spec = importlib.util.spec_from_file_location("aside.sized", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "aside.sized", module)
    spec.loader.exec_module(module)
    assert default_pool().run(module.size, 2) == [(2, "aside.other")] * 2


@distributed(world_size=(1, 2))
def test_the_body_runs_on_every_rank(rank, world_size):
    assert easydist.gather_object([rank]) == list(range(world_size))


@pytest.mark.parametrize("factor", [2, 3])
@distributed(world_size=(2, 3))
def test_fixtures_and_parameters_reach_every_rank(rank, world_size, factor, tmp_path):
    (tmp_path / str(rank)).write_text(str(factor * rank))
    easydist.wait_for_everyone()
    assert [(tmp_path / str(r)).read_text() for r in range(world_size)] == [str(factor * r) for r in range(world_size)]


class TestMethods:
    """Methods are tests like functions, with what their fixtures have set."""

    @pytest.fixture(autouse=True)
    def prepare(self):
        self.offset = 7

    @distributed(world_size=(1, 2))
    def test_a_method_runs_on_every_rank(self, rank, world_size):
        assert easydist.gather_object([self.offset + rank]) == [7 + r for r in range(world_size)]


@pytest.mark.parametrize(("timeout", "fn", "args"), [(0.001, 2, 3)])
@distributed(world_size=2)
def test_parameters_may_have_any_name(timeout, fn, args):
    assert (timeout, fn, args) == (0.001, 2, 3)


@settings(max_examples=10, deadline=None)
@given(value=st.lists(st.integers()))
@distributed(world_size=2)
def test_all_ranks_see_the_same_example(value):
    assert easydist.gather_object((value,)) == [(value,)] * 2


@pytest.mark.slow
def test_a_property_that_does_not_hold_is_shrunk():
    with pytest.raises(ExceptionGroup) as caught:
        small_numbers_only()
    assert "number=10" in "\n".join(caught.value.__notes__)


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(number=st.integers(0, 1000))
@distributed(world_size=2)
def small_numbers_only(rank, number):
    assert number < 10 or rank == 0
