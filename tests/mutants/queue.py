"""Faults of ``easydist/queue``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "queue/writer.py",
        "_cut",
        "            piece.append(part)\n            room -= len(part)",
        "            piece.append(part)",
        "tests/queue/test_queue.py::test_a_message_is_cut_into_pieces_of_one_length",
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
        "tests/queue/test_queue_tcp.py::test_of_readers_that_come_at_once_no_more_are_let_in_than_there_is_room_for",
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
        "tests/queue/test_queue_ends.py::test_no_message_is_sent_once_a_reader_has_closed",
    ),
    Mutant(
        "queue/writer.py",
        "_cut",
        "while len(part) >= room:",
        "while len(part) > room:",
        "tests/queue/test_queue.py::test_a_message_is_cut_into_pieces_of_one_length",
    ),
    Mutant(
        "queue/writer.py",
        "_cut",
        "part[room:], nbytes",
        "part[room:], room",
        "tests/queue/test_queue.py::test_a_message_is_cut_into_pieces_of_one_length",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd._admits",
        "r not in self._local_ranks for r",
        "True for r",
        "tests/queue/test_queue_tcp.py::test_of_readers_that_come_at_once_no_more_are_let_in_than_there_is_room_for",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd._admits",
        " - len(self._local_ranks)",
        "",
        "tests/queue/test_queue_tcp.py::test_of_readers_that_come_at_once_no_more_are_let_in_than_there_is_room_for",
    ),
    Mutant(
        "queue/queue.py",
        "_check_numbers",
        "max_chunk_bytes < 1",
        "max_chunk_bytes < 0",
        "tests/queue/test_queue.py::test_misuse",
    ),
    Mutant(
        "queue/writer.py",
        "WriterEnd._place",
        ">= soon",
        "< soon",
        "tests/queue/test_queue.py::test_the_ring_grows_only_if_readers_make_no_room_for_a_while",
    ),
    Mutant(
        "queue/tcp.py",
        "Listener._read_hello",
        " or time.monotonic() > until",
        "",
        "tests/queue/test_queue_tcp.py::test_a_connection_that_says_nothing_is_closed_when_its_time_is_over",
    ),
    Mutant(
        "queue/tcp.py",
        "Sender.unsent",
        "-(-len(self._backlog) // 2)",
        "len(self._backlog) // 2",
        "tests/queue/test_queue_tcp.py::test_a_message_that_is_sent_in_part_counts_as_one",
    ),
    Mutant(
        "queue/end.py",
        "End._until",
        "                if look():  # it came at the last moment\n                    return\n",
        "",
        "tests/queue/test_queue.py::test_what_comes_at_the_last_moment_counts",
    ),
]
