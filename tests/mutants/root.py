"""Faults of the modules in ``easydist`` itself."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "tree.py",
        "",
        "_PRINT_ALIKE = frozenset({str, int})",
        "_PRINT_ALIKE = frozenset({str, int, bool})",
        "tests/test_tree.py::test_equal_keys_of_other_types_keep_paths_of_their_own",
    ),
    Mutant(
        "tree.py",
        "_flatten",
        "if not skip and plain.issuperset(",
        "if plain.issuperset(",
        "tests/test_tree.py::test_skip_leaves_a_step_to_the_structure_at_any_depth",
    ),
    Mutant(
        "memory.py",
        "_give_back",
        "if _kept() + room <= _KEPT:",
        "if _kept() + room < _KEPT:",
        "tests/test_memory.py::test_what_is_kept_has_a_limit",
    ),
    Mutant(
        "memory.py",
        "_Lent.__del__",
        "if self.memory is not None and not is_finalizing():",
        "if self.memory is not None:",
        "tests/test_memory.py::test_memory_is_not_kept_while_the_interpreter_ends",
    ),
    Mutant(
        "base/modes.py",
        "",
        '    "FUNCTIONAL": "under FunctionalTensorMode, where tensors stand for others",\n',
        "",
        "tests/agreement/test_runner.py::test_a_verb_where_tensors_have_no_data_is_an_error_on_all_ranks",
    ),
    Mutant(
        "base/recent.py",
        "Recent.find",
        "        kept.used = self._tick()\n",
        "",
        "easydist/base/recent.py",
    ),
    Mutant(
        "base/arguments.py",
        "either",
        "chosen = value if other is UNSET else other",
        "chosen = value if other is UNSET or not other else other",
        "tests/data/test_structure.py::test_the_argument_has_the_name_of_the_published_page_as_well",
    ),
    Mutant(
        "settings.py",
        "fault",
        "'(hidden)' if setting.is_secret and text.strip() else ascii(text)[:_LONGEST]",
        "ascii(text)[:_LONGEST]",
        "tests/cli/test_run_key.py::test_env_and_errors_never_show_the_key",
    ),
    Mutant(
        "logging.py",
        "_in_turn",
        "for _ in range(comms.rank, comms.size):",
        "for _ in range(comms.rank + 1, comms.size):",
        "tests/test_logging.py",
    ),
    Mutant(
        "base/torch_groups.py",
        "set_count",
        "_world.group_count = number",
        "_world.group_count += number",
        "tests/test_torch_groups.py::test_groups_are_counted_and_named",
    ),
    Mutant(
        "base/torch_groups.py",
        "places",
        "with suppress(Exception):",
        "with suppress(RuntimeError):",
        "tests/test_torch_groups.py::test_a_group_is_known_until_it_is_destroyed",
    ),
    Mutant(
        "base/torch_groups.py",
        "set_default_store",
        "_world.pg_map[default][0], store",
        "_world.pg_map[default]",
        "tests/test_torch_groups.py::test_new_groups_meet_in_another_store",
    ),
    Mutant(
        "process_group.py",
        "_known",
        "if rank in peers",
        "if rank < 0",
        "tests/torch_backend/test_ends_of_groups.py::test_a_new_group_does_not_wait_for_a_process_that_has_ended",
    ),
    Mutant(
        "process_group.py",
        "_at_exit",
        "group.finish()",
        "pass",
        "tests/torch_backend/test_pending.py::test_what_happens_while_operations_are_pending",
    ),
]
