"""Tests of the package's root: its names, and the modules that it loads on import and on use."""

import ast
import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import launching
import pytest

import easydist

ROOT = Path(__file__).parent.parent
STUB = ROOT / "easydist" / "__init__.pyi"
ALIASES = {"PartialState": "ProcessState", "DistributedOperationException": "DisagreementError"}
SUBMODULES = {
    "accelerate",
    "comms",
    "logging",
    "memory",
    "metrics",
    "notebook",
    "parallel",
    "queue",
    "ray",
    "testing",
    "tree",
    "weights",
}


def names() -> set[str]:
    """Return the names in the stub."""
    imports = [node for node in ast.walk(ast.parse(STUB.read_text())) if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names), "type checkers want `as`"
    return {alias.name for node in imports for alias in node.names}


def run(*code: str) -> str:
    """Return the output of a fresh interpreter."""
    return launching.python("-c", "\n".join(code))[0]


def run_with_torch(*code: str) -> str:
    """Return the output of an interpreter that has loaded torch, and nothing of easydist."""
    return launching.forked("-c", "\n".join(code))[0]


def test_importing_easydist_loads_nothing_heavy():
    before = "import sys; before = set(sys.modules)"
    loaded = set(run(before, "import easydist", "print(*set(sys.modules) - before)").split())
    assert {name for name in loaded if name.startswith("easydist")} == {
        "easydist",
        "easydist.base",
        "easydist.base.forks",
        "easydist.base.version",
    }
    assert {name.split(".")[0] for name in loaded} <= sys.stdlib_module_names | {"easydist", "lazy_loader"}


@pytest.mark.slow
def test_the_default_device_at_the_import_does_not_matter():
    code = """
import sys, torch
import easydist.comms.objcol, easydist.metrics.encoding, easydist.messages.channels
for name in [name for name in sys.modules if name.startswith("easydist.")]:
    del sys.modules[name]
with torch.device("meta"):
    import easydist.comms.objcol, easydist.metrics.encoding, easydist.messages.channels
for name, module in sys.modules.copy().items():
    if name.startswith("easydist."):
        for key, value in vars(module).items():
            parts = value if isinstance(value, tuple) else [value]
            if any(isinstance(part, torch.Tensor) and part.is_meta for part in parts):
                print(name, key)
"""
    assert run_with_torch(code) == ""


@pytest.mark.slow
def test_all_names_load_torch_and_nothing_heavier():
    before = "import sys, torch.distributed; before = set(sys.modules)"
    loaded = set(run_with_torch(before, "from easydist import *", "print(*set(sys.modules) - before)").split())
    assert "easydist.queue.queue" in loaded
    assert {name.split(".")[0] for name in loaded} <= sys.stdlib_module_names | {"easydist", "lazy_loader"}


@pytest.mark.slow
def test_only_process_group_registers_a_backend():
    run_with_torch(
        "import sys, torch.distributed as d",
        "from easydist import *",
        "assert not d.Backend._plugins",
        "import easydist.process_group",
        "assert list(d.Backend._plugins) == ['EASYDIST_SHM']",
        "assert 'torch._dynamo' not in sys.modules",
    )


@pytest.mark.slow
def test_submodules_need_no_import_of_their_own():
    used = "queue.MessageQueue tree.map memory.release testing.distributed comms.TorchComm"
    run_with_torch("import easydist", *[f"easydist.{name}" for name in used.split()])


@pytest.mark.slow
def test_threads_may_load_all_names_at_once():
    run(
        "import sys, easydist",
        "from concurrent.futures import ThreadPoolExecutor",
        "sys.setswitchinterval(1e-5)",
        "with ThreadPoolExecutor(16) as pool:",
        "    for name, value in zip(dir(easydist), pool.map(lambda n: getattr(easydist, n), dir(easydist))):",
        "        assert value is getattr(easydist, name)",
        "import logging",
        "assert 'easydist' not in logging.__file__",  # its own module of that name does not take the place of Python's
    )


@pytest.mark.slow
def test_a_room_may_be_loaded_while_another_thread_loads_a_module_of_it():
    """No module of a room may wait for the room itself: the room may be waiting for that module."""
    run_with_torch(
        "import sys, threading, easydist",
        "from concurrent.futures import ThreadPoolExecutor",
        "begun, loaded, pool = threading.Event(), threading.Event(), ThreadPoolExecutor(1)",
        "main = threading.main_thread()",
        "def pause(event, arguments):",
        "    here = event == 'import' and arguments[0] == 'easydist.weights.broadcast'",
        "    if here and threading.current_thread() is not main:",
        "        begun.set()",
        "        assert loaded.wait(30)",
        "sys.addaudithook(pause)",
        "future = pool.submit(lambda: easydist.weights)",
        "assert begun.wait(30)",
        "import easydist.ray",
        "loaded.set()",
        "assert future.result().broadcast_state_dict",
    )


def test_the_stub_is_the_list_of_names():
    assert dir(easydist) == sorted(names())
    assert sorted(easydist.__all__) == dir(easydist)


def test_every_name_resolves_and_is_kept():
    for name in names():
        value = getattr(easydist, name)
        assert vars(easydist)[name] is value
        assert isinstance(value, types.ModuleType) == (name in SUBMODULES)
    assert easydist.__version__


def test_every_name_is_documented():
    text = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    documented = set(re.findall(r"automodule:: easydist\.(\w+)", text))
    assert documented == SUBMODULES
    for name in names() - SUBMODULES:  # automodule omits names without docstrings
        assert ALIASES.get(name) or getattr(easydist, name).__doc__, name
    assert ":exclude-members: " + ", ".join(ALIASES) in text


def test_accelerates_names_mean_ours():
    for theirs, ours in ALIASES.items():
        assert getattr(easydist, theirs) is getattr(easydist, ours)


@pytest.mark.parametrize("name", ["gahter", "errors_", "np"])
def test_an_unknown_name_is_an_attribute_error(name):
    assert not hasattr(easydist, name)
    with pytest.raises(AttributeError, match=f"^module 'easydist' has no attribute '{name}'$") as caught:
        getattr(easydist, name)
    assert (caught.value.name, caught.value.obj) == (name, easydist)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'easydist'"):
        exec(f"from easydist import {name}")


def test_what_the_root_names_can_be_pickled():
    for name in names() - SUBMODULES:
        value = getattr(easydist, name)
        assert copy.copy(value) is value
        assert pickle.loads(pickle.dumps(value)) is value
        assert getattr(importlib.import_module(value.__module__), value.__name__) is value


SCRIPT = """
import easydist
from easydist import ProcessState, errors, gather, tree
from easydist.queue import MessageQueue

state: ProcessState = easydist.PartialState()
rank: int = state.process_index
queue: MessageQueue = easydist.queue.MessageQueue(1, 1)
try:
    with easydist.together():
        gather({"rank": rank}, group=easydist.comms.TorchComm(easydist.comms.Solo()))
except (errors.DisagreementError, easydist.DistributedOperationException) as error:
    print(tree.map(str, [error]), easydist.__version__)

easydist.gahter(1)  # wrong
gather(1, dst="all")  # wrong
rank = easydist.__version__  # wrong
from easydist import calling  # wrong
"""


LARGE = (
    "mypy-torch.*,transformers.*,torchmetrics.*,IPython.*,matplotlib.*,ray.*,rich.*,ipykernel.*,jupyter_client.*,zmq.*"
)
"""Packages that mypy takes long to read, and that do not matter for easydist's names."""


def wrong_lines(script):
    return [number for number, line in enumerate(script.splitlines(), 1) if line.endswith("# wrong")]


USES = """
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type
from typing import Any, Callable

import easydist
from easydist import ProcessState
from easydist.comms import ReduceOp

tensor, array, batch = torch.ones(1), np.ones(1), {"x": torch.ones(1)}

assert_type(easydist.gather(tensor), torch.Tensor)
assert_type(easydist.gather(array), "NDArray[np.float64]")
assert_type(easydist.gather(1), torch.Tensor)
assert_type(easydist.gather(0.5), torch.Tensor)
assert_type(easydist.gather(batch), Any)
assert_type(easydist.gather(tensor, dst=0), Any)
assert_type(easydist.gather(batch, as_list=True), "list[dict[str, torch.Tensor]]")
assert_type(easydist.reduce(tensor, "sum"), torch.Tensor)
assert_type(easydist.reduce(array), "NDArray[Any]")
assert_type(easydist.reduce(batch), Any)
assert_type(easydist.broadcast(batch), "dict[str, torch.Tensor]")
assert_type(easydist.broadcast(3), int)
assert_type(easydist.broadcast(None), Any)
assert_type(easydist.copy_tensor_to_devices(), Any)
assert_type(easydist.scatter(batch), "dict[str, torch.Tensor]")
assert_type(easydist.all_to_all(batch), "dict[str, torch.Tensor]")
assert_type(easydist.pad_across_processes(batch, dim=1), "dict[str, torch.Tensor]")
assert_type(easydist.unpad(tensor, like=1), torch.Tensor)
assert_type(easydist.send_to_device(batch, "cpu"), "dict[str, torch.Tensor]")
assert_type(easydist.send_to_device(array, "cpu"), torch.Tensor)
assert_type(easydist.convert_to_fp32(batch), "dict[str, torch.Tensor]")
assert_type(easydist.concatenate([batch, batch]), "dict[str, torch.Tensor]")
assert_type(easydist.broadcast_object_list([1]), "list[int]")

state = ProcessState()


@state.on_process(process_index=1)
def one(path: str) -> int:
    return len(path)


@state.on_local_process(local_process_index=1)
def other(path: str) -> int:
    return len(path)


@state.on_main_process
def main(path: str) -> int:
    return len(path)


assert_type(one("a"), "int | None")
assert_type(other("a"), "int | None")
assert_type(main("a"), "int | None")
assert_type(state.on_process(len, 1)([1]), "int | None")

one(1)  # wrong
assert_type(easydist.reduce(tensor, "SUM"), torch.Tensor)
assert_type(easydist.reduce(tensor, ReduceOp.PREMUL_SUM(2)), torch.Tensor)
easydist.reduce(tensor, "average")  # wrong
easydist.gather(array).no_such_method()  # wrong
easydist.broadcast(batch)[0]  # wrong
"""

TORCH = """
from typing import Any
class Size(tuple[int, ...]): ...
class dtype: ...
class device:
    def __init__(self, name: str) -> None: ...
class Tensor: ...
def ones(size: int) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
"""
"""The parts of torch that type checkers need here; reading all of it takes them half a minute."""

TORCH_DISTRIBUTED = """
from typing import Any
class ReduceOp:
    class RedOpType: ...
def __getattr__(name: str) -> Any: ...
"""


@pytest.fixture(scope="module")
def said_by_mypy(tmp_path_factory):
    """The output of mypy for both scripts of a user."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "__init__.pyi").write_text(TORCH)
    (folder / "torch" / "distributed" / "__init__.pyi").write_text(TORCH_DISTRIBUTED)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "uses.py").write_text(USES)
    (folder / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\n[{LARGE}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", "script.py", "uses.py"]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "script"), [("script", SCRIPT), ("uses", USES)])
def test_type_checkers_see_every_name_and_what_verbs_return(said_by_mypy, name, script):
    found = [int(line) for line in re.findall(rf"^{name}\.py:(\d+): error", said_by_mypy, re.MULTILINE)]
    assert found == wrong_lines(script), said_by_mypy
