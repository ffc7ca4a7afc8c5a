"""Members with versions of the same weights, and the transfer by which one reaches all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from easydist import memory
from easydist.agreement.agree import agree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.base.arguments import integer
from easydist.groups.communicators import Communicators
from easydist.groups.pickled import OfThisProcess
from easydist.state import communicators
from easydist.typing import Group
from easydist.verbs.ranks import named_rank
from easydist.weights.exchange import BroadcastWeights, Sending
from easydist.weights.manifest import Manifest
from easydist.weights.shards import is_shard
from easydist.weights.source import named, state_of
from easydist.weights.target import StreamTarget, Target, Wanted

_OPERATION = "publish"

_TOO_LARGE = 1 << 63
"""The members tell the version as JSON, which would round a much larger number."""


class Holder(OfThisProcess):
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
        streams: True if its version was handed over entry by entry, so that this rank has no copy.
        pending: A version that is complete here but perhaps not on all members.
    """

    receives = streams = False
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

    def room(self, manifest: Manifest) -> Any:
        """Return the memory for the next version, whose entries are these.

        Args:
            manifest: The entries of the next version.
        """
        return None

    def is_sharded(self) -> bool:
        """True if this rank's version is a part of the whole."""
        state = self.weights()
        return state is not None and any(map(is_shard, state_of(state).values()))

    def end_stream(self) -> None:
        """End a loop over a stream that was left."""

    def check_streams(self) -> None:
        """Raise if this member cannot hand over entries."""

    def has(self, version: int, streams: bool, manifest: Manifest) -> bool:
        """True if this rank's entries of a version may be kept for the next one, whose entries are these.

        Args:
            version: The version to which the changes of the next one belong.
            streams: True if the next version is handed over entry by entry.
            manifest: The entries of the next version.
        """
        return 0 < version == self.version and streams == self.streams

    def begin(self, names: Set[str] | None, streams: bool) -> None:
        """Take note that a version begins to arrive.

        Args:
            names: The entries that arrive; None means all.
            streams: True if they are handed over.
        """

    def fill(self, room: Any, manifest: Manifest) -> None:
        """Add the entries of the previous version that have not changed to the version that has arrived in ``room``.

        Args:
            room: The memory in which the version has arrived.
            manifest: The entries of the version.
        """

    def use(self, version: int) -> None:
        """Start to use the version that has arrived on all members.

        Args:
            version: The number of the version.
        """
        self.version, self.pending = version, None

    def hold(self, version: int) -> None:
        """Keep the version that has arrived on all members until it is committed; a publisher uses it at once.

        Args:
            version: The number of the version.
        """
        self.use(version)

    def forget(self) -> bool:
        """Forget a version that waits to be committed; True if there was one."""
        return False


class _KeptTarget(Target):
    """A target in memory that receives later versions, too, which may come in another mode or thread."""

    allocate = memory.kept(Target.allocate)


class Publish(BroadcastWeights):
    """The transfer of one version to all members that have an earlier one.

    Args:
        holder: This process.
        src: The ranks that have the version.
        version: Its number; None means the member's plus one.
        is_again: True if members may have it already.
        to_all: True if all receivers take it, also those that have it.
        use: Called with the version once all members have it; None is that of the member.
        streams: True if this member hands over the entries.
        changed: The publisher's entries that differ from its previous version; None means all.
    """

    advice = "filter= and rename= of the WeightPublisher change what is sent; shapes have to be equal."

    def __init__(
        self,
        holder: Holder,
        src: int | Sequence[int],
        version: int | None = None,
        is_again: bool = False,
        to_all: bool = False,
        use: Callable[[int], None] | None = None,
        streams: bool = False,
        changed: Iterable[str] | None = None,
    ) -> None:
        super().__init__(_OPERATION, None, src, holder.wanted, holder.sending)
        self._holder, self._version, self._use = holder, version, holder.use if streams else use or holder.use
        self._to_all, self.takes_whole_mesh = to_all, to_all or not is_again
        self._is_known = is_again and holder.newest == version and not (to_all and holder.receives)
        self._streams, self._changed = streams, changed

    def state(self) -> Mapping[str, Any]:
        """Return this member's part of the version.

        Raises:
            ValueError: The publishers give the version, and this is none.
        """
        if self.takes_whole_mesh and self._holder.receives:
            raise ValueError(
                "src= names this rank as a publisher, but it is a WeightReceiver; pass the rank of the WeightPublisher "
                "as src= to all members"
            )
        return state_of(self._holder.weights())

    def prepare(self, comms: Communicators) -> Call:
        """Prepare the source on the first source rank, and check the member."""
        if self._streams:
            self._holder.check_streams()
        return super().prepare(comms)

    @property
    def lacks_it(self) -> bool:
        """True if this member lacks the version."""
        return self._holder.receives and not self._is_known

    def is_receiver(self, rank: int, sources: Sequence[int]) -> bool:
        """True if this member lacks the version, and is no source of it."""
        return rank not in sources and self.lacks_it

    def target(self, manifest: Manifest) -> Target:
        """Return the target for the entries that are announced."""
        self._manifest = manifest
        if self._streams:
            return StreamTarget(manifest)
        return _KeptTarget(self._holder.room(manifest), manifest, self._received)

    def notes(self) -> Mapping[str, Any]:
        """Return the version's number and, if not all entries travel, the number before and the names of those that do.

        Raises:
            TypeError: The version is no integer, or the names of the changed entries are no collection.
            ValueError: The version is not newer than the last one of this member, or too large, or an entry is
                unknown.
        """
        newest = self._holder.newest
        version = newest + 1 if self._version is None else integer("version", self._version, "a version")
        if version <= newest and not self._is_known:
            raise ValueError(f"version {version} is not newer than {newest}, which was published before")
        if version >= _TOO_LARGE:
            raise ValueError(f"version {version} is too large: it has to be below 2**63")
        self._version = version
        if self._changed is None:
            return {"version": version}
        return {"version": version, "base": newest, "changed": self._changed_names(self._changed)}

    def _changed_names(self, changed: Iterable[str]) -> list[str]:
        """Return the names under which the changed entries travel."""
        if isinstance(changed, str) or not isinstance(changed, Iterable):
            raise TypeError(f"changed= takes a list of names, got {changed!r}")
        asked = set(changed)
        names = named(self.state(), self._holder.wanted.keep, self._holder.wanted.rename)
        if unknown := sorted(map(repr, asked - names.keys())):
            raise ValueError(
                f"changed= contains {', '.join(unknown[:5])}, not among the published entries ({len(names)})"
            )
        return sorted(names[name] for name in asked)

    def confirm(self) -> None:
        """Raise on a further source of a sharded model if it publishes another version, or other entries."""
        mine = self.notes()
        if mine["version"] != self.noted["version"]:
            theirs = self.noted["version"]
            raise ValueError(f"this rank publishes version {mine['version']}, the first source version {theirs}")
        if mine != self.noted:
            raise ValueError("this rank passes other changed= than the first source, or has another version")

    def check(self) -> None:
        """Raise on a receiver if the version is not newer than its own."""
        version = self.noted["version"]
        if version <= self._holder.newest and not self._to_all:
            raise ValueError(f"version {version} is not newer than {self._holder.newest}, which this receiver has")

    def answer(self) -> Mapping[str, Any]:
        """Tell the others if this receiver lacks the version to which the changes belong."""
        base = self.noted.get("base")
        return {} if base is None or self._holder.has(base, self._streams, self._manifest) else {"lacks": True}

    def enough(self, manifest: Manifest) -> Set[str] | None:
        """Return the changed entries; those that are not tensors always travel."""
        if "changed" not in self.noted:
            return None
        keys = {manifest.names[name] for name in self.noted["changed"]}
        return manifest.extra().union(key for key in keys if key is not None)

    def begin(self, manifest: Manifest, only: Set[str] | None) -> None:
        """Tell the member which entries arrive."""
        if self._target is not None:
            names = None
            if only is not None:
                names = {name for name, key in manifest.names.items() if key is None or key in only}
                names -= self._target.replaced
            self._holder.begin(names, self._streams)

    def values(self, comms: Communicators, agreed: Agreement) -> Iterator[tuple[str, Any]]:
        """Move the weights, and make sure that all members have all of them."""
        self._holder.pending = None
        yield from super().values(comms, agreed)
        if comms.size > 1:
            self._version = self.noted["version"]
        if self._target is not None:
            self._holder.fill(self._target.finish(), self._manifest)
        self._holder.pending = self._version
        agree(comms, f"{_OPERATION} (complete)", lambda: Call({"version": self._version}))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> int:
        """Start to use the version, since all members have it."""
        assert self._version is not None
        if not self._is_known:
            self._use(self._version)
        self._holder.pending = None
        return self._version
