"""Faults of ``easydist/transport``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "transport/backends/c10d.py",
        "Gloo.disconnect",
        "            end_wait(work)\n",
        "            pass\n",
        "tests/transport/test_lost_sends.py",
    ),
    Mutant(
        "transport/backends/c10d.py",
        "Gloo.wait_alone",
        "                raise RuntimeError(LOST)\n",
        "                pass\n",
        "tests/transport/test_lost_sends.py",
    ),
    Mutant(
        "transport/work.py",
        "TorchWork.advance",
        "if not (waits or part.is_completed()):",
        "if not waits:",
        "tests/transport/test_work.py",
    ),
    Mutant(
        "transport/backends/hierarchical.py",
        "RunQueue.run",
        "            self._check()\n",
        "",
        "tests/transport/test_work.py",
    ),
    Mutant(
        "transport/backends/hierarchical.py",
        "_Queued.advance",
        "acquire(blocking=waits)",
        "acquire(blocking=False)",
        "tests/transport/test_work.py",
    ),
    Mutant(
        "transport/reduce_op.py",
        "_combine_uint64",
        "op.type in (RedOpType.MIN, RedOpType.MAX)",
        "op.type is RedOpType.MIN",
        "tests/transport/test_reduce_op.py",
    ),
    Mutant(
        "transport/checked.py",
        "checked_timeout",
        "return timeout if timeout is None else min(timeout, _FOREVER)",
        "return timeout",
        "tests/comms/test_bugs.py::test_the_longest_time_limit_is_not_over_at_once",
    ),
    Mutant(
        "transport/work.py",
        "TorchWork.within",
        "self._timeout = timeout or None",
        "self._timeout = timeout",
        "tests/transport/test_work.py",
    ),
    Mutant(
        "transport/reductions.py",
        "Reductions._reduce_scatter",
        "[flat(op.scaled(tensor)) for tensor in input_list]",
        "[flat(tensor) for tensor in input_list]",
        "tests/transport/test_conformance.py::test_solo",
    ),
    Mutant(
        "transport/described.py",
        "described",
        "    if op is not None:\n        code |= op.code\n",
        "",
        "tests/comms/test_disagreements.py::test_the_error_names_the_call_of_each_rank",
    ),
    Mutant(
        "transport/backends/c10d.py",
        "Gloo._tag",
        "_TAGS * self._lane",
        "self._lane",
        "tests/transport/test_conformance.py::test_messages_that_nobody_describes_stay_on_their_lane_too",
    ),
    Mutant(
        "transport/backends/hierarchical.py",
        "Hierarchical.reduce",
        "total = tensor.clone()",
        "total = tensor",
        "tests/transport/test_hierarchical.py::test_reduce_to_one_and_scatter_of_a_reduction",
    ),
    Mutant(
        "transport/backends/hierarchical.py",
        "Hierarchical._reduce",
        "average(wide, self.size)",
        "average(wide, self._far.size)",
        "tests/transport/test_hierarchical.py::test_battery[two_and_one-3]",
    ),
    Mutant(
        "transport/backends/shm.py",
        "_view",
        "slots.slot_offset(rank, half) + begin",
        "slots.slot_offset(rank, half)",
        "tests/transport/test_conformance.py::test_floats_are_reduced_in_rank_order",
    ),
    Mutant(
        "transport/backends/c10d.py",
        "Gloo._exchange",
        """        posted = [self._post(self._group.recv, tensor, self._members[peer], tag, expected) for tensor, peer in recvs]
        return posted + [self._post(self._group.send, tensor, self._members[peer], tag) for tensor, peer in sends]
""",  # noqa: E501
        """        posted = [self._post(self._group.send, tensor, self._members[peer], tag) for tensor, peer in sends]
        return [*[self._post(self._group.recv, tensor, self._members[peer], tag) for tensor, peer in recvs], *posted]
""",
        "tests/transport/test_broken_connections.py",
    ),
    Mutant(
        "transport/backends/waits.py",
        "_Lookout.__call__",
        "                self._look()",
        "                pass",
        "tests/liveness/test_loss.py::test_the_end_of_a_process_in_the_middle_of_a_large_message_is_noticed",
    ),
    Mutant(
        "transport/backends/c10d.py",
        "Gloo._is_large",
        "(nbytes >= _LARGE or not self.is_near(peer))",
        "nbytes >= _LARGE",
        "tests/transport/test_broken_connections.py::test_a_message_to_another_host_may_be_half_sent_sooner",
    ),
    # Statuses used to tell of messages only once they were posted.
    Mutant(
        "transport/backends/c10d.py",
        "Gloo._spread",
        "self._begun(below, above, own=self._round_tag())",
        "self._begun([], above, own=self._round_tag())",
        "tests/comms/test_disagreements.py::test_a_status_tells_of_messages_that_are_not_posted_yet",
    ),
    Mutant(
        "transport/backends/hierarchical.py",
        "Hierarchical._spread_to",
        "if home != self._host:",
        "if home == self._host:",
        "tests/transport/test_hierarchical.py::test_a_multicast_crosses_once_to_each_host_that_has_a_receiver",
    ),
    # Unnoticed when they were first planted: the leader of a host fails.
    Mutant(
        "transport/backends/c10d.py",
        "Gloo.among",
        "        part = copy.copy(self)\n",
        "        part = copy.copy(self)\n        part.monitor = None\n",
        "tests/liveness/test_loss.py::test_a_process_that_ends_is_named",
    ),
    Mutant(
        "transport/backends/hierarchical.py",
        "Hierarchical.close",
        "        self._near.close()\n",
        "",
        "tests/transport/test_hierarchical.py::test_an_operation_that_fails_ends_the_backend",
    ),
    Mutant(
        "transport/checked.py",
        "Checks.peer",
        "peer != self._backend.rank",
        "peer < self._backend.size",
        "tests/comms/test_new_comm.py::test_wrong_arguments_are_refused_before_anything_is_sent",
    ),
    Mutant(
        "transport/backends/c10d.py",
        "Gloo._tag",
        "tag + _TAGS * self._lane",
        "tag",
        "tests/transport/test_conformance.py::test_messages_that_nobody_describes_stay_on_their_lane_too",
    ),
    Mutant(
        "transport/rounds.py",
        "can_fold",
        "op.type in _REPEATABLE and not dtype.is_floating_point",
        "not dtype.is_floating_point",
        "tests/transport/test_rounds.py::test_battery[5]",
    ),
    Mutant(
        "transport/rounds.py",
        "meet",
        "in doubling(rank, size):",
        "in doubling(rank, size)[1:]:",
        "tests/transport/test_rounds.py::test_nobody_leaves_a_meeting_before_all_have_come",
    ),
    Mutant(
        "transport/rounds.py",
        "scatter_and_share",
        "(mine, root), (chunks[root], root)",
        "(chunks[root], root), (mine, root)",
        "tests/transport/test_rounds.py::test_scatter_and_share",
    ),
    Mutant(
        "transport/schedules.py",
        "doubling",
        "min(d, size - d)",
        "d",
        "tests/transport/test_rounds.py::test_gather_blocks",
    ),
]
