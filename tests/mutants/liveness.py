"""Faults of ``easydist/liveness``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "liveness/page.py",
        "OwnPage.new_entry",
        "max(self._words[_USED], entry + 1)",
        "entry + 1",
        "tests/liveness/test_leaving.py::test_an_entry_tells_of_its_group_until_there_is_no_other",
    ),
    Mutant(
        "liveness/page.py",
        "OwnPage.end",
        "        if is_done:\n            self._words[(start >> 3) + 1] = 0\n",
        "        self._words[(start >> 3) + 1] = 0\n",
        "tests/groups/test_in_step.py::test_calls_stay_in_step_after_a_failure_that_some_do_not_notice",
    ),
    Mutant(
        "liveness/peer.py",
        "by_host",
        "if all(shares for",
        "if any(shares for",
        "tests/transport/test_hierarchical.py::test_without_shared_memory_on_one_rank_all_go_through_gloo",
    ),
    Mutant(
        "liveness/report.py",
        "Report.is_about",
        "self.left <= number",
        "self.left < number",
        "tests/liveness/test_report.py::test_a_rank_that_has_left_a_call_is_heard_while_it_fails_in_later_ones",
    ),
    Mutant(
        "liveness/rules.py",
        "CallProtocol._end_of",
        "why is Why.LEFT and self.peer is not None",
        "self.peer is not None",
        "tests/liveness/test_leaving.py::test_data_that_a_rank_has_posted_is_waited_for_though_it_has_left",
    ),
    Mutant(
        "liveness/signed.py",
        "Seal._signature",
        'key.encode() + b"\\0" + text',
        "text",
        "tests/liveness/test_signed.py::test_a_changed_or_moved_value_is_refused",
    ),
    Mutant(
        "liveness/timed_store.py",
        "TimedStore.append",
        "self._ask(append, is_lasting=True)",
        "self._ask(append)",
        "tests/liveness/test_timed_store.py",
    ),
    Mutant(
        "liveness/bodies.py",
        "message",
        "[next(_beats), *body]",
        "[0, *body]",
        "tests/liveness/test_bodies.py::test_a_message_is_read_as_it_was_written_and_nothing_else_is",
    ),
    Mutant(
        "liveness/status.py",
        "GroupStatus._gave_up",
        "peer.is_same_group(one.entry) and ",
        "",
        "tests/liveness/test_report.py::test_a_report_about_another_group_of_the_process_is_not_about_this_one",
    ),
    Mutant(
        "liveness/monitor.py",
        "Monitor._others_warn",
        "peer.rank < self.rank and",
        "peer.rank > self.rank and",
        "tests/liveness/test_timeouts.py::test_the_lowest_waiting_rank_of_a_host_warns_for_all",
    ),
    # Unnoticed when they were first planted, or about what no test uses.
    Mutant(
        "liveness/page.py",
        "OwnPage.set_register",
        "> _VERSION_NBYTES - _VERSION.size:",
        "> _VERSION_NBYTES:",
        "tests/liveness/test_page.py",
    ),
    Mutant(
        "liveness/timed_store.py",
        "TimedStore._ask",
        "functools.partial(_answered, question), False",
        "functools.partial(_answered, question), True",
        "tests/liveness/test_timed_store.py tests/survivors/test_recovery.py",
    ),
]
