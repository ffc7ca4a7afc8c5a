"""Every public function says what its parameters mean. (Ruff's D417 demands all of them once there are Args.)"""

import importlib
import inspect
import re

import pytest
from launching import ROOT

PAGES = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
MODULES = re.findall(r"\.\. automodule:: (\S+)\n((?:   :.*\n)*)", PAGES)
SAID = re.compile(r"^Args:$|^Law[:,]|\b(?:Do as|Call) ``", re.MULTILINE)
"""In Args, in a law that names them, or by another function that takes the same ones."""


def functions(module, options):
    """Return the docstrings of the functions and methods with parameters that a page shows of a module, by name."""
    listed, excluded = (re.search(rf":{option}: (.+)", options) for option in ("members", "exclude-members"))
    names = listed[1].split(", ") if listed else getattr(module, "__all__", None) or list(vars(module))
    hidden = set(excluded[1].split(", ")) if excluded else set()
    found = {}
    for name in sorted(set(names) - hidden):
        value = getattr(module, name)
        if not getattr(value, "__module__", "").startswith("easydist"):
            continue
        if inspect.isfunction(value):
            found[name] = value, [value]
        elif inspect.isclass(value):
            public = [
                key for key in vars(value).keys() - hidden if key[0] != "_" and inspect.isroutine(getattr(value, key))
            ]
            found |= {
                f"{name}.{key}": (getattr(value, key), [vars(base).get(key) for base in value.__mro__])
                for key in public
            }
    return {
        name: "\n".join(inspect.cleandoc(each.__doc__) for each in those if each and each.__doc__)
        for name, (function, those) in found.items()
        if set(inspect.signature(function).parameters) - {"self"}
    }


@pytest.mark.parametrize(("module", "options"), MODULES, ids=[module for module, _ in MODULES])
def test_every_public_function_says_what_its_parameters_mean(module, options):
    found = functions(importlib.import_module(module), options)
    assert [name for name, docs in found.items() if not SAID.search(docs)] == []


def test_there_are_public_functions():
    assert {"easydist", "easydist.comms", "easydist.parallel", "easydist.queue"} <= {module for module, _ in MODULES}
    found = functions(importlib.import_module("easydist.comms"), "")
    assert {"new_comm", "TorchComm.split", "Backend.send", "Gloo.send"} <= set(found)
