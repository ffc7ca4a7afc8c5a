"""Values and functions between the notebook and its ranks.

Plain data, tensors and arrays travel as messages of ``easydist.format``, everything else by cloudpickle. Sending
pickles to the ranks is safe, since they run any source that the notebook sends. Data from the ranks is unpickled only
if the caller allows it.
"""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch

from easydist.agreement.agree import text_of
from easydist.base.torch_private import unpickled
from easydist.base.wording import a_or_an
from easydist.errors import UnsafeObjectError
from easydist.format.codec import EncodedObject, decode
from easydist.notebook.failures import UnsendableError

_CODEC, _PICKLE = b"C", b"P"

_TO_RANKS = (
    "{} cannot be sent to the ranks: {} cannot be pickled ({}). Make it in a %%ranks cell, or %push the values that it "
    "is made of"
)
_TO_NOTEBOOK = (
    "{} cannot be sent to the notebook: {} cannot be pickled ({}). Return or pull the values that it is made of"
)


def pack(value: object, what: str, *, to_notebook: bool = False) -> bytes | memoryview:
    """Encode a value as bytes.

    Args:
        value: Any value.
        what: Its name, for error messages.
        to_notebook: True if a rank sends it to the notebook, and not the notebook to the ranks.

    Raises:
        TypeError: It cannot be pickled.
    """
    if (encoded := _plain(value)) is None:
        return _PICKLE + _pickled(value, what, _TO_NOTEBOOK if to_notebook else _TO_RANKS)
    return b"".join([_CODEC, *encoded.parts()])


def is_plain(value: object) -> bool:
    """True if it travels without pickle."""
    return _plain(value) is not None


def _plain(value: object) -> EncodedObject | None:
    """Encode a value that travels without pickle; return None for any other."""
    try:
        encoded = EncodedObject(value)
        encoded.check()
    except (TypeError, UnsafeObjectError):
        return None
    return encoded


def unpack(message: bytes | memoryview, *, weights_only: bool) -> Any:
    """Decode a value.

    Args:
        message: The result of ``pack``.
        weights_only: Refuse values that are not plain data.

    Raises:
        UnsafeObjectError: It is not plain.
    """
    view = memoryview(message)
    if view[:1] == _CODEC:
        return decode(torch.frombuffer(bytearray(view[1:]), dtype=torch.uint8), weights_only=True)
    if weights_only:
        raise UnsafeObjectError("the value would have to be unpickled; pass weights_only=False if you trust the ranks")
    return unpickled(cloudpickle.loads, view[1:])


def received(message: bytes | memoryview, what: str, *, weights_only: bool) -> Any:
    """Decode a value of a rank in the notebook.

    Args:
        message: The result of ``pack``.
        what: Its name, for error messages.
        weights_only: Refuse values that are not plain data.

    Raises:
        UnsafeObjectError: It is not plain.
        TypeError: It cannot be unpickled here.
    """
    try:
        return unpack(message, weights_only=weights_only)
    except UnsafeObjectError:
        raise
    except Exception as error:  # a class of the user's may raise anything
        raise UnsendableError(
            f"{what} cannot be loaded in the notebook: {text_of(error)}. Return or pull values of classes that the "
            "notebook can import, and tensors on the CPU"
        ) from error


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Encode a call as bytes, with the globals that the function uses.

    Raises:
        TypeError: A part of it, which the text names, cannot be pickled.
    """
    name, parts = getattr(fn, "__name__", repr(fn)), [*_parts(fn, args, kwargs)]
    return _PICKLE + _pickled((fn, args, kwargs), name, _TO_RANKS, parts)


def sources(fn: Callable[..., Any]) -> dict[str, str]:
    """Return the source of the cell that defines a function, by the file name that tracebacks use for it."""
    name = getattr(getattr(fn, "__code__", None), "co_filename", "")
    lines = [] if os.path.exists(name) else linecache.getlines(name)
    return {name: "".join(lines)} if lines else {}


def _pickled(value: object, what: str, text: str, parts: list[tuple[str, object]] | None = None) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # a class of the user's may raise anything
        guilty = [f"{name}, {a_or_an(type(part).__name__)}," for name, part in parts or () if not _can_be_pickled(part)]
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UnsendableError(text.format(what, " and ".join(guilty) or "it", reason)) from None
    return data


def _parts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the arguments of a call, and the variables that the function uses, with their names."""
    yield from ((f"argument {index}", arg) for index, arg in enumerate(args))
    yield from kwargs.items()
    try:
        used = inspect.getclosurevars(fn)
    except TypeError:  # not a Python function
        return
    yield from used.nonlocals.items()
    yield from used.globals.items()


def _can_be_pickled(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
