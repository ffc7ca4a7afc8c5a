"""Imports go down: every module of easydist imports from strictly lower layers only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "easydist"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
ROOMS = ("comms", "queue", "shm", "testing")


def table() -> dict[str, int]:
    """Module or room -> layer, from the table in ARCHITECTURE.md."""
    rows = re.findall(r"^\| *(\d+) *\|([^|]+)\|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {
        name.strip("/").removesuffix(".py"): int(layer) for layer, cell in rows for name in re.findall(r"`(.+?)`", cell)
    }


def name_of(path: Path) -> str:
    """A module of the package; its room where it is in one."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``, which nobody runs."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from running(child)


def imported(source: str) -> set[str]:
    """The modules and rooms of easydist that a module imports, anywhere in it but for type checkers."""
    names: set[str] = set()
    for node in running(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] if "." in name else "__init__" for name in names if name.split(".")[0] == "easydist"}


def test_imports_are_found_wherever_they_stand():
    source = "import os, easydist.wire\nfrom easydist import tree\ndef f():\n    from easydist.comms.solo import Solo"
    assert imported(source) == {"wire", "tree", "comms"}
    assert imported("import easydist") == {"__init__"}
    assert imported("if TYPE_CHECKING:\n    from easydist.comms import TorchComm") == set()


def test_the_table_names_every_module_and_nothing_else():
    assert set(table()) == {name_of(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    layers, name = table(), name_of(path)
    allowed = {other for other, layer in layers.items() if layer < layers[name]} | ({name} & set(ROOMS))
    assert imported(path.read_text()) <= allowed
