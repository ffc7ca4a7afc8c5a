"""The one place where a value of a store, or a message that came through one, becomes Python data.

Other programs may write to the store, and other versions of easydist. So each value is compared with its form before
anything uses it.
"""

from __future__ import annotations

import json
from types import UnionType
from typing import Any, get_args

from easydist.errors import WireError

Form = Any
"""A type or a union of types; ``[form]`` for a list, ``(form, form)`` for a list of that length, ``{str: form}`` for an
object, ``{"name": form}`` for an object with these names."""

_SHOWN = 60
"""The most characters of a damaged value that an error shows."""


def in_store(key: str) -> str:
    """Return the words for the value of a key, for ``decoded``."""
    return f"the value of {key!r} in the group's store"


def decoded(what: str, text: bytes | str, form: Form) -> Any:
    """Return the data of a JSON text.

    Args:
        what: The words for the text, for the error.
        text: The text.
        form: The form that it must have. A ``float`` may be written as an integer; a ``bool`` is no ``int``.

    Raises:
        WireError: The text is no JSON, or has another form.

    Example:
        >>> decoded(in_store("seen/1"), "[3, null]", (int, str | None))
        [3, None]
        >>> decoded("the message", "[3", (int, str | None))
        Traceback (most recent call last):
        easydist.errors.WireError: the message is damaged, or from another version of easydist: '[3'
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also comes from the UTF-8 decoder
        raise damaged(what, text) from None
    if not _fits(value, form):
        raise damaged(what, text)
    return value


def damaged(what: str, text: bytes | str) -> WireError:
    """Return the error for a text that does not have the form that it must have."""
    shown = text if isinstance(text, str) else text.decode(errors="backslashreplace")
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return WireError(f"{what} is damaged, or from another version of easydist: {shown!r}")


def _fits(value: object, form: Form) -> bool:
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(one, form[0]) for one in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_fits, value, form))
    if isinstance(form, dict):
        if not isinstance(value, dict) or not (str in form or form.keys() == value.keys()):
            return False
        return all(_fits(one, form.get(name, form.get(str))) for name, one in value.items())
    kinds = get_args(form) if isinstance(form, UnionType) else (form,)
    return object in kinds or type(value) in kinds or (type(value) is int and float in kinds)
