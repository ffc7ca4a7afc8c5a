"""Every function that waits for other ranks takes ``group=`` and ``timeout=``, as keywords."""

import inspect
import re

import pytest

import easydist
from easydist import ProcessState, metrics, weights

EXEMPT = {
    "distributed_loader": "its timeout= is DataLoader's, for its workers",
    "dist_sync_fn": "torchmetrics passes the arguments",
}
THEIRS = {"process_group": "group"}
"""torcheval's names."""
OWNERS = {"easydist": easydist, "metrics": metrics, "weights": weights, "ProcessState": ProcessState}


def waiting():
    """Return the public functions and classes that wait, by their docstrings: their cost is an exchange."""
    found = {}
    for owner, holder in OWNERS.items():
        names = holder.__all__ if inspect.ismodule(holder) else [name for name in vars(holder) if name[0] != "_"]
        for name in names:
            value = getattr(holder, name)
            if not callable(value) or inspect.ismodule(value):
                continue
            cost = re.search(r"(?s)^Cost: (.*?)(\n\n|\Z)", inspect.getdoc(value) or "", re.MULTILINE)
            if cost and re.search(r"exchange|messages|that of|As |as ", cost[1]) and "no exchange" not in cost[1]:
                found[f"{owner}.{name}"] = getattr(value, "compute", value) if owner == "metrics" else value
    return found


WAITING = waiting() | {
    "easydist.wait_for_everyone": easydist.wait_for_everyone,
    "easydist.MetricCollector": easydist.MetricCollector,
    "ProcessState.local_main_process_first": ProcessState.local_main_process_first,
    "logger.log": easydist.logging.MultiProcessAdapter.log,
}


def test_the_list_of_functions_that_wait_is_not_empty():
    assert {"easydist.gather", "easydist.together", "easydist.recover", "easydist.synchronize_rng_states"} <= set(
        WAITING
    )
    assert {"ProcessState.main_process_first", "weights.broadcast_state_dict", "metrics.compute"} <= set(WAITING)


@pytest.mark.parametrize("name", WAITING)
def test_a_function_that_waits_takes_a_group_and_a_timeout(name):
    if name.rpartition(".")[2] in EXEMPT:
        return
    parameters = inspect.signature(WAITING[name]).parameters
    taken = {THEIRS.get(parameter, parameter): kind for parameter, kind in parameters.items()}
    assert {"group", "timeout"} <= taken.keys()
    assert taken["timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    assert taken["group"].default is None


def test_sharing_out_waits_for_nobody_and_takes_a_group():
    parameters = inspect.signature(ProcessState.split_between_processes).parameters
    assert "group" in parameters
    assert "timeout" not in parameters
