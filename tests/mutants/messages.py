"""Faults of ``easydist/messages``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "messages/frames.py",
        "shareable",
        "RemoteError(text[:LONGEST])",
        "RemoteError(text)",
        "tests/messages/test_entries.py::test_what_cannot_travel_or_be_taken_raises_the_same",
    ),
    Mutant(
        "messages/channels.py",
        "Channel.ask",
        "self._comms.inbox(self.peer).append(message)",
        "pass",
        "tests/messages/test_entries.py::test_what_was_posted_before_two_send_to_each_other_arrives",
    ),
    Mutant(
        "messages/channels.py",
        "_OfMemory.answer",
        '{"number": self._mailbox.answered}',
        '{"number": self._mailbox.answered + 1}',
        "tests/parallel/test_handles.py::test_refusals_of_dropped_messages_are_not_those_of_others",
    ),
    Mutant(
        "messages/pair.py",
        "Pair.reject",
        "asked=False",
        "asked=True",
        "tests/messages/test_entries.py::test_what_cannot_travel_or_be_taken_raises_the_same",
    ),
    Mutant(
        "messages/pair.py",
        "Pair.receive",
        "            channel.answer(message, None)\n",
        "",
        "tests/parallel/test_pairs.py::test_two_that_mean_different_things_get_the_same_error_and_go_on",
    ),
    Mutant(
        "messages/pair.py",
        "Pair.accept",
        ", is_promised=not is_asked",
        "",
        "tests/parallel/test_handles.py::test_handles_are_waited_for_twice_or_dropped",
    ),
    Mutant(
        "messages/transfers.py",
        "Transfer.wait",
        "            if self._error is not None:\n                raise self._error\n",
        "",
        "tests/parallel/test_handles.py::test_a_handle_from_before_the_ranks_connected_again_says_so",
    ),
    Mutant(
        "messages/transfers.py",
        "Transfer._demand_connection",
        " and not self._has_arrived()",
        "",
        "tests/parallel/test_handles.py::test_a_handle_from_before_the_ranks_connected_again_says_so",
    ),
    Mutant(
        "messages/pair.py",
        "Pair._crossed",
        "        self._begin(RECEIVE)  # its message was taken, to be refused\n",
        "",
        "tests/messages/test_crossing.py::test_both_ranks_count_the_same_messages_whatever_becomes_of_them",
    ),
    Mutant(
        "messages/pair.py",
        "Pair._told",
        "        self._begin(SEND)\n",
        "",
        "tests/messages/test_crossing.py::test_both_ranks_count_the_same_messages_whatever_becomes_of_them",
    ),
    Mutant(
        "messages/pair.py",
        "Pair.post",
        "self._begin(SEND)",
        "None",
        "tests/messages/test_crossing.py::test_both_ranks_count_the_same_messages_whatever_becomes_of_them",
    ),
    Mutant(
        "messages/transfers.py",
        "Transfer.wait",
        "if self._message is not None and self._comms.monitor.phase == self._phase:",
        "if False:",
        "tests/messages/test_crossing.py::test_a_message_meets_a_call_of_all_ranks",
    ),
]
