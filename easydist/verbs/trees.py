"""The trees that verbs take: tensors, arrays and numbers, and plain values that are equal on all ranks."""

from __future__ import annotations

import warnings

from easydist import tree
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb
from easydist.data.leaves import Leaves
from easydist.groups.communicators import Communicators
from easydist.typing import Tree

_MANY = 1000
"""Python numbers in one tree beyond which somebody should know that there is a quicker way."""

_FOR_OBJECTS = {
    "gather": "gather_object",
    "broadcast": "broadcast_object_list",
    "copy_tensor_to_devices": "broadcast_object_list",
    "scatter": "scatter_object_list",
}


def leaves_of(data: Tree, operation: str, vectors: bool = False, spec: tree.Spec | None = None) -> Leaves:
    """A tree made ready to travel.

    Args:
        data: The tree.
        operation: For the errors.
        vectors: A leaf without dimensions counts as one of a single element.
        spec: Where it has been taken apart already, its structure; ``data`` is the list of its leaves.

    Raises:
        TypeError: The tree holds an object that holds tensors and cannot be opened.
        ValueError: Two leaves have one path, so that ranks could swap them.
    """
    leaves = Leaves(data, vectors, spec)
    if leaves.alike:
        raise ValueError(
            f"{operation}: {leaves.alike[0]} is the path of several leaves, as keys of one dict have the same repr, so "
            "other ranks cannot tell them apart; use keys whose reprs differ"
        )
    numbers = sum(map(_is_number, leaves.values)) if len(leaves.values) > _MANY else 0
    if numbers > _MANY:
        text = (
            f"{operation}: the tree holds {numbers} Python numbers, each a leaf of its own: pass them as one tensor or "
            "array (torch.tensor(values)), or use gather_object"
        )
        warnings.warn(text, UserWarning, stacklevel=7)
    return leaves


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex)


def demand_data(leaves: Leaves, operation: str) -> None:
    """Refuse a tree of plain values alone; an empty one passes.

    Raises:
        TypeError: The tree holds no tensor, array or number, but other values.
    """
    if leaves.plain and not leaves.values:
        path, text = leaves.plain[0]
        verb = _FOR_OBJECTS.get(operation, "gather_object")
        raise TypeError(
            f"{operation}: the tree holds no tensor, array or number ({path or 'the value'} is {text[:60]}); "
            f"use {verb} for other values"
        )


class TreeVerb(Verb[Tree]):
    """A verb to which every rank brings a tree of one structure."""

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        """Refuse, on all ranks alike, trees that hold no data."""
        if not agreed.call.absent:
            demand_data(agreed.call.tree, self.operation)
