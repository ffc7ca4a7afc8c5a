"""Faults of ``easydist/cluster``."""

from mutants.planting import Mutant

RANKS = "tests/cluster/test_ray_ranks.py::"

MUTANTS = [
    Mutant(
        "cluster/world.py",
        "variables",
        "nodes[:rank].count(node)",
        "nodes[:rank].count(nodes[0])",
        "easydist/cluster/world.py",
    ),
    Mutant(
        "state/groups.py",
        "store_of_group",
        "{_made.count(world)}",
        "{len(_made)}",
        RANKS + "test_a_killed_rank_is_named_and_replaced",
    ),
    Mutant(
        "cluster/failures.py",
        "raised",
        "(own or [*failed])[0]",
        "[*failed][0]",
        "tests/cluster/test_failures.py",
    ),
    Mutant(
        "cluster/placement.py",
        "Placement.__init__",
        "            self.remove()\n",
        "",
        RANKS + "test_too_few_resources_are_told_and_nothing_stays",
    ),
    Mutant(
        "cluster/placement.py",
        "Placement.late",
        '!= "CREATED"',
        '!= "REMOVED"',
        RANKS + "test_ranks_that_do_not_start_on_free_resources_say_so",
    ),
    Mutant(
        "cluster/ranks.py",
        "Ranks._lose",
        "if rank in self._variables:",
        "if not self._variables:",
        RANKS + "test_a_killed_rank_is_named_and_replaced",
    ),
    Mutant(
        "cluster/world.py",
        "part_if_awaited",
        "comms.monitor.is_behind()",
        "comms.size > 1",
        RANKS + "test_ranks_do_not_wait_for_one_that_has_returned",
    ),
]
