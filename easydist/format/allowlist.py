"""The values and callables that restricted decoding may name, with the types of the callables' arguments.

None of them opens a file, imports a module, looks up an attribute, or makes more of its arguments than a copy.
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
    defaultdict: (type, FunctionType, BuiltinFunctionType, NoneType),  # a message can name only those that are listed
    deque: (tuple, list, int, NoneType),
    datetime.date: (int, bytes),
    datetime.time: (int, bytes, datetime.timezone),
    datetime.datetime: (int, bytes, datetime.timezone),
    datetime.timedelta: (int,),
    datetime.timezone: (datetime.timedelta, str),
    decimal.Decimal: (str,),
    fractions.Fraction: (int,),  # not str: "1e999999999" would take forever
    uuid.UUID: (str,),
    pathlib.PurePosixPath: (str,),
    pathlib.PureWindowsPath: (str,),
    pathlib.PosixPath: (str,),
    pathlib.WindowsPath: (str,),
    torch.device: (str, int),
    torch.Size: (tuple,),
    **{cls: (tuple, dict) for cls in vars(torch.return_types).values() if isinstance(cls, type)},
}
"""The callables, each with the types that its arguments may have."""

_FACTORIES = (bool, bytearray, bytes, dict, float, frozenset, int, list, object, set, str, tuple)


def full_name(value: Any) -> str:
    """Return the name under which pickle writes a class or function.

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
"""All values that may be named."""

PLAIN: frozenset[type] = frozenset([TensorInformation])
"""Dataclasses that run no code when they are made, so that their fields may be set."""


_allowed: dict[str, Any] = {}


def allow_globals(entries: Iterable[Any]) -> None:
    """Allow classes and functions in objects that are decoded with ``weights_only=True``; do the same on all ranks.

    Allowing a class means trusting its constructor, ``__setstate__`` and ``__reduce__`` with arguments that the sender
    chooses. The permission lasts until the process ends. Classes that your program passes to
    ``torch.serialization.add_safe_globals`` are allowed, too, but not torch's own classes there: importing
    ``torch.distributed.tensor`` registers classes with constructors that connect to other processes. To allow those,
    pass them here.

    Args:
        entries: Classes and functions; or pairs of a class or function and the name under which messages ask for it
            (``"module.name"``).

    Raises:
        TypeError: An entry is neither, or ``entries`` is text or a class itself.

    Example:
        >>> import easydist
        >>> from http import HTTPStatus
        >>> easydist.allow_globals([HTTPStatus])
        >>> easydist.gather_object([HTTPStatus.OK], weights_only=True)
        [<HTTPStatus.OK: 200>]
    """
    if isinstance(entries, str | type):
        raise TypeError(f"allow_globals: {entries!r:.100} is not a list of classes; pass, for example, [MyClass]")
    _allowed.update([_checked(entry) for entry in entries])  # check all before allowing any


def _checked(entry: Any) -> tuple[str, Any]:
    value, name = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, "")
    if not (hasattr(value, "__module__") and hasattr(value, "__qualname__") and isinstance(name, str)):
        raise TypeError(
            f"allow_globals: {entry!r:.100} is neither a class or function nor a pair of one and its name; pass, for "
            "example, [MyClass]"
        )
    return in_main(name or full_name(value)), value


def in_main(name: str) -> str:
    """Return a name as the script itself has it: processes that multiprocessing spawns rename ``__main__``.

    Example:
        >>> in_main("__mp_main__.Request"), in_main("http.HTTPStatus")
        ('__main__.Request', 'http.HTTPStatus')
    """
    return name.replace("__mp_main__.", "__main__.", 1) if name.startswith("__mp_main__.") else name


def registered() -> dict[str, Any]:
    """Return all that the user has allowed, by name: here, or by ``torch.serialization.add_safe_globals``."""
    entries = [entry if isinstance(entry, tuple) else (entry, "") for entry in torch.serialization.get_safe_globals()]
    return {in_main(name or full_name(value)): value for value, name in entries if not _is_torch(value)} | _allowed


def _is_torch(value: Any) -> bool:
    """True if torch defines the value: torch's modules register classes when anything imports them."""
    return f"{value.__module__}.".startswith("torch.")
