"""Faults of ``easydist/comms``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "comms/comm.py",
        "TorchComm.split",
        "options = copy.copy(self._options)",
        "options = self._options",
        "tests/comms/test_new_comm.py::test_what_is_made_says_what_it_is",
    ),
    Mutant(
        "comms/comm.py",
        "TorchComm.finalize",
        "self._complete()",
        "pass",
        "tests/comms/test_bugs.py::test_finalize_completes_the_collectives_under_way",
    ),
    Mutant(
        "comms/failures.py",
        "later",
        "        vars(error).update(vars(first))\n",
        "",
        "tests/comms/test_bugs.py::test_a_timeout_says_who_and_is_raised_every_time",
    ),
    Mutant(
        "comms/headers.py",
        "is_asked",
        'hints["check"] == "1" if hints',
        "True if hints",
        "easydist/comms/headers.py",
    ),
    Mutant(
        "comms/statuses.py",
        "Statuses._is_waiting",
        " or not all(work.has_ended for work in works)",
        "",
        "tests/comms/test_disagreements.py::test_messages_over_gloo_that_differ",
    ),
    Mutant(
        "comms/window.py",
        "RegisteredWindow.wait_signal",
        "seen >= count",
        "seen == count",
        "tests/comms/test_window.py::test_signals_that_came_together_are_consumed_one_by_one",
    ),
    Mutant(
        "comms/signal_wait.py",
        "SignalWait.is_in_vain",
        "self._seen[rank] + 2",
        "self._seen[rank] + 1",
        "tests/comms/test_signal_wait.py",
    ),
    Mutant(
        "comms/environment.py",
        "rank_and_size",
        "0 <= rank < size",
        "0 <= rank <= size",
        "tests/comms/test_new_comm.py::test_without_a_launcher_the_error_says_what_to_set",
    ),
    Mutant(
        "comms/gloo_group.py",
        "_summing",
        '"rootRank", ',
        "",
        "tests/comms/test_device_mesh.py::test_fsdp_with_a_divide_factor",
    ),
    Mutant(
        "comms/making.py",
        "_arrived",
        "        with suppress(RuntimeError):\n            store.add(arrivals, -1, PATIENCE)\n",
        "",
        "tests/comms/test_new_comm.py::test_a_rank_that_does_not_come_is_named_and_the_next_attempt_works",
    ),
    Mutant(
        "comms/objcol.py",
        "_agreed",
        "len(set(lengths)) > 1",
        "lengths[0] != lengths[-1]",
        "tests/comms/test_objcol.py::test_a_fault_of_one_rank_is_raised_on_all_and_the_communicator_works_on",
    ),
    Mutant(
        "comms/operations.py",
        "Operations._watched",
        "tuple(self._hooks.before.values())",
        "self._hooks.before.values()",
        "tests/comms/test_new_comm.py::test_hooks_see_every_operation_and_trace_does",
    ),
    Mutant(
        "comms/regions.py",
        "Regions._check",
        " or len(set(counts)) > 1",
        "",
        "tests/comms/test_window.py::test_bounds_are_checked_and_sizes_agree",
    ),
    Mutant(
        "comms/batch.py",
        "BatchSendRecv._check",
        "peer != self._comm.get_rank()",
        "peer < self._comm.get_size()",
        "tests/comms/test_new_comm.py::test_wrong_arguments_are_refused_before_anything_is_sent",
    ),
]
