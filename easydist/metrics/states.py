"""The states of metrics on all ranks, in one exchange: easydist's own metrics and those of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.groups.communicators import Communicators
from easydist.verbs.objects import GatherObject

__all__ = ["GatherStates", "States"]

States: TypeAlias = tuple[Sequence[Any], dict[str, Any], tuple[Any, ...]]
"""The parts that have a state, the arguments on which the ranks must agree, and the states of the parts."""


class GatherStates(GatherObject):
    """The states of all ranks; for this rank, the states themselves, which nobody changes.

    Args:
        operation: The name of the call.
        states: A function that returns this rank's states, and raises what all ranks shall raise.
        dst: The only rank that gets the result; None for all ranks.
    """

    operation = "sync_dist"

    def __init__(self, operation: str, states: Callable[[Communicators], States], dst: int | None = None) -> None:
        super().__init__(None, dst, weights_only=True)
        self.operation, self._states = operation, states

    def prepare(self, comms: Communicators) -> Call:
        """Encode this rank's states, on whose descriptions all ranks must agree."""
        self._parts, arguments, self._value = self._states(comms)
        call = super().prepare(comms)
        call.arguments = arguments | ({} if self._dst is None else {"dst": self._dst})
        return call

    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> list[Any] | None:
        """Return each part with its state on every rank; None on ranks other than ``dst``."""
        every = super().result(comms, agreed, arrived)
        return None if every is None else list(zip(self._parts, zip(*every, strict=True), strict=True))

    def own(self) -> Any:
        """Return this rank's states themselves."""
        return self._value
