"""Marks for the tests that do not run everywhere: those with a target of their own, and those that need many ranks."""

import re
from collections import defaultdict

from mutants.planting import rooms

RAY = (
    "tests/cluster/",
    "tests/cli/test_run_on_ray.py",
    "tests/cli/test_top_on_ray.py",
    "tests/notebook/test_on_ray.py",
    "tests/weights/test_ray",
    "tests/test_examples.py::test_ray_",
)
LAUNCHERS = (
    "tests/cli/",
    "tests/comms/test_new_comm.py::test_scripts_",
    "tests/groups/test_forks.py",
    "tests/state/test_accelerate_scripts.py",
    "tests/state/test_first_call.py",
    "tests/state/test_job_key.py",
    "tests/state/test_launchers.py",
    "tests/state/test_trainer.py",
)
APART = {"ray": RAY, "notebook": ("tests/notebook/",), "launchers": LAUNCHERS, "slurm": ("tests/slurm/",)}
"""The slow tests with targets of their own, by mark. ``make test`` runs those that planted faults name, but DEAREST,
and one of SLURM's, where SLURM is installed."""

DEAREST = ("tests/notebook/test_on_ray.py", "tests/cli/test_top_on_ray.py")
"""Each of these tests takes as much time as a hundred others: kernels and ranks in actors that load torch."""

SLOW_EXAMPLES = ("easydist/notebook/launcher.py::",)
"""Those of docstrings."""

CASES = 3
"""The number of cases of a test that ``make quick`` runs: the first, the last, and one between them."""

_ALL_SLOW = re.compile(r"^pytestmark = (MARKS$|\[?\s*pytest\.mark\.slow\b)", re.MULTILINE)
"""In a file of slow tests only; MARKS are those of Ray's tests."""

SLURM = "tests/slurm/test_slurm.py::test_srun"
NAMED = {SLURM} | {
    name.partition("[")[0] for faults in rooms().values() for one in faults for name in one.tests.split()
}


def is_left_out(path, config):
    """Return whether the marks that were asked for leave out all tests of a file, some of which load for seconds."""
    expression = config.getoption("markexpr")
    return "not slow" in expression and path.suffix == ".py" and bool(_ALL_SLOW.search(path.read_text()))


def mark(items):
    """Mark the tests."""
    names = {item.nodeid for item in items}
    cases = defaultdict(list)
    for item in items:
        if item.nodeid.startswith(SLOW_EXAMPLES):
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            for name in _subjects(item.nodeid):
                item.add_marker(name)
        elif re.search(r"W=[34]", item.nodeid) and re.sub(r"W=[34]", "W=2", item.nodeid) in names:
            item.add_marker("wide")
        else:
            cases[item.nodeid.partition("[")[0]].append(item)
    for those in cases.values():
        kept = {i * (len(those) - 1) // (CASES - 1) for i in range(CASES)}
        for number, item in enumerate(those):
            if number not in kept:
                item.add_marker("further")


def _subjects(name):
    """Return the marks of a slow test: what it needs, and ``sample`` if ``make test`` runs it nevertheless."""
    found = [subject for subject, files in APART.items() if name.startswith(files)]
    return [*found, "sample"] if name.partition("[")[0] in NAMED and not name.startswith(DEAREST) else found
