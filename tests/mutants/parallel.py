"""Faults of ``easydist/parallel``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "parallel/groups.py",
        "_along",
        "box.permute(*others, *dims)",
        "box.permute(*dims, *others)",
        "tests/parallel/test_layout.py",
    ),
    Mutant(
        "parallel/membership.py",
        "Membership.prev_rank",
        "self.rank_in_group - 1",
        "self.rank_in_group + 1",
        "tests/parallel/test_pairs.py::test_the_neighbours_of_three_ranks",
    ),
    Mutant(
        "parallel/membership.py",
        "Membership._leave",
        "        if self._communicators is not None:\n            self._communicators.leave()\n",
        "",
        "tests/parallel/test_groups.py::test_destroy_takes_everything_down_and_may_be_called_twice",
    ),
    Mutant(
        "parallel/pairs.py",
        "Pairs.recv",
        "self._peer_of(src, -1)",
        "self._peer_of(src, 1)",
        "tests/parallel/test_pairs.py::test_the_neighbours_of_three_ranks",
    ),
    Mutant(
        "parallel/experts.py",
        "Experts._exchanging",
        "is_sequence_parallel or self.data_parallel is None",
        "self.data_parallel is None",
        "tests/parallel/test_groups.py::test_groups_of_a_layout_and_vllms_names",
    ),
    Mutant(
        "parallel/parallel_state.py",
        "destroy_model_parallel",
        '[name for name in _made if name != "world"]',
        "[*_made]",
        "tests/parallel/test_groups.py::test_groups_of_a_layout_and_vllms_names",
    ),
    Mutant(
        "parallel/pairs.py",
        "Pairs._receive_tree",
        "(here != there or any(terms.asked.values()))",
        "any(terms.asked.values())",
        "tests/parallel/test_pairs.py::test_a_rank_that_gets_no_share_is_not_waited_for "
        "tests/parallel/test_pairs.py::test_between_hosts_tensors_go_in_shares_unless_that_is_forbidden",
    ),
]
