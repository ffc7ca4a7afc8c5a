"""Faults of ``easydist/agreement``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "agreement/calling.py",
        "calling._end",
        "if self._comms.monitor.untold is None:",
        "if True:",
        "tests/agreement/test_calling.py -k in_step --timeout 30",
    ),
    Mutant(
        "agreement/disagreement.py",
        "_lines",
        "if len(texts) <= SHOWN:",
        "if True:",
        "tests/agreement/test_agree.py::test_texts_of_a_large_group_do_not_grow_with_it",
    ),
    Mutant(
        "agreement/runner.py",
        "jointly",
        " or isinstance(error, DisagreementError)",
        "",
        "tests/agreement/test_nested_bodies.py",
    ),
    Mutant(
        "agreement/runner.py",
        "_leave",
        "with contextlib.suppress(DisagreementError):",
        "with contextlib.suppress(ZeroDivisionError):",
        "tests/agreement/test_nested_bodies.py",
    ),
    Mutant(
        "agreement/calling.py",
        "calling._begin",
        "if comms.left is not None:",
        "if comms.left is not None and self._is_call is None:",
        "tests/agreement/test_nested_bodies.py",
    ),
    Mutant(
        "agreement/agree.py",
        "_raise_together",
        'if 0 < one["body"] <= comms.bodies',
        'if 0 < one["body"] < comms.bodies',
        "tests/agreement/test_nested_bodies.py",
    ),
    Mutant(
        "agreement/call.py",
        "Call._whole",
        "return fingerprint((layout, self.tree.plain, self.devices))",
        "return layout",
        "tests/agreement/test_mismatch_matrix.py -k gather",
    ),
    Mutant(
        "agreement/frames.py",
        "_start",
        "8 * (sizes + sizes % 2)",
        "8 * sizes",
        "tests/agreement/test_agree.py::test_data_behind_any_number_of_sizes_starts_where_every_dtype_may",
    ),
    Mutant(
        "agreement/frames.py",
        "_folded",
        "most.sizes or most.payload or ",
        "",
        "tests/agreement/test_large_groups.py::test_results_are_those_of_a_small_group",
    ),
    Mutant(
        "agreement/frames.py",
        "Headers.of_well",
        "if status == WELL",
        "if status != FAULT",
        "tests/agreement/test_agree.py::test_a_default_device_does_not_matter",
    ),
    Mutant(
        "agreement/agree.py",
        "_raise_together",
        "del mine",
        "pass",
        "tests/agreement/test_runner.py -k keeps_no_data",
    ),
    Mutant(
        "agreement/agree.py",
        "_raise_together",
        "len(faults) == comms.size and len(",
        "len(",
        "tests/agreement/test_agree.py::test_the_original_error_is_the_cause_on_the_rank_that_failed",
    ),
    Mutant(
        "agreement/calling.py",
        "calling._other_rank",
        " or peer == self._comms.rank:",
        ":",
        "tests/verbs/test_object_pair.py::test_a_rank_that_is_no_other_rank_is_refused",
    ),
    Mutant(
        "agreement/runner.py",
        "_agreed",
        "monitor.is_awaited = True\n",
        "monitor.is_awaited = False\n",
        "tests/agreement/test_runner.py::"
        "test_a_rank_that_fails_before_its_data_moves_ends_the_call_for_all[shm-broadcast]",
    ),
    Mutant(
        "agreement/runner.py",
        "stream",
        '            comms.monitor.failed(RuntimeError("the loop over the stream was left before its end"))\n',
        "",
        "tests/weights/test_streams.py::"
        "test_a_loop_that_is_left_is_an_error_on_all_others_and_the_next_version_replaces_it",
    ),
    Mutant(
        "agreement/runner.py",
        "meet",
        "isinstance(fault, EasydistError) and fault.raised_in is comms.mark",
        "isinstance(fault, EasydistError)",
        "tests/state/test_main_process_first.py::test_an_error_of_another_group_is_told_to_the_others",
    ),
    Mutant(
        "agreement/notes.py",
        "Notes.tell",
        "_open.notes, self._around = self._around, None",
        "_open.notes, self._around = None, None",
        "tests/test_tracing.py::test_a_call_made_while_another_one_pickles_does_not_take_its_record",
    ),
    Mutant(
        "agreement/calling.py",
        "in_seconds",
        "timeout.total_seconds()",
        "timeout.seconds",
        "tests/queue/test_queue.py::test_a_timeout_may_be_days_or_parts_of_a_second",
    ),
]
