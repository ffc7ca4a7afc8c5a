"""Faults of ``easydist/notebook``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "notebook/output.py",
        "Output._next",
        "if not self._is_further_down(line, same):",
        "if same:",
        "tests/notebook/test_output.py::test_lines_of_some_ranks_do_not_keep_later_ones_apart",
    ),
    Mutant(
        "notebook/output.py",
        "Output._show_others",
        "elif self._shown[self._lead] and all(len(s) == len(self._shown[self._lead]) for s in rest.values()):",
        "elif self._shown[self._lead]:",
        "tests/notebook/test_output.py",
    ),
    Mutant(
        "notebook/lines.py",
        "",
        "from bisect import bisect_right, insort",
        "from bisect import bisect_left as bisect_right, insort",
        "tests/notebook/test_output.py",
    ),
    Mutant(
        "notebook/lines.py",
        "Whole.add",
        "if self._path is None or self._left <= 0:",
        "if self._path is None:",
        "tests/notebook/test_output.py::test_a_cells_file_keeps_no_more_than_its_limit",
    ),
    Mutant(
        "notebook/magics.py",
        "chosen",
        "int(last or first) >= size",
        "int(last or first) > size",
        "tests/notebook/test_output.py::test_a_line_that_names_no_ranks_is_refused",
    ),
    Mutant(
        "notebook/cluster.py",
        "Cluster._run",
        "                self._needs_meeting = True\n",
        "",
        "tests/notebook/test_cells.py::test_an_exception_shows_once_and_releases_those_that_wait",
    ),
    Mutant(
        "notebook/process.py",
        "RankProcess.kill",
        "os.killpg(self.pid, signal.SIGKILL)",
        "os.kill(self.pid, signal.SIGKILL)",
        "tests/notebook/test_processes.py::test_nothing_stays_behind_when_the_kernel_goes",
    ),
    Mutant(
        "notebook/process.py",
        "_environment",
        " if not name.startswith(_FROM_LAUNCHERS)",
        "",
        "tests/notebook/test_processes.py::test_paths_of_any_kind_and_no_ranks",
    ),
    Mutant(
        "notebook/values.py",
        "unpack",
        "if weights_only:",
        "if weights_only is None:",
        "tests/notebook/test_cells.py::test_values_move_between_the_notebook_and_the_ranks",
    ),
    Mutant(
        "notebook/member.py",
        "Member._agree_on_new_groups",
        "        torch_groups.set_count(1 + 1000 * epoch)\n",
        "",
        "tests/notebook/test_processes.py::test_groups_of_the_user_are_renewed_where_all_their_ranks_know_them",
    ),
]
