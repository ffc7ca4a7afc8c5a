"""What restricted decoding may name: values, and callables with the types of their arguments.

Nothing here opens a file, imports a module, looks up an attribute, or makes more of its arguments than a copy.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)

_Types = tuple[type, ...]

CALLABLES: dict[Any, _Types] = {
    complex: (float,),
    range: (int,),
    slice: (int, NoneType),
    OrderedDict: (),
    Counter: (),
    defaultdict: (type, FunctionType, BuiltinFunctionType, NoneType),  # of those, only what is listed gets this far
    deque: (tuple, list, int, NoneType),
    datetime.date: (int, bytes),
    datetime.time: (int, bytes, datetime.timezone),
    datetime.datetime: (int, bytes, datetime.timezone),
    datetime.timedelta: (int,),
    datetime.timezone: (datetime.timedelta, str),
    decimal.Decimal: (str,),
    fractions.Fraction: (int,),  # not str: "1e999999999" would be computed
    uuid.UUID: (str,),
    pathlib.PurePosixPath: (str,),
    pathlib.PureWindowsPath: (str,),
    pathlib.PosixPath: (str,),
    pathlib.WindowsPath: (str,),
    torch.device: (str, int),
    torch.Size: (tuple,),
    **{cls: (tuple, dict) for cls in vars(torch.return_types).values() if isinstance(cls, type)},
}
"""Callables, and of which types all their arguments have to be."""

_FACTORIES = (bool, bytearray, bytes, dict, float, frozenset, int, list, object, set, str, tuple)


def full_name(value: Any) -> str:
    """The name under which pickle writes a class or function.

    Example:
        >>> full_name(OrderedDict)
        'collections.OrderedDict'
    """
    return f"{value.__module__}.{value.__qualname__}"


VALUES: dict[str, Any] = {
    **{full_name(value): value for value in (*CALLABLES, *_FACTORIES, UserDict)},
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "builtins.Ellipsis": ...,
    "builtins.NotImplemented": NotImplemented,
}
"""Everything that may be named."""

PLAIN: set[type] = set()
"""Dataclasses whose fields may be set."""


def plain_data(cls: Class) -> Class:
    """Decorate a dataclass that does nothing when it is made, to let restricted decoding make it from its fields."""
    PLAIN.add(cls)
    VALUES[full_name(cls)] = cls
    return cls


def registered() -> dict[str, Any]:
    """What the caller allowed by ``torch.serialization.add_safe_globals``, by name."""
    entries = torch.serialization.get_safe_globals()
    return {entry[1]: entry[0] for entry in entries if isinstance(entry, tuple)} | {
        full_name(entry): entry for entry in entries if not isinstance(entry, tuple)
    }
