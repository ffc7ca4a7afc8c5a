"""Faults of ``easydist/state``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "state/environment.py",
        "_is_in_own_order",
        ' == "arbitrary"',
        ' == "arbitrary" and False',
        "tests/state/test_environment.py -k order_of_ones_own",
    ),
    Mutant(
        "state/environment.py",
        "restart_key",
        'env.get("TORCHELASTIC_RESTART_COUNT", 0)',
        "0",
        "tests/state/test_environment.py -k starts_again",
    ),
    Mutant(
        "state/environment.py",
        "restart_key",
        " if has_agent(env) else 0",
        "",
        "tests/state/test_environment.py -k restarts_of_an_agent",
    ),
    Mutant(
        "state/recovering.py",
        "_connected",
        ".met(attempt.left, attempt.check)",
        ".met(attempt.left)",
        "tests/groups/test_left_out.py -k meeting_interrupted",
    ),
    Mutant(
        "state/recovering.py",
        "_name",
        "old is dist.group.WORLD and not is_recovered(old)",
        "False",
        "tests/state/test_first_call.py -k ranks_that_had_made_the_group",
    ),
    Mutant(
        "state/groups.py",
        "_made_in",
        "own_connection(store)",
        "store",
        "tests/state/test_first_call.py -k whose_first_call_comes_after",
    ),
    Mutant(
        "state/groups.py",
        "replace_default_group",
        "    torch_groups.set_default(group)",
        "    pass",
        "tests/state/test_first_call.py -k without_a_rank_that_ended",
    ),
    Mutant(
        "state/environment.py",
        "launched",
        "names[: 3 if in_step else 2]",
        "names[:2]",
        "tests/state/test_environment.py",
    ),
    Mutant(
        "state/environment.py",
        "_world",
        "_int(env, names[2], rank)",
        "_int(env, names[2], 0)",
        "tests/state/test_environment.py",
    ),
    Mutant(
        "state/groups.py",
        "world_of",
        "if (told.rank, told.size) == (rank, size):",
        "if told.size == size:",
        "tests/state/test_state.py::test_variables_that_another_launch_has_left_over_do_not_count",
    ),
    Mutant(
        "state/first.py",
        "is_first_of_host",
        "hosts.index(hosts[comms.rank]) == comms.rank",
        "comms.rank == 0",
        "tests/state/test_main_process_first.py::test_the_first_rank_of_a_group_on_each_host_goes_first",
    ),
    Mutant(
        "state/process_state.py",
        "ProcessState.local_world_size",
        "self._hosts()[world.rank]",
        "self._hosts()[0]",
        "tests/state/test_state.py::test_ranks_of_an_adopted_group_know_their_hosts_after_the_first_call",
    ),
    Mutant(
        "state/process_state.py",
        "ProcessState._only",
        "here() or not self.use_distributed",
        "here()",
        "tests/state/test_state.py::test_on_process_runs_in_a_world_of_one_whatever_the_number",
    ),
    Mutant(
        "state/recovering.py",
        "_survivor",
        "sum(here[:rank])",
        "sum(here[: rank + 1])",
        "tests/groups/test_recovering.py::test_the_survivors_go_on",
    ),
    Mutant(
        "state/groups.py",
        "of_argument",
        "return None if group.get_coordinate() is None else of_group(group.get_group())",
        "return of_group(group.get_group())",
        "tests/state/test_state.py::test_a_rank_outside_a_mesh_is_told_so",
    ),
    # Unnoticed when it was first planted.
    Mutant(
        "state/environment.py",
        "_tasks_here",
        "if node >= len(counts):",
        "if node > len(counts):",
        "tests/state/test_environment.py",
    ),
]
