"""The trees that verbs take, made of tensors, arrays and numbers, and of plain values that are equal on all ranks."""

from __future__ import annotations

import warnings

from easydist import tree
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb
from easydist.data.leaves import Leaves
from easydist.groups.communicators import Communicators
from easydist.typing import Tree
from easydist.verbs.gradients import Gradient

_MANY = 1000
"""The number of Python numbers in one tree beyond which the user gets a warning about a faster way."""

_FOR_OBJECTS = {
    "gather": "gather_object",
    "broadcast": "broadcast_object_list",
    "copy_tensor_to_devices": "broadcast_object_list",
    "scatter": "scatter_object_list",
}


def leaves_of(data: Tree, operation: str, vectors: bool = False, spec: tree.Spec | None = None) -> Leaves:
    """Return the leaves of a tree, prepared for sending.

    Args:
        data: The tree.
        operation: The verb's name, for the errors.
        vectors: True to treat a leaf without dimensions as one of shape ``(1,)``.
        spec: The structure, if the tree has been flattened already; ``data`` is then the list of its leaves.

    Raises:
        TypeError: The tree contains an object with tensors that cannot be opened.
        ValueError: Two leaves have the same path, so that ranks could swap them.
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
        TypeError: The tree holds other values, but no tensor, array or number.
    """
    if leaves.plain and not leaves.values:
        path, text = leaves.plain[0]
        verb = _FOR_OBJECTS.get(operation, "gather_object")
        raise TypeError(
            f"{operation}: the tree holds no tensor, array or number ({path or 'the value'} is {text[:60]}); "
            f"use {verb} for other values"
        )


class TreeVerb(Verb[Tree]):
    """A verb to which every rank passes a tree of the same structure.

    Attributes:
        gradient: The gradient of the call; None if the results have none that needs other ranks.
    """

    gradient: Gradient | None = None

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        """Refuse trees without data, or without a gradient; the result is the same on all ranks."""
        demand_data(agreed.call.tree, self.operation)
        if self.gradient is not None:
            self.gradient.learn(comms, agreed, self)
