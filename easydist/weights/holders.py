"""Members with versions of the same weights: how a version reaches all of them, and how they continue after a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from easydist.agreement.agree import agree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.reports import encoded, exchange_reports
from easydist.agreement.runner import Verb, run
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group
from easydist.verbs.ranks import checked_ranks, named_rank
from easydist.weights.exchange import BroadcastWeights, IncompleteSourcesError, Sending
from easydist.weights.source import is_shard, state_of
from easydist.weights.target import Wanted

_OPERATION = "publish"


class Holder:
    """A member of a group that shares versions of the same weights.

    Args:
        group: The members.
        src: The publisher's rank in the group, or its ranks.
        group_src: The same, for any group.

    Attributes:
        receives: True if it receives versions; False if it publishes them.
        wanted: A receiver's settings for a version, or the publisher's filter and names.
        sending: The publisher's settings, which apply to all members.
        version: The version that is complete here; 0 if there is none yet.
        pending: A version that is complete here but perhaps not on all members.
    """

    receives = False
    wanted = Wanted()
    sending = Sending()

    def __init__(self, group: Group, src: Any, group_src: int | Sequence[int] | None) -> None:
        self.comms = communicators(group)
        self.src = named_rank(group, type(self).__name__, "src", src, group_src)
        self.version = 0
        self.pending: int | None = None

    @property
    def newest(self) -> int:
        """The newest version that is complete on all members, as far as this one knows."""
        return self.version

    def weights(self) -> Any:
        """Return the weights of this rank's newest version, to be sent."""
        raise NotImplementedError

    def room(self) -> Any:
        """Return the memory for the next version."""
        return None

    def is_sharded(self) -> bool:
        """True if this rank's version is a part of the whole."""
        state = self.weights()
        return state is not None and any(map(is_shard, state_of(state).values()))

    def use(self, version: int) -> None:
        """Start to use the version that has arrived on all members."""
        self.version, self.pending = version, None

    def regroup(
        self,
        group: Group = None,
        src: int | Sequence[int] | None = None,
        *,
        group_src: int | Sequence[int] | None = None,
    ) -> int:
        """Continue in another group after losing or admitting members. All members call it.

        Afterwards all have the newest version that any of them had. Members that lack it, such as new ones, get it from
        a receiver that has it or, if no receiver does, from the publisher, whose weights are sent as they are now. If
        the receivers hold shards, each gives its own; if these do not make the whole, all receivers get the version
        again from the publisher.

        Args:
            group: The new group.
            src: The publisher's rank in it, or the ranks; None keeps the previous value. With a group of torch, it must
                be the same rank of the world.
            group_src: The same, for any group.

        Returns:
            The version.

        Raises:
            EasydistError: As for ``publish``. This member's weights do not change, unless another one has committed the
                version that this one had received: then it has that now.

        Cost: a header exchange and an all-gather of a few bytes; if members lack the version, that of ``publish``.
        """
        self.comms = communicators(group)
        named = named_rank(group, "regroup", "src", src, group_src)
        members = run(_Versions(self, named), self.comms)
        self.src = self.src if named is None else named
        newest: int = max(one["version"] for one in members.values())
        if self.pending == newest > self.newest:
            self.use(newest)
        self.pending = None
        has = {r for r, one in members.items() if newest in (one["version"], one["pending"])}
        receivers = {rank for rank, one in members.items() if one["receives"]}
        if newest and receivers - has:
            sources = sorted(receivers & has)
            is_sharded = any(members[rank]["is_sharded"] for rank in sources)
            self._catch_up(newest, sources if is_sharded else sources[:1])
        if self.newest < newest:
            self.version = newest
        return newest

    def _catch_up(self, version: int, sources: list[int]) -> None:
        """Give a version to the members that lack it, from receivers that have it; else from the publisher to all."""
        if sources:
            with contextlib.suppress(IncompleteSourcesError):  # on all ranks, or on none
                run(Publish(self, sources, version, is_again=True), self.comms)
                return
        run(Publish(self, self.src, version, is_again=True, to_all=True, use=self.replace()), self.comms)

    def replace(self) -> Callable[[int], None]:
        """Forget a version that is not in use yet, and return the function that takes another one in its place."""
        return self.use


class _Versions(Verb[dict[int, dict[str, Any]]]):
    """The exchange of the members' versions."""

    operation = "regroup"

    def __init__(self, holder: Holder, src: Any) -> None:
        self._src = src
        mine = {"receives": holder.receives, "version": holder.newest, "pending": holder.pending}
        self._mine = encoded({**mine, "is_sharded": holder.receives and holder.is_sharded()})

    def prepare(self, comms: Communicators) -> Call:
        checked_ranks(comms, "src", [] if self._src is None else self._src)
        return Call(nbytes=self._mine.numel())

    def exchange(self, comms: Communicators, agreed: Agreement) -> dict[int, dict[str, Any]]:
        return exchange_reports(comms, agreed.nbytes, self._mine)

    def result(self, comms: Communicators, agreed: Agreement, arrived: dict[int, dict[str, Any]]) -> Any:
        return arrived


class Publish(BroadcastWeights):
    """The transfer of one version to all members that have an earlier one.

    Args:
        holder: This process.
        src: The ranks that have the version.
        version: Its number; None means the member's plus one.
        is_again: True if members may have it already.
        to_all: True if all receivers take it, also those that have it.
        use: Called with the version once all members have it; None is that of the member.
    """

    def __init__(
        self,
        holder: Holder,
        src: int | Sequence[int],
        version: int | None = None,
        is_again: bool = False,
        to_all: bool = False,
        use: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(_OPERATION, holder.room(), src, holder.wanted, holder.sending)
        self._holder, self._version, self._use = holder, version, use or holder.use
        self._to_all, self.takes_whole_mesh = to_all, to_all or not is_again
        self._is_known = is_again and holder.newest == version and not (to_all and holder.receives)

    def state(self) -> Mapping[str, Any]:
        """Return this member's part of the version."""
        return state_of(self._holder.weights())

    def is_receiver(self, rank: int, sources: Sequence[int]) -> bool:
        """True if this member lacks the version."""
        return rank not in sources and self._holder.receives and not self._is_known

    def notes(self) -> Mapping[str, Any]:
        """Return the version's number.

        Raises:
            ValueError: It is not newer than the version that this member has published.
        """
        newest = self._holder.newest
        version = newest + 1 if self._version is None else self._version
        if version <= newest and not self._is_known:
            raise ValueError(f"version {version} is not newer than {newest}, which was published before")
        self._version = version
        return {"version": version}

    def confirm(self) -> None:
        """Raise on a further source of a sharded model if it publishes another version."""
        if (mine := self.notes()["version"]) != self.noted["version"]:
            raise ValueError(f"this rank publishes version {mine}, the first source version {self.noted['version']}")

    def check(self) -> None:
        """Raise on a receiver if the version is not newer than its own."""
        version = self.noted["version"]
        if version <= self._holder.newest and not self._to_all:
            raise ValueError(f"version {version} is not newer than {self._holder.newest}, which this receiver has")

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        """Move the weights, and make sure that all members have all of them."""
        self._holder.pending = None
        super().exchange(comms, agreed)
        if comms.size > 1:
            self._version = self.noted["version"]
        if self._target is not None:
            self._target.finish()
        self._holder.pending = self._version
        agree(comms, f"{_OPERATION} (complete)", lambda: Call({"version": self._version}))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> int:
        """Start to use the version, since all members have it."""
        assert self._version is not None
        if not self._is_known:
            self._use(self._version)
        self._holder.pending = None
        return self._version
