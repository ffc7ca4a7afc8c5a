"""Names of torch that are not public stand in one module, and calls work without any one of them."""

import ast
import re
from pathlib import Path

import pytest
import torch
from launching import forked, sampled

import easydist
from easydist.base import torch_groups, torch_private

PACKAGE = Path(easydist.__file__).parent
SOURCES = [Path(torch_private.__file__), Path(torch_groups.__file__)]
NAMES = [name for source in SOURCES for name in re.findall(r'\bfound\("([\w.]+)"', source.read_text())]
SCRIPT = Path(__file__).parent / "scripts" / "without_names.py"


def private(path):
    """Return the private names of torch in a module, as dotted names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if re.fullmatch(r"(torch|dist|_?c10d)\b[\w.]*\._[a-zA-Z][\w.]*", name)]


@pytest.mark.slow
def test_no_other_module_uses_private_names():
    for path in {*PACKAGE.rglob("*.py")} - {*SOURCES}:
        allowed = {"torch.utils.data.dataloader._BaseDataLoaderIter"} if path.name == "passes.py" else set()
        assert {*private(path)} <= allowed, path


def test_private_names_are_found():
    assert "torch._C._has_storage" not in private(SOURCES[0])  # it looks them up by their text
    assert len(NAMES) >= 30
    for source in SOURCES:
        assert all('"""' in line for line in re.findall(r"= found\(.*\n(.*)", source.read_text()))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older ones lack some")
def test_this_torch_has_all_of_them():
    assert torch_private.missing() == []


@pytest.mark.slow
def test_calls_work_without_any_one_of_them():
    some = sampled(NAMES)
    out, _ = forked(SCRIPT, *some, seconds=120)
    assert out.splitlines() == [f"{name}: works" for name in some]
