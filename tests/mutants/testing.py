"""Faults of ``easydist/testing``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "testing/pool.py",
        "Pool.run_with",
        "            self._restart()\n            raise\n",
        "            raise\n",
        "tests/testing/test_testing.py::test_a_run_that_was_broken_off_leaves_no_outcomes_for_the_next",
    ),
    Mutant(
        "testing/pool.py",
        "default_pool",
        " or _default._owner != os.getpid()",
        "",
        "tests/testing/test_testing.py::test_a_forked_child_gets_a_pool_of_its_own_and_leaves_its_parents_alone",
    ),
    Mutant(
        "testing/worker.py",
        "_apply",
        "in reversed(filters)",
        "in filters",
        "tests/testing/test_testing.py::test_warning_filters_travel",
    ),
    Mutant(
        "testing/worker.py",
        "_outcome",
        "torch_groups.set_count(0)",
        "torch_groups.count()",
        "tests/testing/test_testing.py::test_a_group_that_was_not_made_leaves_no_trace",
    ),
    Mutant(
        "testing/decorator.py",
        "distributed",
        "size, (), given, timeout)",
        "size, (), given)",
        "tests/testing/test_testing.py::test_the_decorator_passes_its_time_limit_on",
    ),
    Mutant(
        "testing/pool.py",
        "is_whole",
        "is_main and thread.endswith",
        "bool(main) and thread.endswith",
        "tests/testing/test_stacks.py::test_a_dump_is_whole_at_its_end_and_not_before",
    ),
    Mutant(
        "testing/conformance.py",
        "run_battery",
        "        _gather,\n",
        "",
        "tests/testing/test_broken_communicators.py::test_the_battery_looks_at_the_result_of_every_operation",
    ),
    Mutant(
        "testing/cases.py",
        "wanted",
        "(1000 * rank + numel) * 4099",
        "numel * 4099",
        "tests/testing/test_broken_communicators.py::test_the_battery_catches_a_broken_one",
    ),
    Mutant(
        "testing/pool.py",
        "Pool.close",
        "if os.getpid() == self._owner:",
        "if True:",
        "tests/testing/test_testing.py::test_a_forked_child_gets_a_pool_of_its_own_and_leaves_its_parents_alone",
    ),
    Mutant(
        "testing/conformance.py",
        "_barrier",
        "times[::2].max() <= times[1::2].min()",
        "True",
        "tests/testing/test_broken_communicators.py::test_the_battery_catches_a_broken_one",
    ),
    Mutant(
        "testing/worker.py",
        "work",
        "multiprocessing.current_process().daemon = False",
        "multiprocessing.current_process()",
        "tests/metrics/test_loader.py::test_workers_give_the_same",
    ),
    Mutant(
        "testing/pool.py",
        "_raise",
        "verdict := failures[0][1].error, Verdict",
        "verdict := failures[-1][1].error, Verdict",
        "tests/testing/test_testing.py::test_a_skip_does_not_hide_an_earlier_failure",
    ),
    Mutant(
        "testing/worker.py",
        "_interruptible",
        "signal.SIG_IGN)",
        "signal.SIG_DFL)",
        "tests/testing/test_testing.py::test_ctrl_c_between_runs_is_not_for_the_ranks",
    ),
]
