"""Faults of ``easydist/shm``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "shm/progress.py",
        "_is_service",
        'return str(getattr(runs, "__module__", "")).startswith(_SERVICES)',
        "return True",
        "tests/comms/test_cycles.py -k thread_that_may_send_later",
    ),
    Mutant(
        "shm/steps.py",
        "Steps.own_slot",
        "self._read_in[half] >= self._reached_by_all",
        "self._read_in[half] > self._reached_by_all",
        "tests/shm/test_shm.py::test_random_calls",
    ),
    Mutant(
        "shm/steps.py",
        "Steps.spread",
        "pieces if copies else []",
        "pieces",
        "tests/weights/test_what_travels.py::test_whole_receivers_beside_sharded_ones",
    ),
    Mutant(
        "shm/slots.py",
        "Pipe._put_chunk",
        "words[self._taken] >= 2",
        "words[self._taken] > 2",
        "tests/shm/test_shm.py::test_both_send_before_they_receive",
    ),
    Mutant(
        "shm/mailbox.py",
        "Mailbox.receive",
        "number >= elsewhere - 1",
        "number >= elsewhere",
        "tests/shm/test_mailbox.py",
    ),
    Mutant(
        "shm/ring.py",
        "RingReader._take",
        "if nbytes == total <= _SMALL:",
        "if nbytes <= _SMALL:",
        "tests/queue/test_queue_groups.py::test_ring_of_random_pieces",
    ),
    Mutant(
        "shm/ring.py",
        "RingWriter._lowest",
        "return min(",
        "return max(",
        "tests/queue/test_queue_groups.py::test_ring_of_random_pieces",
    ),
    Mutant(
        "shm/streams.py",
        "Operation.wait",
        "            self._streams.fail(error)\n",
        "",
        "tests/shm/test_shm.py::test_guard_ends_a_wait",
    ),
    Mutant(
        "shm/streams.py",
        "Operation.one_done",
        "        if not self.left:\n            self.keep = self.describe = None  # which hold the tensors\n",
        "",
        "tests/shm/test_shm.py::test_the_data_of_an_operation_that_has_ended_is_freed_while_its_handle_is_kept",
    ),
    Mutant(
        "shm/calls.py",
        "Calls.leave",
        "        for rank in slots.others:\n            words[slots.cell(rank, NOTICE)] = 1\n",
        "",
        "tests/comms/test_disagreements.py::"
        "test_a_rank_that_waits_for_nobody_hears_of_a_disagreement_in_its_next_operation",
    ),
    Mutant(
        "shm/cycles.py",
        "Cycles._needs",
        " & ~(words[there + _FLAGS + rank] >> _BEGUN)",
        "",
        "tests/comms/test_cycles.py::test_after_an_error_ranks_wait_for_one_that_has_not_heard_of_it",
    ),
    Mutant(
        "shm/streams.py",
        "Streams._flags",
        "if is_awaited and not",
        "if not",
        "tests/comms/test_cycles.py::test_only_the_operation_counts_for_which_a_rank_waits",
    ),
    Mutant(
        "shm/progress.py",
        "is_alone",
        "return all(",
        "return True or all(",
        "tests/comms/test_cycles.py::test_a_thread_that_may_send_later_breaks_a_circle",
    ),
    Mutant(
        "shm/progress.py",
        "_after_fork_in_parent",
        "helper.resume()",
        "helper.is_awake = False",
        "tests/torch_backend/test_pending.py::test_the_thread_ends_before_a_fork_and_is_back_after_it",
    ),
    # Unnoticed when it was first planted.
    Mutant(
        "shm/segment.py",
        "Segment.attach",
        "(status.st_dev, status.st_ino, status.st_size) != (device, inode, nbytes)",
        "(status.st_dev, status.st_size) != (device, nbytes)",
        "tests/shm/test_shm.py::test_another_file_than_the_announced_one_is_not_attached",
    ),
    Mutant(
        "shm/slots.py",
        "Pipe.take",
        "self.lane == COLLECTIVES or words[at + 1] >> TAG == kind >> TAG",
        "True",
        "tests/torch_backend/test_tagged_messages.py::test_messages_with_tags_arrive_in_any_order",
    ),
    Mutant(
        "shm/slots.py",
        "Pipe._from_aside",
        "return self._aside.pop(number)",
        "return self._aside.pop()",
        "tests/torch_backend/test_tagged_messages.py::test_messages_with_tags_arrive_in_any_order",
    ),
    Mutant(
        "shm/slots.py",
        "Pipe.take",
        "while self.is_lent and not lent:",
        "while False:",
        "tests/torch_backend/test_tagged_messages.py::test_a_receive_that_names_its_sender_waits_for_one_that_does_not",
    ),
]
