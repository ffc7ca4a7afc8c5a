"""The real rules, monitor and meetings, loaded for a simulation, with a fault put in if one is asked for.

They do not know of it: time, pages, processes and the store are those of the simulated world (``simulated_process``).
Code that waits is rewritten: each call in ``WAITS`` becomes ``(yield from carried(call))``, so that a simulated
rank can stop there, be interrupted there, and be killed there. Nothing else of the source is changed.
"""

import ast
import functools
import sys
import types
from pathlib import Path
from typing import NamedTuple

import simulated_process as simulated

import easydist

ROOT = Path(easydist.__file__).parent

FILES = {
    "rules": "liveness/rules.py",
    "protocol": "liveness/protocol.py",
    "peer": "liveness/peer.py",
    "crossing": "liveness/crossing.py",
    "status": "liveness/status.py",
    "monitor": "liveness/monitor.py",
    "connecting": "groups/connecting.py",
    "reconnecting": "groups/reconnecting.py",
}

STEPS = {
    "monitor": {"guard", "check_reports", "explain", "_cause", "_explained", "unconnected"},
    "connecting": {"connect", "_explained"},
    "reconnecting": {"reconnect", "_meet", "_agree_on_call", "_take"},
}
"""The functions that become generators, by module."""

WAITS = {
    *("younger.guard", "self._in_vain", "self.check", "self._cause", "self._explained", "looks.send", "time.sleep"),
    *("monitor.begin_reconnecting", "monitor.end_meeting", "monitor.unconnected"),
    *("_meet", "_agree_on_call", "_take", "_ask", "_here(monitor).append", "store.set", "connect", "_ACTIONS[step.do]"),
    *("within", "_explained"),
}
"""The calls in them that take time."""


class Mutant(NamedTuple):
    """A fault of one line.

    Attributes:
        file: The key of its file in ``FILES``.
        old: The text that it replaces, which occurs once in the file.
        new: The text in its place.
    """

    file: str
    old: str
    new: str


class _Waits(ast.NodeTransformer):
    """Lets the functions of a module wait."""

    def __init__(self, names):
        self._names, self._is_inside = names, False

    def visit_FunctionDef(self, node):
        if node.name not in self._names:
            return node
        self._is_inside = True
        self.generic_visit(node)
        self._is_inside = False
        node.body.insert(0, ast.parse("if False: yield").body[0])  # a generator also without calls that wait
        return ast.fix_missing_locations(node)

    def visit_Lambda(self, node):
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if not self._is_inside or ast.unparse(node.func) not in WAITS:
            return node
        carried = ast.Call(ast.Name("carried", ast.Load()), [node], [])
        return ast.YieldFrom(carried)


@functools.cache
def text_of(name):
    """Return the source of a module of ``FILES``."""
    return (ROOT / FILES[name]).read_text()


def changed(mutant):
    """Return the source with a fault.

    Raises:
        ValueError: The text that it replaces does not occur exactly once.
    """
    text = text_of(mutant.file)
    if text.count(mutant.old) != 1:
        raise ValueError(f"{FILES[mutant.file]} has {mutant.old!r} {text.count(mutant.old)} times")
    return text.replace(mutant.old, mutant.new)


@functools.cache
def _compiled(name, text):
    tree = _Waits(STEPS[name]).visit(ast.parse(text)) if name in STEPS else text
    return compile(tree, str(ROOT / FILES[name]), "exec")


def _full_name(name):
    return f"easydist.{FILES[name][:-3].replace('/', '.')}"


@functools.lru_cache(maxsize=4)
def load(mutant=None):
    """Return the loaded modules by name, as attributes, with a fault if one is asked for."""
    found = types.SimpleNamespace()
    real = {name: sys.modules.get(_full_name(name)) for name in FILES}
    try:
        for name in FILES:
            text = changed(mutant) if mutant is not None and mutant.file == name else text_of(name)
            module = types.ModuleType(_full_name(name))
            module.__file__ = str(ROOT / FILES[name])
            sys.modules[_full_name(name)] = module  # for the imports of the modules above it
            exec(_compiled(name, text), module.__dict__)
            module.__dict__.update(simulated.names(name, found))
            setattr(found, name, module)
    finally:
        for name, module in real.items():
            sys.modules.pop(_full_name(name), None) if module is None else sys.modules.update(
                {_full_name(name): module}
            )
    return found
