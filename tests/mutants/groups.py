"""Faults of ``easydist/groups``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "groups/communicators.py",
        "timeout_of",
        "options._timeout.total_seconds()",
        "options._timeout.seconds",
        "tests/groups/test_communicators.py::test_calls_have_the_time_that_the_groups_maker_gave",
    ),
    Mutant(
        "groups/communicators.py",
        "Communicators._rebuild",
        "        self._bulk = None\n",
        "",
        "tests/agreement/test_calling.py::test_what_a_rank_sent_before_it_gave_up_is_no_part_of_a_result",
    ),
    Mutant(
        "groups/known.py",
        "_make",
        "        if (found := _CACHE.get(group)) is not None:\n            return found\n",
        "",
        "tests/groups/test_communicators.py::test_two_threads_that_come_first_get_the_same",
    ),
    Mutant(
        "groups/sharing.py",
        "_proved",
        "return sorted(ranks for ranks in found if ranks)",
        "return [ranks for ranks in found if ranks]",
        "tests/groups/test_communicators.py::test_hosts_stand_in_the_order_of_their_lowest_ranks",
    ),
    Mutant(
        "groups/rendezvous.py",
        "Rendezvous.join",
        "if backend is None or any(failures):",
        "if backend is None:",
        "tests/torch_backend/test_ends_of_groups.py::test_one_rank_without_memory_fails_the_group_on_all",
    ),
    Mutant(
        "groups/rendezvous.py",
        "Rendezvous._exchange",
        "[*missing, *self._present(told, log)] if is_first else missing",
        "missing",
        "tests/comms/test_new_comm.py::test_scripts_of_the_original_run_under_a_launcher",
    ),
    Mutant(
        "state/groups.py",
        "_made_in",
        ", seconds, monitor, monitor.raise_if_lost)",
        ", seconds)",
        "tests/state/test_first_call.py -k test_a_rank_that_dies_while_the_group_is_connected_is_named_at_once",
    ),
    Mutant(
        "groups/membership.py",
        "Membership.__init__",
        "now + timeout + 3 * limit",
        "now + timeout + 2 * limit",
        "tests/survivors/test_agreement.py -k test_a_rank_keeps_the_rules",
    ),
    Mutant(
        "groups/recovering.py",
        "Recovery._check",
        "            raise EasydistError(",
        "            return EasydistError(",
        "tests/groups/test_left_out.py::test_an_attempt_to_connect_ends_with_a_member_that_cannot_come",
    ),
    Mutant(
        "groups/recovering.py",
        "Recovery._connected",
        "except (RuntimeError, EasydistError):",
        "except RuntimeError:",
        "tests/groups/test_recovering.py::test_an_attempt_that_fails_leaves_no_group",
    ),
    Mutant(
        "base/torch_groups.py",
        "made",
        "{member: place for place, member in enumerate(ranks)}",
        "{place: place for place, member in enumerate(ranks)}",
        "tests/groups/test_left_out.py::test_survivors_go_on",
    ),
    # Unnoticed when they were first planted, or about what no test uses.
    Mutant(
        "groups/registers.py",
        "PageRegisters.write",
        "        self._mine = told\n",
        "",
        "tests/groups/test_recovering.py::test_the_survivors_go_on",
    ),
    Mutant(
        "groups/registers.py",
        "StoreRegisters.write",
        "contextlib.suppress(ValueError)",
        "contextlib.suppress(OSError)",
        "tests/survivors/test_recovery_mutants.py -k test_a_process_keeps_the_rules",
    ),
    Mutant(
        "groups/registers.py",
        "StoreRegisters.read",
        "and not self._store.has_answered:",
        "and self._store.is_silent:",
        "tests/survivors/test_recovery_mutants.py -k test_a_process_keeps_the_rules",
    ),
    Mutant(
        "groups/connecting.py",
        "connect",
        "with keepalive.watching():",
        "if True:",
        "tests/test_leaks.py::test_every_connection_between_hosts_has_a_limit",
    ),
    Mutant(
        "groups/sharing.py",
        "introduce",
        "keepalive.watch_hosts(far)",
        "pass",
        "tests/test_leaks.py::test_every_connection_between_hosts_has_a_limit",
    ),
]
