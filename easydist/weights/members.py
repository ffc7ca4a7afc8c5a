"""How members of a group get to the same version again, after a loss or with new members."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from easydist.agreement.agree import shared
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.reports import encoded, exchange_reports
from easydist.agreement.runner import Verb, run, stream
from easydist.errors import DisagreementError
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group
from easydist.verbs.ranks import checked_ranks, named_rank
from easydist.weights.exchange import IncompleteSourcesError
from easydist.weights.holders import Holder, Publish

Load = Callable[[Iterator[tuple[str, Any]]], object]
"""A function that loads entries as they arrive."""


class Member(Holder):
    """A holder that continues in other groups, with other members."""

    def regroup(
        self,
        group: Group = None,
        src: int | Sequence[int] | None = None,
        *,
        group_src: int | Sequence[int] | None = None,
        load: Load | None = None,
        commit: bool = True,
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
            load: On a receiver that streams, the function that loads the version if this member has to get it: it takes
                an iterator of names and tensors to its end, as the ``load_weights`` of vLLM's models does. None: the
                version arrives in ``state``.
            commit: False on a receiver that serves meanwhile: a version that arrives waits for ``commit``, as after
                ``arrive``.

        Returns:
            The version.

        Raises:
            EasydistError: As for ``publish``. This member's weights do not change, unless another one has committed the
                version that this one had received: then it has that now. A version that waits for ``commit`` may be
                gone.

        Cost: a header exchange and an all-gather of a few bytes; if members lack the version, that of ``publish``.
        """
        self.end_stream()
        self.comms = communicators(group)
        named = named_rank(group, "regroup", "src", src, group_src)
        members = run(_Versions(self, named), self.comms)
        self.src = self.src if named is None else named
        return self._level(self.comms, members, self.src, load, self.use if commit else self.hold)

    def share(self, group: Group, *, load: Load | None = None, commit: bool = True) -> int:
        """Give the members of a second group the newest version that a receiver in it has; all of that group call it.

        So a late receiver gets the current version from one that has it, while the others go on in the group of all. It
        joins them with ``regroup``, which moves nothing if there is no newer version by then. This member stays in its
        own group; let it make no other call meanwhile.

        Args:
            group: The second group, for example of one receiver and the late one.
            load: As in ``regroup``.
            commit: As in ``regroup``: False on a late receiver that serves meanwhile.

        Returns:
            The version.

        Raises:
            DisagreementError: No receiver of the group has a copy of the newest version, or a part of it is missing.
            EasydistError: As for ``publish``.

        Cost: that of ``regroup``, for the members of this group alone.
        """
        self.end_stream()
        comms = communicators(group)
        verb = _Versions(self, None)
        verb.operation = "share"
        return self._level(comms, run(verb, comms), None, load, self.use if commit else self.hold)

    def _level(
        self,
        comms: Communicators,
        members: dict[int, dict[str, Any]],
        publisher: Any,
        load: Load | None,
        take: Callable[[int], None],
    ) -> int:
        """Give the members of a group the newest version that any of them has, and return it.

        Args:
            comms: The group.
            members: The report of each member.
            publisher: The ranks that give it if the receivers cannot; None: that is an error.
            load: As in ``regroup``.
            take: Called with the version once it is here.
        """
        newest: int = max(one["version"] for one in members.values())
        if self.pending == newest > self.newest:
            take(newest)
        self.pending = None
        has = {r for r, one in members.items() if newest in (one["version"], one["pending"])}
        receivers = {rank for rank, one in members.items() if one["receives"]}
        if newest and receivers - has:
            sources = sorted(rank for rank in receivers & has if not members[rank]["streams"])
            is_sharded = any(members[rank]["is_sharded"] for rank in sources)
            self._catch_up(comms, newest, sources if is_sharded else sources[:1], publisher, load, take)
        if self.newest < newest:
            self.version = newest
        return newest

    def _catch_up(
        self,
        comms: Communicators,
        version: int,
        sources: list[int],
        publisher: Any,
        load: Load | None,
        take: Callable[[int], None],
    ) -> None:
        """Give a version to the members that lack it, from receivers that have it; else from the publisher to all."""
        streams = load is not None
        if sources:
            try:
                self._take(comms, Publish(self, sources, version, is_again=True, use=take, streams=streams), load)
                return
            except IncompleteSourcesError:  # on all ranks, or on none
                if publisher is None:
                    raise
        if publisher is None:
            raise shared(comms, DisagreementError(f"share: no receiver of the group has a copy of version {version}"))
        take = self.hold if self.forget() else take
        verb = Publish(self, publisher, version, is_again=True, to_all=True, use=take, streams=streams)
        self._take(comms, verb, load)

    def _take(self, comms: Communicators, verb: Publish, load: Load | None) -> None:
        if load is None or not verb.lacks_it:
            run(verb, comms)
            return
        entries = stream(verb, comms)
        first = [*itertools.islice(entries, 1)]  # from here on the others hear of an error
        try:
            load(itertools.chain(first, entries))
        except BaseException as error:
            entries.throw(error)
        if next(entries, None) is not None:
            entries.close()
            raise RuntimeError("load= has not taken all entries; it has to take the iterator to its end")


class _Versions(Verb[dict[int, dict[str, Any]]]):
    """The exchange of the members' versions."""

    operation = "regroup"

    def __init__(self, holder: Holder, src: Any) -> None:
        self._src = src
        self._mine = encoded(
            {
                "receives": holder.receives,
                "version": holder.newest,
                "pending": holder.pending,
                "streams": holder.streams,
                "is_sharded": holder.receives and holder.is_sharded(),
            }
        )

    def prepare(self, comms: Communicators) -> Call:
        checked_ranks(comms, self.operation, "src", [] if self._src is None else self._src)
        return Call(nbytes=self._mine.numel())

    def exchange(self, comms: Communicators, agreed: Agreement) -> dict[int, dict[str, Any]]:
        return exchange_reports(comms, agreed.nbytes, self._mine)

    def result(self, comms: Communicators, agreed: Agreement, arrived: dict[int, dict[str, Any]]) -> Any:
        return arrived
