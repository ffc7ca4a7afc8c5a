"""The bounds that figures of a benchmark have to keep: one line each, with the figure, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Bound(NamedTuple):
    """A bound on a figure.

    Attributes:
        text: What was measured.
        figure: The measured value.
        limit: The least or the largest value allowed.
        is_least: True if it is the least.
    """

    text: str
    figure: float
    limit: float
    is_least: bool = True

    @property
    def holds(self) -> bool:
        """True if the figure keeps it."""
        return self.figure >= self.limit if self.is_least else self.figure <= self.limit


def show(bounds: Iterable[Bound]) -> None:
    """Print a line for each bound."""
    for one in bounds:
        state, side = "held  " if one.holds else "missed", "least" if one.is_least else "most"
        print(f"  {state}  {one.text}: {one.figure:.2f}, at {side} {one.limit:g}")
