"""vLLM's names and signatures, read from its own wheel: VLLM_WHEEL=vllm-0.33.0-….whl, which nothing imports."""

import ast
import inspect
import os
import re
import zipfile
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from easydist import parallel, queue

MODULES = {
    "vllm.distributed": "",
    "vllm.distributed.parallel_state": "vllm/distributed/parallel_state.py",
    "vllm.distributed.communication_op": "vllm/distributed/communication_op.py",
    "vllm.distributed.utils": "vllm/distributed/utils.py",
    "vllm.distributed.device_communicators.shm_broadcast": "vllm/distributed/device_communicators/shm_broadcast.py",
}
PAGE = Path(__file__).parents[2] / "docs" / "coming_from_vllm.md"
IMPORTS = re.compile(rb"from (vllm|\.+)[\w.]*distributed")
SOURCES = [source for source in MODULES.values() if source]
LEFT_OUT = {
    "GroupCoordinator._reap_completed_isends",  # ours keep themselves alive
    "GroupCoordinator._should_use_all_gather",
    "MessageQueue.acquire_read",  # views of its ring
    "MessageQueue.acquire_write",
    "MessageQueue.recv",  # from a socket of its own
}
"""Methods that we don't have, or have in another form."""


@cache
def wheel():
    return zipfile.ZipFile(os.environ["VLLM_WHEEL"])


@cache
def parsed(name):
    return ast.parse(wheel().read(name))


@cache
def files(folder):
    return [name for name in wheel().namelist() if name.startswith(folder) and name.endswith(".py")]


@cache
def imported(name):
    """The names that a module imports from those above."""
    if not name.startswith("vllm/distributed/") and not IMPORTS.search(wheel().read(name)):
        return []  # parsing all of vLLM takes minutes
    return [*_imported(name)]


def _imported(name):
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            above = PurePosixPath(name).parts[: -node.level] if node.level else ()
            if ".".join([*above, node.module]) in MODULES:
                yield from (alias.name for alias in node.names)


def functions(source):
    """The public functions and methods of a module, by name."""
    for node in parsed(source).body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node


def found(name):
    """Our function or method of that name; None if there is none."""
    here = parallel if hasattr(parallel, name.partition(".")[0]) else queue
    for part in name.split("."):
        here = None if here is None else getattr(here, part, None)
    return here


def told(function):
    """The positional parameters of a function of vLLM, with their defaults as text."""
    names = [arg.arg for arg in function.args.args]
    defaults = [None] * (len(names) - len(function.args.defaults)) + [ast.unparse(d) for d in function.args.defaults]
    return [(name, default) for name, default in zip(names, defaults, strict=True) if name not in ("self", "cls")]


def ours(function):
    parameters = inspect.signature(function).parameters.values()
    needed = inspect.Parameter.empty
    return [
        (p.name, None if p.default is needed else repr(p.default))
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]


needs_wheel = pytest.mark.skipif("VLLM_WHEEL" not in os.environ, reason="VLLM_WHEEL names no wheel of vLLM 0.33.0")


@needs_wheel
def test_models_find_the_names_that_they_import():
    models = {name: {*imported(name)} for name in files("vllm/model_executor/models/")}
    models = {name: names for name, names in models.items() if names}
    missing = {name: sorted(n for n in names if found(n) is None) for name, names in models.items()}
    left = {name: names for name, names in missing.items() if names}
    assert len(models) == 158
    assert not left


@needs_wheel
def test_each_name_that_is_left_out_stands_on_the_page():
    page = PAGE.read_text().partition("**What is left out**")[2].partition("\n## ")[0]
    names = {n for name in files("vllm/") for n in imported(name) if not n.startswith("_") and n not in ("*", "pickle")}
    missing = {name for name in names if found(name) is None}
    assert {name for name in missing if f"`{name}`" not in page} == set()


@needs_wheel
@pytest.mark.parametrize("source", SOURCES)
def test_functions_have_vllms_parameters_in_their_order_with_their_defaults(source):
    wrong = {}
    for name, function in functions(source):
        last = name.split(".")[-1]
        own = found(name)
        is_private = last.startswith("_") and last != "__init__"
        if own is None or is_private or name in LEFT_OUT or isinstance(own, property):
            continue
        mine, theirs = ours(own), told(function)
        if name == "init_distributed_environment":
            theirs = [(n, "None" if n == "backend" else default) for n, default in theirs]  # there nccl, always
        if name == "MessageQueue.__init__":
            theirs = [(n, "25165824" if default == "1024 * 1024 * 24" else default) for n, default in theirs]
        if name == "GroupCoordinator.dispatch":
            continue  # it takes both forms of vLLM, see Experts
        if mine[: len(theirs)] != theirs:
            wrong[name] = mine, theirs
    assert not wrong


@needs_wheel
def test_the_coordinator_has_all_public_methods_and_attributes():
    init = dict(functions(SOURCES[0]))["GroupCoordinator.__init__"]
    attributes = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not node.attr.startswith("_")
    }
    methods = {name.partition(".")[2] for name, _ in functions(SOURCES[0]) if name.startswith("GroupCoordinator.")}
    coordinator = parallel.GroupCoordinator([[0]], 0, "gloo", False)
    missing = {name for name in attributes | methods if not hasattr(coordinator, name)}
    coordinator.destroy()
    assert missing == {"use_cpu_custom_send_recv", "_should_use_all_gather", "_reap_completed_isends"}
