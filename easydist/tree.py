"""Flattening and rebuilding nested data.

A *tree* is any nesting of dict, list, tuple, namedtuple, dataclass, ``Mapping``, ``torch.return_types``, ``torch.Size``
and classes registered with ``torch.utils._pytree``. Its *leaves* are tensors, NumPy arrays and scalars, and Python
numbers. All other values (str, None, other objects) belong to the structure; rebuilding returns the same objects.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import enum
import functools
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist.base import html
from easydist.base.torch_private import NODES, register_node
from easydist.base.wording import a_or_an, some
from easydist.typing import T, Tree

__all__ = [
    "Spec",
    "flatten",
    "is_container",
    "is_leaf",
    "is_namedtuple",
    "is_registered",
    "leaves",
    "listed",
    "map",
    "register",
]

_PLAIN_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, np.ndarray, bool, int, float, complex})
"""The types of which every instance is a leaf, so that no further check is necessary."""

_SHOWN = 100
"""The rows of a structure that a notebook shows."""
_WIDTH = 80
"""The characters of a value that a notebook shows."""

_LEAVES = (torch.Tensor, np.ndarray, int, float, complex, np.number, np.bool_)


def is_leaf(value: object) -> bool:
    """True if ``value`` is a leaf: a tensor, a NumPy array or scalar, or a Python number.

    Example:
        >>> is_leaf(torch.ones(2)), is_leaf(3.5), is_leaf("three"), is_leaf([1])
        (True, True, False, False)

    Args:
        value: Any value.
    """
    return type(value) is torch.Tensor or (isinstance(value, _LEAVES) and not isinstance(value, enum.Enum))


_is_leaf = is_leaf


def is_container(data: object) -> bool:
    """True if ``flatten`` opens this.

    Example:
        >>> is_container([]), is_container("text"), is_container(torch.ones(1))
        (True, False, False)

    Args:
        data: Any value.
    """
    return _container_of(data) is not None


def is_registered(data: object) -> bool:
    """True if the class of ``data`` is registered with ``torch.utils._pytree``.

    Args:
        data: Any value.
    """
    return type(data) in NODES


def is_namedtuple(data: object) -> bool:
    """True if ``data`` is an instance of a namedtuple class.

    Example:
        >>> from collections import namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)

    Args:
        data: Any value.
    """
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


class _Container(NamedTuple):
    """The functions that open a kind of container into (names, children, context), and close it again."""

    open: Callable[[Any], tuple[Sequence[str], list[Any], Any]]
    close: Callable[[Any, list[Any]], Any]


def _print(keys: Iterable[object]) -> tuple[str, ...]:
    return tuple([f"[{_shown(key)}]" for key in keys])


def _shown(key: object) -> str:
    """Return the repr of a key; the items of a frozenset are sorted, as their order differs between processes."""
    if type(key) is frozenset and key:
        return f"frozenset({{{', '.join(sorted(builtins.map(_shown, key)))}}})"
    if type(key) is tuple and key:
        return f"({', '.join(builtins.map(_shown, key))}{',' if len(key) == 1 else ''})"
    return repr(key)


_remembered = functools.lru_cache(maxsize=256)(_print)
_LONGEST = 4096
"""The number of keys beyond which a container's keys are not cached, to save memory."""
_PRINT_ALIKE = frozenset({str, int})
"""The types of which equal keys have the same repr, unlike 1 and True, or 0.0 and -0.0."""


def _keyed(data: Mapping[Any, Any]) -> tuple[str, ...]:
    keys = tuple(data)
    known = len(keys) <= _LONGEST and _PRINT_ALIKE.issuperset(builtins.map(type, keys))
    return _remembered(keys) if known else _print(keys)


def _indexed(data: Any) -> tuple[str, ...]:
    indices = range(len(data))
    return _remembered(indices) if len(indices) <= _LONGEST else _print(indices)


def _refilled(template: Any, fill: Callable[[Any], None]) -> Any:
    """Return a copy with other contents; None if the class refuses to be copied, or its copies to be changed."""
    with contextlib.suppress(Exception):
        clone = copy.copy(template)  # the copy keeps a default factory and other attributes
        if clone is not template:  # as it is if it cannot be changed
            fill(clone)
            return clone
    return None


def _made(cls: type[T], contents: Any) -> T:
    """Return a new container with these contents, as the constructors of most classes do.

    Raises:
        TypeError: This constructor does not.
    """
    try:
        return cls(contents)  # type: ignore[call-arg]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise TypeError(
            f"{a_or_an(cls.__name__)} cannot be made again from its contents ({reason}); register the class with "
            "easydist.tree.register"
        ) from error


def _close_mapping(template: Mapping[Any, Any], children: list[Any]) -> Mapping[Any, Any]:
    items = dict(zip(template, children, strict=True))

    def fill(clone: Any) -> None:
        for key, child in items.items():
            clone[key] = child

    keeps_attributes = isinstance(template, dict | UserDict) and getattr(template, "__dict__", None) is not template
    clone = _refilled(template, fill) if keeps_attributes else None
    return _made(type(template), items) if clone is None else clone


def _close_size(_: None, children: list[Any]) -> tuple[Any, ...]:
    return torch.Size(children) if all(type(child) is int for child in children) else tuple(children)


def _open_dataclass(data: Any) -> tuple[Sequence[str], list[Any], Any]:
    names = [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
    return [f".{name}" for name in names], [getattr(data, name) for name in names], (data, names)


def _close_dataclass(context: tuple[Any, list[str]], children: list[Any]) -> Any:
    template, names = context
    clone = copy.copy(template)  # the copy keeps fields with init=False, and does not run __post_init__ again
    if clone is template:  # it cannot be changed, so it needs no copies
        clone = object.__new__(type(template))
        vars(clone).update(vars(template))
    for name in [name for name in getattr(clone, "__dict__", ()) if _is_computed(clone, name)]:
        del clone.__dict__[name]
    for name, child in zip(names, children, strict=True):
        object.__setattr__(clone, name, child)
    return clone


def _is_computed(data: object, name: str) -> bool:
    """True if an attribute is the cached result of a ``cached_property``."""
    return isinstance(getattr(type(data), name, None), functools.cached_property)


def _close_list(template: list[Any], children: list[Any]) -> list[Any]:
    def fill(clone: list[Any]) -> None:
        clone[:] = children

    clone: list[Any] | None = _refilled(template, fill)
    return _made(type(template), children) if clone is None else clone


_DICT = _Container(lambda d: (_keyed(d), list(d.values()), list(d)), lambda keys, c: dict(zip(keys, c, strict=True)))
_LIST = _Container(lambda d: (_indexed(d), d, None), lambda _, children: children)
_TUPLE = _Container(lambda d: (_indexed(d), d, None), lambda _, children: tuple(children))
_SIZE = _Container(lambda d: (_indexed(d), d, None), _close_size)
_NAMEDTUPLE = _Container(
    lambda d: ([f".{f}" for f in d._fields], d, type(d)), lambda cls, children: cls._make(children)
)
_TUPLE_SUBCLASS = _Container(lambda d: (_indexed(d), d, type(d)), _made)
_LIST_SUBCLASS = _Container(lambda d: (_indexed(d), d, d), _close_list)
_MAPPING = _Container(lambda d: (_keyed(d), [d[key] for key in d], d), _close_mapping)
_DATACLASS = _Container(_open_dataclass, _close_dataclass)

_BUILTIN: dict[type, _Container | None] = {
    str: None,
    type(None): None,
    dict: _DICT,
    list: _LIST,
    tuple: _TUPLE,
    torch.Size: _SIZE,
    OrderedDict: _MAPPING,
    defaultdict: _MAPPING,
}


def _registered(node: Any) -> _Container:
    """Return the kind of a class registered with torch.utils._pytree."""

    def open_(data: Any) -> tuple[Sequence[str], list[Any], Any]:
        if node.flatten_with_keys_fn is not None:
            pairs, context = node.flatten_with_keys_fn(data)
            return [str(key) for key, _ in pairs], [child for _, child in pairs], context
        children, context = node.flatten_fn(data)
        return _indexed(children), list(children), context

    return _Container(open_, lambda context, children: node.unflatten_fn(children, context))


def _container_of(data: Any) -> _Container | None:
    """Return the kind of a container; None if ``data`` is not a container."""
    cls = type(data)
    if cls in _BUILTIN:
        return _BUILTIN[cls]
    if (node := NODES.get(cls)) is not None:
        return _registered(node)
    if isinstance(data, tuple):
        return _NAMEDTUPLE if is_namedtuple(data) else _TUPLE_SUBCLASS
    if isinstance(data, list):
        return _LIST_SUBCLASS
    if isinstance(data, Mapping):
        return _MAPPING
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _DATACLASS
    return None


def register(cls: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]) -> None:
    """Make instances of ``cls`` containers, here and in all of ``torch.utils._pytree``.

    Args:
        cls: The class.
        flatten: A function that takes an instance and returns (list of children, context).
        unflatten: A function that takes (children, context) and returns an instance.

    Raises:
        TypeError: ``cls`` is not a class, or one of the others is not a function.
        ValueError: ``cls`` is registered already.
    """
    if not all(callable(each) for each in (cls, flatten, unflatten)):
        raise TypeError(
            "tree.register takes a class, the function that flattens it, and the function that unflattens it"
        )
    register_node(cls, flatten, unflatten)


class _Static(NamedTuple):
    """A value that is not a leaf and contains none: rebuilding returns the same object."""

    value: Any


@dataclasses.dataclass(slots=True)
class Spec:
    """The structure of a tree without its leaves; a notebook shows it as a table of its paths.

    Attributes:
        paths: One readable path per leaf, as Python would write the access: ``['batch']['ids'][0]``, ``.loss``. The
            path of a tree that is a leaf itself is the empty string.
        plain: The values that are neither leaves nor containers, each with its path.
        alike: The paths that several leaves have, because keys of one container have the same repr; in ``paths`` they
            are numbered.
    """

    paths: list[str]
    _root: Any
    plain: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    alike: list[str] = dataclasses.field(default_factory=list)

    def rebuild(self, leaves: Iterable[Any]) -> Tree:
        """Put ``leaves`` into the structure; law: ``spec.rebuild(leaves)`` equals the tree that was flattened.

        Args:
            leaves: The leaves, one per path, in the same order.

        Raises:
            ValueError: There are more or fewer leaves than paths.
        """
        values = leaves if type(leaves) is list else list(leaves)  # a list of leaves in the tree is a slice of them
        if len(values) != len(self.paths):
            raise ValueError(f"the tree has {some(len(self.paths), 'leaf', 'leaves')}, got {len(values)}")
        return _close(self._root, values)

    def _repr_html_(self) -> str:
        """Return a table of the paths for notebooks."""
        rows = [(str(number), path, "") for number, path in enumerate(self.paths)]
        rows += [("", path, _shortened(repr(value))) for path, value in self.plain]
        titles, more = ("leaf", "path", "plain value"), len(rows) - _SHOWN
        shown = html.table(titles, rows[:_SHOWN], titles[1:])
        return shown + html.text(f"… and {more} more") if more > 0 else shown


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _close(node: Any, leaves: list[Any]) -> Tree:
    if type(node) is int:
        return leaves[node]
    if type(node) is _Static:
        return node.value
    close, context, children = node
    if type(children) is slice:
        return close(context, leaves[children])
    closed = []
    for child in children:  # a comprehension would need a second frame for each level, which flatten does not
        closed.append(_close(child, leaves))
    return close(context, closed)


def flatten(
    data: Tree, is_leaf: Callable[[Any], bool] = is_leaf, skip: Set[str] = frozenset()
) -> tuple[list[Any], Spec]:
    """Flatten a tree: return ``(leaves, spec)``, where ``spec.rebuild(leaves)`` equals ``data``.

    Example:
        >>> values, spec = flatten({"loss": 0.5, "ids": ["a", (1, 2)]})
        >>> values, spec.paths
        ([0.5, 1, 2], ["['loss']", "['ids'][1][0]", "['ids'][1][1]"])
        >>> spec.rebuild([10 * value for value in values])
        {'loss': 5.0, 'ids': ['a', (10, 20)]}

    Args:
        data: The tree.
        is_leaf: Returns True for a leaf; called before containers are opened. By default tensors, NumPy arrays and
            scalars, and Python numbers are leaves.
        skip: Steps of a path (``"['name']"``, ``".name"``), which do not stand for items of a sequence; values there
            always belong to the structure.

    Returns:
        The leaves, in the order in which the containers hold them, and the structure.

    Raises:
        ValueError: A container contains itself, or the tree is nested deeper than Python's recursion limit.
    """
    values: list[Any] = []
    paths: list[str] = []
    plain_values: list[tuple[str, Any]] = []
    walk = values, paths, plain_values, is_leaf, _PLAIN_LEAVES if is_leaf is _is_leaf else frozenset(), skip
    try:
        root = _flatten(data, "", walk)
    except RecursionError:
        raise ValueError(_too_deep(data)) from None
    return values, _spec(paths, root, plain_values)


def _spec(paths: list[str], root: Any, plain: list[tuple[str, Any]]) -> Spec:
    if len(set(paths)) == len(paths):
        return Spec(paths, root, plain, [])
    return Spec(_numbered(paths), root, plain, sorted(path for path, count in Counter(paths).items() if count > 1))


def listed(paths: list[str], plain: list[tuple[str, Any]]) -> Spec:
    """Return the structure of a list with one item for each leaf of another tree, and with the paths of these leaves.

    Example:
        >>> listed(["['x']", "['y'].rows"], []).rebuild([1, 2])
        [1, 2]

    Args:
        paths: The paths of the leaves.
        plain: The paths and values of the structure that are compared.
    """
    return _spec(paths, (_LIST.close, None, slice(0, len(paths))), plain)


_Walk = tuple[list[Any], list[str], list[tuple[str, Any]], Callable[[Any], bool], frozenset[type], Set[str]]
"""The values, paths and plain values found so far; ``is_leaf``, the types that are certainly leaves, and ``skip``."""


def _flatten(node: Any, path: str, walk: _Walk) -> Any:
    """Return the structure of a node. An inner function would refer to itself, and so keep the leaves alive."""
    values, paths, plain_values, is_leaf, plain, skip = walk
    if is_leaf(node):
        values.append(node)
        paths.append(path)
        return len(values) - 1
    kind = _container_of(node)
    if kind is None:
        plain_values.append((path, node))
        return _Static(node)
    names, children, context = kind.open(node)
    first = len(values)
    nodes: list[Any] = []
    if not skip and plain.issuperset(builtins.map(type, children)):
        values.extend(children)
        paths.extend([path + name for name in names] if path else names)  # reuse strings, which have cached their hash
        return kind.close, context, slice(first, len(values))
    for name, child in zip(names, children, strict=True):
        if name in skip and not (name[0] == "[" and isinstance(node, Sequence)):  # [0] may be a key or a position
            nodes.append(_Static(child))
        elif is_leaf(child):  # the same as above, but saves a call
            nodes.append(len(values))
            values.append(child)
            paths.append(path + name)
        else:
            nodes.append(_flatten(child, path + name, walk))
    return kind.close, context, nodes


def _numbered(paths: list[str]) -> list[str]:
    """Return the paths, with numbers that tell equal ones apart."""
    seen: Counter[str] = Counter()
    result = []
    for path in paths:
        seen[path] += 1
        result.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return result


def _too_deep(data: Tree) -> str:
    """Return the reason why ``data`` cannot be flattened: it contains itself, or it is nested too deeply."""
    above: dict[int, tuple[str, Any]] = {}
    done: dict[int, Any] = {}  # keeps the nodes alive, so that their ids stay unique
    stack: list[tuple[Any, str, bool]] = [(data, "", False)]
    while stack:
        node, path, leaving = stack.pop()
        if leaving:
            del above[id(node)]
            done[id(node)] = node
        elif id(node) in above:
            return f"the tree has a cycle: {path or 'the root'} is {above[id(node)][0] or 'the root'} again"
        elif (
            id(node) not in done
            and not is_leaf(node)
            and (kind := _container_of(node)) is not None
            and len(above) < 2000
        ):
            names, children, _ = kind.open(node)
            above[id(node)] = path, node
            stack += [(node, path, True), *((c, path + name, False) for name, c in zip(names, children, strict=True))]
    return "the tree is nested deeper than Python's recursion limit"


def leaves(data: Tree) -> Iterator[Any]:
    """Return the leaves of ``data`` in order.

    Example:
        >>> list(leaves({"a": 1, "b": [2, "x"]}))
        [1, 2]

    Args:
        data: The tree.
    """
    return iter(flatten(data)[0])


def map(
    fn: Callable[[Any], Any], data: Tree, is_leaf: Callable[[Any], bool] = is_leaf, skip: Set[str] = frozenset()
) -> Tree:
    """Return the tree with ``fn(leaf)`` in place of every leaf; ``is_leaf`` and ``skip`` are those of ``flatten``.

    Args:
        fn: Takes a leaf, and returns the value in its place.
        data: The tree.
        is_leaf: Returns True for a leaf.
        skip: Steps of a path whose values are not opened.

    Raises:
        TypeError: ``fn`` cannot be called: it may be the tree.

    Example:
        >>> map(lambda x: x + 1, {"a": 1, "b": (2, None)})
        {'a': 2, 'b': (3, None)}
    """
    if not callable(fn):
        raise TypeError(f"tree.map takes a function and a tree, in this order; got {type(fn).__name__} as the function")
    values, spec = flatten(data, is_leaf, skip)
    return spec.rebuild([fn(value) for value in values])
