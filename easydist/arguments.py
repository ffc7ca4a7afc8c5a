"""Arguments that have two names: accelerate's code calls them otherwise than its published pages do.

The second name is a keyword-only parameter that signatures do not show. A call that uses the first name, or none, pays
for one comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class _Unset:
    """The default of a parameter that has two names, or that is a second name."""

    def __repr__(self) -> str:
        return "…"


UNSET: Any = _Unset()


def hiding(*names: str, **defaults: Any) -> Callable[[F], F]:
    """Decorate a function whose signature shall not show these parameters, nor that any other default is ``UNSET``.

    Args:
        *names: The second names.
        **defaults: What the signature shows as the default instead; without one the argument is shown as required.

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


def either(operation: str, name: str, value: Any, other_name: str, other: Any, default: Any = UNSET) -> Any:
    """The value that was passed under one of two names.

    Args:
        operation: The function.
        name: The first name.
        value: What was passed under it, or ``UNSET``.
        other_name: The second name.
        other: What was passed under it, or ``UNSET``.
        default: The value if neither was passed.

    Raises:
        TypeError: Both were passed; neither was, and there is no default.
    """
    if value is not UNSET and other is not UNSET:
        raise TypeError(f"{operation}: {name}= and {other_name}= are the same argument; pass one of them")
    chosen = value if other is UNSET else other
    if chosen is not UNSET:
        return chosen
    if default is UNSET:
        raise TypeError(f"{operation}() missing 1 required positional argument: '{name}'")
    return default
