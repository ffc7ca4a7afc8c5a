"""Draws single-line faults of the protocol's sources: ``python tests/protocol/drawing.py`` prints those of the seed.

A fault flips a comparison, is off by one, drops a condition, swaps ``and`` with ``or`` or ``min`` with ``max``, forgets
an assignment, or returns something else.
"""

import ast
import random
import sys

SEED = 27

COUNTS = {"rules": 30, "protocol": 20, "reconnecting": 8}
"""The faults to draw, by file."""

_FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
_FLIPPED |= {"in": "not in", "not in": "in"}
_NAMES = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
_NAMES |= {ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}


class _Faults(ast.NodeVisitor):
    """Collects the faults that a source could have: the node to replace, and the text in its place."""

    def __init__(self, text):
        self._text, self.found = text, []

    def _source(self, node):
        return ast.get_source_segment(self._text, node)

    def visit_Module(self, node):
        """Visit functions only: the seconds and counts of a module are chosen, and no rules."""
        for function in ast.walk(node):
            if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                self.generic_visit(function)

    def _inner(self, node):
        source = self._source(node)
        return f"({source})" if isinstance(node, ast.BoolOp | ast.IfExp) else source

    def _add(self, node, new):
        if node.lineno == node.end_lineno:
            self.found.append((node.lineno, node.col_offset, node.end_col_offset, new))

    def visit_Compare(self, node):
        if len(node.ops) == 1:
            left, right = self._source(node.left), self._source(node.comparators[0])
            self._add(node, f"{left} {_FLIPPED[_NAMES[type(node.ops[0])]]} {right}")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        parts, word = [self._inner(value) for value in node.values], "and" if isinstance(node.op, ast.And) else "or"
        for index in range(len(parts)):
            self._add(node, f" {word} ".join(parts[:index] + parts[index + 1 :]))
        self._add(node, f" {'or' if word == 'and' else 'and'} ".join(parts))
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self._add(node, self._source(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, str(node.value + 1))

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._add(node.func, "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Assign(self, node):
        if isinstance(node.targets[0], ast.Attribute) and len(node.targets) == 1:
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node):
        if isinstance(node.value, ast.Constant):
            self._add(node.value, repr(not node.value.value))
        elif node.value is not None:
            self._add(node.value, f"not ({self._source(node.value)})")
            self._add(node.value, "None")
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node):
        """Skip annotations and defaults."""


def faults(text):
    """Return all faults that a source could have, each as the old text, which occurs once, and the new one."""
    visitor, lines = _Faults(text), text.split("\n")
    visitor.visit(ast.parse(text))
    found = []
    for line, begin, end, new in sorted(set(visitor.found)):
        changed = lines[line - 1][:begin] + new + lines[line - 1][end:]
        first = line
        while text.count("\n".join(lines[first - 1 : line])) > 1:
            first -= 1
        before = lines[first - 1 : line - 1]
        found.append(("\n".join([*before, lines[line - 1]]), "\n".join([*before, changed])))
    return found


def drawn(name, text):
    """Return the faults drawn for a file.

    Args:
        name: Its key in ``COUNTS``.
        text: Its source.
    """
    return random.Random(f"{SEED} {name}").sample(faults(text), COUNTS[name])


if __name__ == "__main__":
    from sources import text_of

    for name in COUNTS:
        for old, new in drawn(name, text_of(name)):
            print(f"{name}: {old.strip()}\n    -> {new.strip()}", file=sys.stdout)
