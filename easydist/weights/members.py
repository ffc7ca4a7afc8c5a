"""Members that have versions of the same weights: how a version comes to all, and how they go on after a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from easydist.agreement.agree import agree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb, run
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group
from easydist.weights.exchange import BroadcastWeights, Sending
from easydist.weights.source import state_of
from easydist.weights.target import Wanted
from easydist.weights.told import nbytes_of, told

_OPERATION = "publish"


class Member:
    """One of those that have versions of the same weights.

    Args:
        group: The members.
        src: The publisher's rank in it, or its ranks.

    Attributes:
        receives: Whether it takes versions, or publishes them.
        wanted: How a receiver wants a version; the publisher's filter and names.
        sending: What the publisher says for all.
        version: The version that is complete here; 0: none yet.
        pending: A version that is complete here, while not all members are known to have it.
    """

    receives = False
    wanted = Wanted()
    sending = Sending()

    def __init__(self, group: Group, src: int | Sequence[int]) -> None:
        self.comms, self.src = communicators(group), src
        self.version = 0
        self.pending: int | None = None

    def weights(self) -> Any:
        """What this member sends of the version that it has."""
        raise NotImplementedError

    def room(self) -> Any:
        """Where the next version arrives."""
        return None

    def commit(self, version: int) -> None:
        """Use the version that has arrived."""
        self.version, self.pending = version, None

    def regroup(self, group: Group = None, src: int | Sequence[int] | None = None) -> int:
        """Go on in another group, after a member was lost or to let members in; all members call it.

        Afterwards all have the newest version that any of them had: who lacks it, as new members do, gets it from a
        receiver that has it, or from the publisher, as its weights are now, where no receiver does.

        Args:
            group: The new group.
            src: The publisher's rank in it, or the ranks; None is as before.

        Returns:
            The version.

        Raises:
            EasydistError: As ``publish``; what this member has stays as it is.

        Cost: a header exchange and an all-gather of a few bytes; if members lack the version, that of ``publish``.
        """
        self.comms = communicators(group)
        self.src = self.src if src is None else src
        members = run(_Meeting(self), self.comms)
        newest: int = max(one["version"] for one in members.values())
        if self.pending == newest > self.version:
            self.commit(newest)
        self.pending = None
        has = {r for r, one in members.items() if newest in (one["version"], one["pending"])}
        receivers = {rank for rank, one in members.items() if one["receives"]}
        if newest and receivers - has:
            sources = sorted(receivers & has)[:1]
            run(Publish(self, sources or self.src, newest, is_again=True), self.comms)
        self.version = newest
        return newest


class _Meeting(Verb[dict[int, dict[str, Any]]]):
    """The members tell one another what they have."""

    operation = "regroup"

    def __init__(self, member: Member) -> None:
        self._mine = {"receives": member.receives, "version": member.version, "pending": member.pending}

    def prepare(self, comms: Communicators) -> Call:
        return Call(nbytes=nbytes_of(self._mine))

    def exchange(self, comms: Communicators, agreed: Agreement) -> dict[int, dict[str, Any]]:
        return told(comms, agreed.nbytes, self._mine)

    def result(self, comms: Communicators, agreed: Agreement, arrived: dict[int, dict[str, Any]]) -> Any:
        return arrived


class Publish(BroadcastWeights):
    """One version to all members that have an earlier one.

    Args:
        member: This process.
        src: Who has it.
        version: Its number; None is one more than the member's.
        is_again: Whether members may have it already.
    """

    def __init__(
        self, member: Member, src: int | Sequence[int], version: int | None = None, is_again: bool = False
    ) -> None:
        super().__init__(_OPERATION, member.room(), src, member.wanted, member.sending)
        self._member, self._version = member, version
        self._is_known = is_again and member.version == version

    def state(self) -> Mapping[str, Any]:
        """What this member has of the version."""
        return state_of(self._member.weights())

    def is_receiver(self, rank: int, sources: Sequence[int]) -> bool:
        """Whether this member lacks it."""
        return rank not in sources and self._member.receives and not self._is_known

    def notes(self) -> Mapping[str, Any]:
        """The version's number.

        Raises:
            ValueError: It is not newer than what this member has published.
        """
        version = self._member.version + 1 if self._version is None else self._version
        if version <= self._member.version and not self._is_known:
            raise ValueError(f"version {version} is not newer than {self._member.version}, which was published before")
        self._version = version
        return {"version": version}

    def check(self) -> None:
        """Refuse a version that is not newer, on a receiver."""
        version = self.noted["version"]
        if version <= self._member.version:
            raise ValueError(f"version {version} is not newer than {self._member.version}, which this receiver has")

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        """Move the weights, and hear that all members have all of them."""
        self._member.pending = None
        super().exchange(comms, agreed)
        if comms.size > 1:
            self._version = self.noted["version"]
        if self._target is not None:
            self._target.finish()
        self._member.pending = self._version
        agree(comms, f"{_OPERATION} (complete)", lambda: Call({"version": self._version}))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> int:
        """Use it, as all have it."""
        assert self._version is not None
        if not self._is_known:
            self._member.commit(self._version)
        self._member.pending = None
        return self._version
