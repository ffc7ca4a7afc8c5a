"""A tree to write in place, which is compared with the values first, and written only if all of them fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.data.leaves import Leaves, as_tensor, write
from easydist.data.packing import type_text
from easydist.format import outline
from easydist.typing import Tree


class Targets:
    """The leaves of ``into=``, by path.

    Attributes:
        values: The leaves themselves.
    """

    def __init__(self, into: Tree) -> None:
        values, self._spec = tree.flatten(into)
        self._into = into
        self.values: dict[str, Any] = dict(zip(self._spec.paths, values, strict=True))

    def differing(self, leaves: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Return the paths at which the new values ``leaves`` do not fit, as sorted (path, new type, type here).

        Raises:
            TypeError: A tensor in the tree is not dense.
        """
        names = leaves.keys() | self.values.keys()
        rows = [(name, _described(leaves, name), _described(self.values, name)) for name in names]
        return sorted(row for row in rows if row[1] != row[2])

    def count(self, leaves: Mapping[str, Any]) -> int:
        """Return the number of paths in ``leaves`` and the tree together."""
        return len(leaves.keys() | self.values.keys())

    def check_writable(self, operation: str, source: str, leaves: Mapping[str, Any]) -> None:
        """Check that ``write`` will succeed and lose no value.

        Args:
            operation: The verb's name, for the error.
            source: The origin of ``leaves``, for the error.
            leaves: The values to write, with the right dtypes and shapes.

        Raises:
            ValueError: A leaf is a read-only array, an expanded tensor, …; or one tensor is in two places of the tree
                and ``leaves`` has two tensors for them, so that one value would be lost.
        """
        Leaves(tree.map(lambda value: value if _is_array(value) else 0, self._into)).check_writable()
        first: dict[Any, str] = {}
        for path, value in self.values.items():
            other = first.setdefault(outline.memory_of(value), path)
            if leaves[other] is not leaves[path]:
                raise ValueError(f"{operation}: {other} and {path} are one tensor in into=, but two in {source}")

    def write(self, leaves: Mapping[str, Any]) -> Tree:
        """Write into the tree's tensors and arrays, and return the tree with them and with new numbers."""
        return self._spec.rebuild(
            [
                write(value, as_tensor(leaves[name])) if _is_numeric(value) else leaves[name]
                for name, value in self.values.items()
            ]
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_numeric(value: Any) -> bool:
    """True if the leaf has a dtype: Python numbers and strings are not converted."""
    return isinstance(value, torch.Tensor | np.ndarray | np.generic)


def _described(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return "missing"
    value = leaves[path]
    if not _is_numeric(value):
        return type(value).__name__
    tensor = as_tensor(value, path)
    return type_text(tensor.dtype, tensor.shape)
