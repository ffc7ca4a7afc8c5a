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
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch

from easydist.data.structure import TensorInformation

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
    **{full_name(value): value for value in (*CALLABLES, *_FACTORIES, UserDict, TensorInformation)},
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "builtins.Ellipsis": ...,
    "builtins.NotImplemented": NotImplemented,
}
"""Everything that may be named."""

PLAIN: frozenset[type] = frozenset([TensorInformation])
"""Dataclasses that do nothing when they are made, and whose fields may be set."""


_allowed: dict[str, Any] = {}


def allow_globals(entries: Iterable[Any]) -> None:
    """Allow classes and functions in objects that are decoded with ``weights_only=True``; do the same on all ranks.

    Allowing a class means trusting its constructor, ``__setstate__`` and ``__reduce__`` with arguments that the sender
    chooses. The permission holds until the process ends. What your program gives to
    ``torch.serialization.add_safe_globals`` is allowed too, but not torch's own classes there: importing
    ``torch.distributed.tensor`` registers classes whose constructors connect to other processes. Name those here.

    Args:
        entries: Classes and functions; or pairs of one and the name under which messages ask for it
            (``"module.name"``).

    Raises:
        TypeError: An entry is neither.

    Example:
        >>> import easydist
        >>> from http import HTTPStatus
        >>> easydist.allow_globals([HTTPStatus])
        >>> easydist.gather_object([HTTPStatus.OK], weights_only=True)
        [<HTTPStatus.OK: 200>]
    """
    _allowed.update([_checked(entry) for entry in entries])  # all of them, or none


def _checked(entry: Any) -> tuple[str, Any]:
    value, name = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, "")
    if not (hasattr(value, "__module__") and hasattr(value, "__qualname__") and isinstance(name, str)):
        raise TypeError(
            f"allow_globals: {entry!r:.100} is neither a class or function nor a pair of one and its name; pass, for "
            "example, [MyClass]"
        )
    return name or full_name(value), value


def registered() -> dict[str, Any]:
    """What the caller has allowed, by name: here, or by ``torch.serialization.add_safe_globals``."""
    entries = [entry if isinstance(entry, tuple) else (entry, "") for entry in torch.serialization.get_safe_globals()]
    return {name or full_name(value): value for value, name in entries if not _is_torch(value)} | _allowed


def _is_torch(value: Any) -> bool:
    """True if torch defines it: torch's modules register classes when they are imported, whoever imports them."""
    return f"{value.__module__}.".startswith("torch.")
