"""The states of metrics of other libraries, from all ranks in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.groups.communicators import Communicators
from easydist.verbs.objects import GatherObject

__all__ = ["GatherStates"]


class GatherStates(GatherObject):
    """The states of all ranks; for this rank, the tensors themselves.

    Args:
        operation: The name of the call.
        states: A function that returns the parts that have a state, their descriptions, on which the ranks must agree,
            and their states.
        dst: The only rank that gets the result; None for all ranks.
    """

    operation = "sync_dist"

    def __init__(
        self,
        operation: str,
        states: Callable[[], tuple[Sequence[Any], Sequence[str], tuple[Any, ...]]],
        dst: int | None = None,
    ) -> None:
        super().__init__(None, dst, True)
        self.operation, self._states = operation, states

    def prepare(self, comms: Communicators) -> Call:
        """Encode this rank's states, on whose descriptions all ranks must agree."""
        self._parts, names, self._value = self._states()
        call = super().prepare(comms)
        call.arguments = {"states": list(names)} | ({} if self._dst is None else {"dst": self._dst})
        return call

    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> list[Any] | None:
        """Return each part with its state on every rank; None on ranks other than ``dst``."""
        every = super().result(comms, agreed, arrived)
        return None if every is None else list(zip(self._parts, zip(*every, strict=True), strict=True))

    def own(self) -> Any:
        """Return this rank's states themselves."""
        return self._value
