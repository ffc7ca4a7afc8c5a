"""Faults of ``easydist/torch_backend``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup._all",
        "[one for one in self._batch if one not in works] + [combined]",
        "self._batch",
        "tests/torch_backend/test_process_group.py::test_a_coalesced_sum_of_sparse_tensors_is_written "
        "tests/torch_backend/test_process_group.py::test_nothing_is_held_after_the_end",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup._each",
        "(t.dense, root, op)",
        "(targets[0].dense, root, op)",
        "tests/torch_backend/test_differing_calls.py::test_each_tensor_of_a_list_is_compared",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup._begin",
        "None if isinstance(error, Exception) else error",
        "None",
        "tests/torch_backend/test_ends_of_groups.py::"
        "test_ctrl_c_as_an_operation_begins_is_told_to_a_rank_that_waits_in_it",
    ),
    Mutant(
        "torch_backend/methods.py",
        "show",
        'elif name == "allgather"',
        'elif name == "all_gather"',
        "tests/torch_backend/test_tools.py::test_communication_is_counted",
    ),
    Mutant(
        "torch_backend/methods.py",
        "_shown",
        "with torch_private.modes_disabled():",
        "if True:",
        "tests/torch_backend/test_tools.py::test_communication_is_counted",
    ),
    Mutant(
        "torch_backend/work.py",
        "GroupWork.wait",
        'event(self.operation, " (wait)")',
        "event(self.operation)",
        "tests/torch_backend/test_tools.py::test_a_profiler_shows_the_operations_and_their_waits",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup.reduce",
        "Filled(dense(t).clone(), filled=True)",
        "Filled(dense(t), filled=True)",
        "tests/torch_backend/test_process_group.py::test_reductions",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup.all_gather_single",
        "_fit(output, input, self.size())",
        "output.nbytes == self.size() * input.nbytes",
        "tests/torch_backend/test_process_group.py::test_operations_on_one_tensor "
        "tests/torch_backend/test_process_group.py::test_what_is_refused",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup._end_coalescing",
        "batch, self._batch = self._batch or [], None",
        "batch = self._batch or []",
        "tests/torch_backend/test_process_group.py::test_nothing_is_held_after_the_end "
        "tests/torch_backend/test_process_group.py::test_work_and_future",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup.renew",
        "self._under_way, self._is_closed, self._batch = [], False, None",
        "self._under_way, self._batch = [], None",
        "tests/torch_backend/test_ends_of_groups.py::test_a_group_is_renewed_in_place",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup.leave",
        "monitor.end(error is None and monitor.broken is None)",
        "error or monitor.end()",
        "tests/torch_backend/test_ends_of_groups.py::test_a_failed_operation_is_under_way_no_more",
    ),
    Mutant(
        "torch_backend/work.py",
        "GroupWork.__del__",
        "self._owner.hold(self)",
        "pass",
        "tests/torch_backend/test_training_on_shared_memory.py::test_ddp_join "
        "tests/torch_backend/test_pending.py::test_join_with_inputs_as_uneven_as_can_be",
    ),
    Mutant(
        "torch_backend/work.py",
        "Filled.__init__",
        " and not tensor.is_neg()",
        "",
        "tests/torch_backend/test_process_group.py::test_reductions",
    ),
    Mutant(
        "torch_backend/methods.py",
        "limited",
        "work.limit = limit_of(options)",
        "pass",
        "tests/torch_backend/test_process_group.py::test_the_limit_of_one_operation",
    ),
    Mutant(
        "torch_backend/methods.py",
        "_first_form",
        'key=lambda item: not item[0].startswith("output")',
        "key=lambda item: 0",
        "tests/torch_backend/test_process_group.py::test_the_second_forms_of_the_groups_own_methods",
    ),
    Mutant(
        "torch_backend/reductions.py",
        "add_up",
        "if (sizes[:, :-1] != sizes[0, :-1]).any():",
        "if False:",
        "tests/torch_backend/test_process_group.py::test_sparse_tensors_are_added_up",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup._senders",
        " or [*peers]",
        "",
        "tests/torch_backend/test_tagged_messages.py::test_a_message_of_any_rank_may_come_until_all_have_left",
    ),
    Mutant(
        "torch_backend/group.py",
        "SharedMemoryGroup._begin",
        "operation in _UNEVEN",
        "False",
        "tests/torch_backend/test_differing_calls.py -k late_one",
    ),
]
