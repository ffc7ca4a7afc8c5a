"""Arguments with two names, for functions whose arguments have other names in accelerate's code than in its docs.

The second name is a keyword-only parameter that is hidden from the signature. A call that uses the first name, or none,
costs one more comparison.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from operator import index
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


class _Unset:
    """The default of a parameter that has two names, or is a second name."""

    def __repr__(self) -> str:
        return "…"


UNSET: Any = _Unset()


def hiding(*names: str, **defaults: Any) -> Callable[[F], F]:
    """Decorate a function to hide these parameters, and all defaults that are ``UNSET``, from its signature.

    Args:
        *names: The second names.
        **defaults: The defaults that the signature shows instead; without one the argument is shown as required.

    Example:
        >>> @hiding("other")
        ... def double(number: int = UNSET, *, other: int = UNSET) -> int:
        ...     return 2 * either("double", "number", number, "other", other)
        >>> double(1), double(number=1), double(other=1)
        (2, 2, 2)
        >>> list(inspect.signature(double).parameters)
        ['number']
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        shown = [
            parameter.replace(default=defaults.get(name, parameter.empty)) if parameter.default is UNSET else parameter
            for name, parameter in signature.parameters.items()
            if name not in names
        ]
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate


def integer(name: str, value: Any, what: str) -> int:
    """Return an argument as an integer: that of NumPy's integers, or of a tensor of one element, too.

    A ``bool`` is none, as in torch: it is the value of another argument in the wrong place.

    Args:
        name: The argument.
        value: Its value.
        what: What it has to be, with its article.

    Raises:
        TypeError: It is not an integer, or a ``bool``.

    Example:
        >>> integer("dim", 0.5, "a dimension")
        Traceback (most recent call last):
        TypeError: dim=0.5 is not a dimension: pass an integer
    """
    if type(value) is int:
        return value
    try:
        return _whole(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not {what}: pass an integer") from None


def integers(name: str, values: Any, what: str) -> list[int]:
    """Return an argument as a list of integers, as ``integer`` does for one.

    Args:
        name: The argument.
        values: Its value.
        what: What it has to be, with its article.

    Raises:
        TypeError: It is not a list of integers.

    Example:
        >>> integers("ranks", 1, "a list of ranks")
        Traceback (most recent call last):
        TypeError: ranks=1 is not a list of ranks: pass a list of integers
    """
    try:
        return [_whole(value) for value in values]
    except TypeError:
        raise TypeError(f"{name}={values!r} is not {what}: pass a list of integers") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def number(name: str, value: Any) -> int | float:
    """Return an argument as a real number: that in a tensor or an array of one element, too.

    Args:
        name: The argument.
        value: Its value.

    Raises:
        OverflowError: It is an integer beyond all floats.
        TypeError: It is not a real number. NumPy would drop an imaginary part, or the unit of a duration.

    Example:
        >>> number("scale", 1j)
        Traceback (most recent call last):
        TypeError: scale=1j is not a number
    """
    if type(value) is int or type(value) is float:  # the usual case, in which half a µs counts
        _as_float(name, value)
        return value
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # complex, text; several elements
        one = value.item() if hasattr(value, "item") else value
        if not isinstance(one, str | bytes | bytearray) and not isinstance(value, np.timedelta64 | np.datetime64):
            real = _as_float(name, one)
            return one if isinstance(one, int) else real
    raise TypeError(f"{name}={value!r} is not a number")


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise OverflowError(
            f"{name} is an integer of {int(value).bit_length()} bits, which no tensor can hold"
        ) from None


def dimension(dim: Any) -> int:
    """Return a dimension as an integer.

    Raises:
        TypeError: It is not an integer.
    """
    return integer("dim", dim, "a dimension")


def either(operation: str, name: str, value: Any, other_name: str, other: Any, default: Any = UNSET) -> Any:
    """Return the value that was passed under one of two names.

    Args:
        operation: The function.
        name: The first name.
        value: The value passed under the first name, or ``UNSET``.
        other_name: The second name.
        other: The value passed under the second name, or ``UNSET``.
        default: The value if neither was passed.

    Raises:
        TypeError: Both were passed; or neither was, and there is no default.
    """
    if value is not UNSET and other is not UNSET:
        raise TypeError(f"{operation}: {name}= and {other_name}= are the same argument; pass one of them")
    chosen = value if other is UNSET else other
    if chosen is not UNSET:
        return chosen
    if default is UNSET:
        raise TypeError(f"{operation}() missing 1 required positional argument: '{name}'")
    return default
