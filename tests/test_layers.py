"""Tests of the layers: every module imports from lower layers only, none imports itself, and class names are unique."""

import ast
import functools
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "easydist"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}


def table() -> dict[str, int]:
    """Return module or room -> layer, from the table in ARCHITECTURE.md."""
    rows = re.findall(r"^\| *(\d+) *\|([^|]+)\|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {
        name.strip("/").removesuffix(".py"): int(layer) for layer, cell in rows for name in re.findall(r"`(.+?)`", cell)
    }


def name_of(path: Path) -> str:
    """Return a module's name in the package, or its room if it is in one."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def parsed(source: str) -> list[ast.AST]:
    """Return all nodes of a module, which takes more time than looking at them."""
    return [*ast.walk(ast.parse(source))]


def imported(source: str) -> set[str]:
    """Return the dotted names that a module imports from easydist, including imports in functions and for typing."""
    names: set[str] = set()
    for node in parsed(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "easydist"}


def rooms(names: set[str]) -> set[str]:
    """Return the modules and rooms of these names."""
    return {name.split(".")[1] if "." in name else "__init__" for name in names}


def dotted(path: Path) -> str:
    """Return a module's own dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return module -> the modules that it imports."""
    found = {module: imported(source) for module, source in sources.items()}
    return {
        module: {name if name in sources else name.rpartition(".")[0] for name in names}
        for module, names in found.items()
    }


def test_imports_are_found_wherever_they_stand():
    source = (
        "import os, easydist.data.packing\nfrom easydist import tree\ndef f():\n    from easydist.comms import Solo"
    )
    assert rooms(imported(source)) == {"data", "tree", "comms"}
    assert rooms(imported("import easydist")) == {"__init__"}
    assert rooms(imported("if TYPE_CHECKING:\n    from easydist.comms import TorchComm")) == {"comms"}


def test_cycles_are_found():
    later = "def f():\n    from easydist.a import x"
    with pytest.raises(CycleError, match=r"easydist\.b"):
        TopologicalSorter(graph({"easydist.a": "from easydist import b", "easydist.b": later})).prepare()


def test_the_table_names_every_module_and_nothing_else():
    assert set(table()) == {name_of(path) for path in MODULES}


@pytest.mark.slow
def test_imports_go_down():
    layers = table()
    for path in MODULES:
        name = name_of(path)
        allowed = {other for other, layer in layers.items() if layer < layers[name]} | ({name} & ROOMS)
        assert rooms(imported(path.read_text())) <= allowed, path


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others():
    TopologicalSorter(graph({dotted(path): path.read_text() for path in MODULES})).prepare()


@pytest.mark.slow
def test_each_class_has_a_name_of_its_own():
    nodes = [node for path in MODULES for node in parsed(path.read_text())]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
