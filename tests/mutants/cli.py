"""Faults of ``easydist/cli``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "cli/failures.py",
        "_order",
        "is_no_cause = _is_because_of_others(said[1]) or (was_ended and not _was_ending(failure, said[1]))",
        "is_no_cause = was_ended and not _was_ending(failure, said[1])",
        "tests/cli/test_run.py::test_a_rank_that_the_launcher_ends_after_its_exception_has_failed_first",
    ),
    Mutant(
        "cli/home.py",
        "_is_left_over",
        "or is another program's\n        return False",
        "or is another program's\n        return True",
        "tests/cli/test_run_ends.py::test_only_folders_of_ended_launchers_are_removed",
    ),
    Mutant(
        "cli/ranks.py",
        "awaited_by",
        " and peer.peer == told.rank",
        "",
        "tests/cli/test_top.py::test_who_cannot_be_seen_is_awaited "
        "tests/cli/test_top.py::test_a_call_between_two_ranks_waits_for_one",
    ),
    Mutant(
        "cli/top.py",
        "late_ranks",
        " and not waits[rank.membership.rank]",
        "",
        "tests/cli/test_top.py::test_late_is_who_lets_others_wait "
        "tests/cli/test_top.py::test_the_hung_job_is_first_and_idle_groups_take_a_line",
    ),
    Mutant(
        "cli/check.py",
        "_as_launcher",
        ' and (rank == 0 or row["state"] == "fault")',
        " and rank == 0",
        "tests/cli/test_check.py::test_a_machine_that_works",
    ),
    Mutant(
        "cli/job_key.py",
        "_check_owner",
        "& 0o077",
        "& 0o007",
        "tests/cli/test_run_key.py::test_any_other_file_is_an_error_that_says_what_to_do",
    ),
    Mutant(
        "cli/rank.py",
        "become",
        "os._exit(128 + signal.SIGKILL)",
        "pass",
        "tests/cli/test_run_ends.py::test_a_rank_whose_launcher_has_ended_before_does_not_begin",
    ),
    Mutant(
        "cli/bench.py",
        "_summary",
        "sorted(their / our for our, their in rounds)",
        "sorted(our / their for our, their in rounds)",
        "tests/cli/test_bench.py::test_json_and_several_world_sizes",
    ),
]
