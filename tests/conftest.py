import gc
import multiprocessing
import os
import signal
import statistics

import pytest
import selection
from actors import private_cluster
from hypothesis import HealthCheck, settings
from launching import IS_STRESS, crashes, examples, within
from xdist.scheduler import LoadFileScheduling

from easydist.shm.progress import running
from easydist.testing import default_pool

pytest_plugins = ["easydist.testing.plugin"]

collect_ignore_glob = ["*/conftest.py"]
"""They have no doctests, and pytest would take those of two folders for one module."""

CHECKS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("easydist", derandomize=not IS_STRESS, max_examples=examples(100), **CHECKS)
settings.load_profile("easydist")

gc.disable()  # until all tests are loaded, which make millions of objects that stay

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch looks up the name of the other end of each connection to a store. A lookup that is lost takes five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

PRELOADED = [
    "easydist.testing.worker",
    "pytest",
    "hypothesis",
    "tensordict",
    "accelerate",
    "transformers.modeling_outputs",
]
"""The modules that the fork server loads once for all ranks: each rank would need seconds for them."""

ONLY_SLOW = ["torchmetrics", "torcheval.metrics"]
"""Further ones, of slow tests."""

LONGEST = ("tests/test_leaks.py", "tests/test_links.py", "tests/slurm/")
"""The files that wait longest, with the processor idle."""

unmarked = []
"""Lines about slow tests that are not marked slow."""


recovered = []
"""Seconds from the deaths of ranks until all others had recovered, in storms."""


@pytest.fixture(scope="session")
def cluster():
    """One Ray for all tests of this process."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with private_cluster() as made:
        yield made


def pytest_ignore_collect(collection_path, config):
    return selection.is_left_out(collection_path, config) or None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.stress)
    if not IS_STRESS:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("battery")])
        items[:] = [item for item in items if not item.get_closest_marker("battery")]
    selection.mark(items)
    items.sort(key=lambda item: not item.nodeid.startswith((*LONGEST, *selection.RAY)))  # which otherwise end alone


class ByFile(LoadFileScheduling):
    """Gives the tests of a file to one process, and all that need Ray to the same, which starts one cluster."""

    def _split_scope(self, nodeid):
        return "ray" if nodeid.startswith(selection.RAY) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_collection_finish(session):
    default_pool()
    any_slow = any(item.get_closest_marker("slow") for item in session.items)
    multiprocessing.set_forkserver_preload(PRELOADED + any_slow * ONLY_SLOW)  # the server starts with the first rank
    gc.freeze()  # torch and the tests themselves are then not scanned again and again
    gc.enable()


def pytest_runtest_setup():
    default_pool().timeout = within(60)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    left = list(running)
    running.clear()
    assert not left, "operations in shared memory are under way: a thread tries to move them until the last test ends"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.extend(("launched processes that crashed or were too slow", text) for text in crashes)
    return report


def pytest_runtest_logreport(report):
    if report.when == "call":
        recovered.extend(one for name, seconds in report.user_properties if name == "recovered" for one in seconds)
    is_ours = report.when == "call" and report.nodeid.startswith("tests/") and "slow" not in report.keywords
    if is_ours and report.duration > within(0.125):  # a quarter of a second on an idle machine
        unmarked.append(f"{report.duration:6.2f} s  {report.nodeid}")


def pytest_terminal_summary(terminalreporter):
    if recovered:
        median, most = statistics.median(recovered), max(recovered)
        terminalreporter.write_line(f"{len(recovered)} recoveries: median {median:.2f} s, at most {most:.2f} s")
    if unmarked:
        terminalreporter.section("slow, but not marked slow (the first to use the pool has started it)")
        for line in sorted(unmarked, reverse=True):
            terminalreporter.write_line(line)
