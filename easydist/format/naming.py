"""The names of tensors in files and messages: the keys of a flat mapping, or paths, or those of ``names=``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from easydist import tree
from easydist.typing import Tree

Names: TypeAlias = 'Literal["dots"] | Callable[[str], str] | None'
"""``names=``: keys joined by dots, or a function from paths to names; None for keys or paths."""


def flat_names(data: Tree, paths: Sequence[str]) -> dict[str, str] | None:
    """Return the keys of a flat mapping of text to tensors by the paths of its leaves; None for other trees.

    A mapping with a key that cannot be a name in a safetensors file does not count as flat.

    Example:
        >>> flat_names({"a.b": torch.ones(1)}, ["['a.b']"])
        {"['a.b']": 'a.b'}
    """
    if not isinstance(data, Mapping):
        return None
    keys = list(data.keys())  # a TensorDict iterates over its rows
    if len(keys) != len(paths) or not set(map(type, keys)) <= {str}:
        return None
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, map(data.__getitem__, keys)))):
        return None
    return dict(zip(paths, keys, strict=True)) if "__metadata__" not in keys and _is_unicode("".join(keys)) else None


def _is_unicode(text: str) -> bool:
    """True if UTF-8 can express the text: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def given_names(data: Tree, leaves: Sequence[Any], paths: Sequence[str], names: Names) -> dict[str, str]:
    """Return the names that ``names=`` gives to tensors, arrays and NumPy scalars, by their paths.

    Raises:
        TypeError: A name is not text.
        ValueError: ``names`` is neither ``"dots"`` nor a function, or a file cannot hold a name, or two are equal.

    Example:
        >>> given_names({"a": [torch.ones(1)]}, [torch.ones(1)], ["['a'][0]"], "dots")
        {"['a'][0]": 'a.0'}
    """
    pairs = list(zip(paths, leaves, _dotted(data) if names == "dots" else paths, strict=True))
    if names != "dots" and not callable(names):
        raise ValueError(f"names={names!r} is neither 'dots' nor a function from paths to names")
    change = names if callable(names) else str
    found = {
        path: change(name) for path, leaf, name in pairs if isinstance(leaf, torch.Tensor | np.ndarray | np.generic)
    }
    for path, name in found.items():
        if not isinstance(name, str):
            raise TypeError(f"names= gives {path or 'the root'} the name {name!r}, which is not text")
        if name == "__metadata__" or not _is_unicode(name):
            raise ValueError(f"names= gives {path or 'the root'} the name {name!r}, which a file cannot hold")
    _check_unique(found)
    return found


def _dotted(data: Tree) -> Iterator[str]:
    """Yield the keys, indices and fields that lead to each leaf, joined by dots, in the order of ``tree.flatten``."""
    stack: list[tuple[Any, str]] = [(data, "")]
    while stack:
        node, prefix = stack.pop()
        if tree.is_leaf(node):
            yield prefix[:-1]
        elif tree.is_container(node):
            children, spec = tree.flatten(node, lambda part, node=node: part is not node)  # type: ignore[misc]
            steps: Iterable[Any] = node.keys() if isinstance(node, Mapping) else [p.strip("[.]") for p in spec.paths]
            parts = [(child, f"{prefix}{step}.") for child, step in zip(children, steps, strict=True)]
            stack += reversed(parts)


def _check_unique(names: Mapping[str, str]) -> None:
    paths: dict[str, list[str]] = {}
    for path, name in names.items():
        paths.setdefault(name, []).append(path or "the root")
    if clashes := {name: found for name, found in paths.items() if len(found) > 1}:
        lines = [f"  {name!r}: {' and '.join(found)}" for name, found in sorted(clashes.items())]
        several = "several tensors the same name"
        raise ValueError("\n".join([f"names= gives {several}", *lines, "Pass a function that tells them apart."]))
