"""The plain values of a tree, which are not leaves: text, None, enums, dates and the like.

They are not sent with tensors: every rank keeps its own, which is correct only if they are equal on all ranks. So each
is described by a text that all ranks compare, and an object with tensors inside, which would not be sent, is refused.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Set, ValuesView
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from easydist import tree
from easydist.base.wording import a_or_an

_BY_REPR = frozenset({str, bytes, type(None), type(...)})
_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)
_STANDARD = (
    "builtins",
    "datetime",
    "decimal",
    "fractions",
    "pathlib",
    "uuid",
    "torch",
    "numpy",
    "zoneinfo",
    "ipaddress",
)
"""The modules with values that have a complete repr and contain no data."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The address of an object in its repr, which differs between ranks: ``<torch._C.Generator object at 0x7f…>``."""

_DEPTH, _MOST = 8, 10_000
"""The depth, and the number of objects, up to which an object is searched for tensors."""


def described(value: Any, path: str) -> str:
    """Return a text for a plain value that is equal on all ranks if the value is.

    For an object of an unknown class, or a set with one, the text is only the class.

    Raises:
        TypeError: The value is an iterator, or an object or a set with tensors inside, which would not be sent.

    Example:
        >>> described("cat", "['label']"), described(None, "")
        ("'cat'", 'None')
    """
    cls = type(value)
    if cls in _BY_REPR:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{cls.__qualname__}.{value.name}"
    if isinstance(value, _NAMED):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, Iterator):
        raise TypeError(f"{path or 'the tree'} is an iterator ({cls.__name__}), which cannot be inspected; pass a list")
    if _holds_data(value):
        raise TypeError(_left_behind(value, path))
    if isinstance(value, set | frozenset):  # its repr has its items in an order of this process
        with contextlib.suppress(TypeError):
            return exactly(value, path)
    if cls.__module__.partition(".")[0] in _STANDARD and not isinstance(value, Set):
        return _ADDRESS.sub("", repr(value))
    return f"{cls.__module__}.{cls.__qualname__}"


def exactly(value: Any, path: str) -> str:
    """Return a text for a plain value that is equal on two ranks if, and only if, the value is.

    Functions, classes and modules count by their names.

    Raises:
        TypeError: No such text is known, or ``described`` refuses the value.

    Example:
        >>> exactly({"b", "a"}, ""), exactly(1.5, "")
        ("set('a', 'b')", '1.5')
    """
    if isinstance(value, Set) and not _holds_data(value):
        return f"{type(value).__name__}({', '.join(sorted(exactly(item, path) for item in value))})"
    if type(value) is tuple:  # in a set; it may contain further sets
        return f"({', '.join(exactly(item, path) for item in value)})"
    text = described(value, path)
    if type(value) in _BY_REPR or isinstance(value, _NAMED):
        return text
    if isinstance(value, enum.Enum):
        return text if value.name else repr(value)  # Python 3.10 has no name for combined flags
    if type(value).__module__.partition(".")[0] in _STANDARD and text == repr(value):
        return text
    raise TypeError(
        f"{path or 'the value'} is {a_or_an(type(value).__qualname__)}, whose value easydist cannot compare; pass its "
        "parts, such as its __dict__, or its repr"
    )


def _left_behind(value: Any, path: str) -> str:
    if isinstance(value, Set | ValuesView | KeysView):
        kind = type(value).__name__
        return f"{path or 'the tree'} is {a_or_an(kind)} that holds tensors without an order; pass a list or a dict"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"{path or 'the tree'} is {a_or_an(name)} that holds tensors, and easydist does not know how to open it: "
        f"register the class, easydist.tree.register({type(value).__name__}, flatten, unflatten), or pass a "
        "dict of its tensors"
    )


def _holds_data(value: Any) -> bool:
    """True if there is a tensor or an array somewhere inside an object."""
    seen: set[int] = set()
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        found: list[Any] = []
        for item in level:
            if id(item) in seen or type(item) in _BY_REPR or isinstance(item, _NAMED):
                continue
            seen.add(id(item))
            if tree.is_leaf(item) and hasattr(item, "dtype"):
                return True
            if len(seen) < _MOST:
                found += _inside(item)
        level = found
    return False


def _inside(item: Any) -> Iterable[Any]:
    """Return the contents of an object, as far as they can be read without running the object's code."""
    if isinstance(item, dict):
        return [*item, *item.values()]
    if isinstance(item, list | tuple | set | frozenset | deque | ValuesView):
        return [*item]
    if tree.is_leaf(item):
        return []
    held = [*getattr(item, "__dict__", {}).values()]
    slots = [name for cls in type(item).__mro__ for name in _slots(cls)]
    return held + [value for name in slots if (value := _of_slot(item, name)) is not None]


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    # Python puts the class before a private name.
    return [
        f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
    ]


def _of_slot(item: Any, name: str) -> Any:
    try:
        return object.__getattribute__(item, name)
    except AttributeError:
        return None
