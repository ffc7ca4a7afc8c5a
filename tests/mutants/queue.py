"""Faults of ``easydist/queue``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "queue/writer.py",
        "_cut",
        "            piece.append(part)\n            room -= len(part)",
        "            piece.append(part)",
        "tests/queue/test_queue.py::test_objects_larger_than_the_queue tests/queue/test_queue.py::test_random_objects",
    ),
    Mutant(
        "queue/end.py",
        "deadline",
        "timeout.total_seconds()",
        "timeout.seconds",
        "tests/queue/test_queue.py::test_a_timeout_may_be_days_or_parts_of_a_second",
    ),
    Mutant(
        "queue/end.py",
        "End.leave_to_parent",
        "self._abandon()",
        "self._release()",
        "tests/queue/test_queue_ends.py::test_forked_child_has_to_make_its_own_end",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd._admits",
        "for r in self._senders) < self._n_reader",
        "for r in self._senders) <= self._n_reader",
        "tests/queue/test_queue_tcp.py::test_more_readers_than_announced_are_refused "
        "tests/queue/test_queue_tcp.py::test_each_missing_reader_is_counted_once",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd._has_room",
        "b + nbytes <= self._capacity",
        "b <= self._capacity",
        "tests/queue/test_queue.py::test_what_a_queue_holds_without_a_reader "
        "tests/queue/test_queue_ends.py::test_slow_readers_make_the_writer_wait",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd._release",
        "until = time.monotonic() + _FAREWELL",
        "until = time.monotonic()",
        "tests/queue/test_queue_ends.py::test_waits_are_cancelled "
        "tests/queue/test_queue_ends.py::test_the_writer_closes",
    ),
    Mutant(
        "queue/tcp.py",
        "Receiver.close",
        "            self._socket.send(_LEAVE)\n",
        "",
        "tests/queue/test_queue_ends.py::test_a_reader_closes",
    ),
    Mutant(
        "queue/queue.py",
        "MessageQueue.create_from_process_group_single_reader",
        "dist.get_group_rank(pg, reader_rank) if isinstance(pg, dist.ProcessGroup) else reader_rank",
        "reader_rank",
        "tests/queue/test_queue_groups.py::test_ranks_of_a_group",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd.put",
        "self._seen or self._departure()",
        "self._seen",
        "tests/queue/test_queue_ends.py::test_a_reader_closes",
    ),
]
