"""One broadcast of weights: the header, each rank's answer to it, the shards of the sources, then the data."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from easydist.agreement.agree import judged, shared
from easydist.agreement.call import Call
from easydist.agreement.disagreement import Row
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import StreamingVerb
from easydist.data.packing import dtype_name
from easydist.errors import DisagreementError, WireError
from easydist.format import header
from easydist.groups.communicators import Communicators
from easydist.transport.comm import Collectives
from easydist.verbs.buckets import carriers
from easydist.verbs.ranks import checked_ranks
from easydist.weights.digests import Digests, damaged
from easydist.weights.manifest import Manifest, manifest as read
from easydist.weights.receivers import described
from easydist.weights.schedule import Packet, UnderWay, bucket, progress
from easydist.weights.shared_buffers import SharedBuffers, opened
from easydist.weights.source import Source, casts, mesh_ranks, named, state_of
from easydist.weights.target import Target, Wanted, disagreement

BUCKET_NBYTES = 64 << 20

_FOR_OPTIMIZERS = "Pass optimizers of one class, with the same parameters in the same groups and the same order."


class Sending(NamedTuple):
    """The source's settings, which apply to all ranks.

    Attributes:
        dtype: The dtype of floating-point tensors on the wire; None means their own.
        bucket_nbytes: The most bytes under way.
        verify: True to compare digests.
    """

    dtype: torch.dtype | None = None
    bucket_nbytes: int = BUCKET_NBYTES
    verify: bool = False


class IncompleteSourcesError(DisagreementError):
    """The sources together do not hold all of an entry."""


class BroadcastWeights(StreamingVerb[Any, tuple[str, Any]]):
    """A broadcast of a state dict from the ranks that have it to all others.

    A target that is a ``StreamTarget`` hands over the entries on the way.

    Args:
        operation: The name under which it was called.
        model_or_dict: On a source the data to send, on other ranks the target.
        src: The source, or the sources of a sharded state dict, of which the first one writes the header.
        wanted: A receiver's settings. The filter and the names apply on a source, too.
        sending: The settings of the first source; those of other ranks are ignored.
        shows_progress: True to show a bar on the first rank.

    Attributes:
        noted: The notes of the first source, once the header has arrived.
    """

    noted: Mapping[str, Any]
    advice = (
        "strict=False leaves out names that only one side has, filter= and rename= on either side change what is "
        "compared; shapes have to be equal."
    )
    """The advice if a receiver has other entries."""

    takes_whole_mesh = True
    """True if a single source stands for all ranks of the mesh over which its entries are sharded."""

    def __init__(
        self,
        operation: str,
        model_or_dict: Any,
        src: int | Sequence[int],
        wanted: Wanted,
        sending: Sending,
        shows_progress: bool = False,
    ) -> None:
        self.operation = operation
        self._model_or_dict, self._src, self._wanted, self._sending = model_or_dict, src, wanted, sending
        self._received, self._shows_progress = wanted, shows_progress
        self._source: Source | None = None
        self._sent: Mapping[str, Any] | None = None
        self._target: Target | None = None

    def state(self) -> Mapping[str, Any]:
        """Return the state dict that a source sends.

        Raises:
            TypeError: It is not a state dict.
        """
        given = self._model_or_dict
        return state_of(given.state_dict() if isinstance(given, Optimizer) else given)

    def is_receiver(self, rank: int, sources: Sequence[int]) -> bool:
        """True if a rank receives the entries; the answer about another rank counts only if that is a source."""
        return rank not in sources

    def named_source(self) -> str:
        """Return the words for what the first source sends, in an error about other entries."""
        return f"rank {self._first}"

    def notes(self) -> Mapping[str, Any]:
        """Return values that travel with the header and may differ each time."""
        return {}

    def check(self) -> None:
        """Raise on a receiver if it does not accept the notes."""

    def answer(self) -> Mapping[str, Any]:
        """Return what all ranks have to know of this receiver before the data moves; ``lacks`` if it takes all."""
        return {}

    def enough(self, manifest: Manifest) -> Set[str] | None:
        """Return the keys of the entries that are enough for a receiver, unless it ``lacks`` others; None means all."""
        return None

    def begin(self, manifest: Manifest, only: Set[str] | None) -> None:
        """Take note that these entries move from now on, since all ranks accept them."""

    def confirm(self) -> None:
        """Raise on a further source if it does not mean what the notes of the first one say."""

    def prepare(self, comms: Communicators) -> Call:
        """Prepare the source on the first source rank."""
        sources = checked_ranks(comms, self.operation, "src", self._src)
        if not sources or len(set(sources)) < len(sources):
            raise ValueError(f"src={self._src!r} has to name each source once, and at least one")
        self._first = sources[0]
        if self._shows_progress:
            importlib.import_module("tqdm")  # a missing package must be noticed before other ranks wait
        call = Call({"src": sources[0] if len(sources) == 1 else tuple(sources)})
        if comms.rank == self._first:
            self._source = self._made_source(comms, sources)
            payload = _with_notes(self._source.header, self.notes())
            call.payload, call.nbytes = [payload], payload.numel()
        return call

    def _made_source(self, comms: Communicators, sources: list[int]) -> Source:
        dtype, verify, nbytes = self._sending.dtype, self._sending.verify, bucket(self._sending.bucket_nbytes)
        is_floating = getattr(dtype, "is_floating_point", None) is True
        if dtype is not None and not (is_floating and casts(torch.float32, dtype)):
            raise TypeError(
                f"dtype={dtype!r} is no floating-point dtype to which torch can cast, such as torch.bfloat16"
            )
        state = self._sent = self.state()
        names = named(state, self._wanted.keep, self._wanted.rename)
        if self.takes_whole_mesh and len(sources) == 1 and (ranks := mesh_ranks(state, names)):
            sources = _in_group(comms, ranks, self._first)
        spoken = None if dtype is None else dtype_name(dtype)
        about: dict[str, Any] = {"sources": sources, "dtype": spoken, "bucket": nbytes, "verify": verify}
        if isinstance(self._model_or_dict, Optimizer):
            about["optimizer"] = described(self._model_or_dict)
        return Source(state, names, dtype, about)

    def target(self, manifest: Manifest) -> Target:
        """Return the target for the entries that are announced."""
        return Target(self._model_or_dict, manifest, self._received)

    def values(self, comms: Communicators, agreed: Agreement) -> Iterator[tuple[str, Any]]:
        """Announce the entries, make sure that all ranks accept them, and move them."""
        if comms.size == 1 and not self.is_receiver(0, [0]):
            return
        manifest = self._accept(comms, bytes(agreed.payload_of(comms, self._first).numpy()))
        enough = self.enough(manifest)
        packets = self._scheduled(comms, manifest, enough)
        only = None if "lacks" in self._reports.get(comms.rank, {}) else enough
        self.begin(manifest, only)
        digests = Digests() if manifest.about["verify"] else None
        shown = self._shows_progress and comms.rank == 0
        with progress(shown, sum(packet.nbytes for packet in packets), self.operation) as advance:

            def take(packet: Packet, buffer: torch.Tensor) -> None:
                if digests is not None and comms.rank in (packet.root, *packet.ranks):
                    digests.update(packet, buffer)
                if self._target is not None and comms.rank in packet.ranks:
                    self._target.take(packet, buffer)
                advance(packet.nbytes)

            for _ in self._move(comms, packets, UnderWay(manifest.about["bucket"], take)):
                yield from () if self._target is None else self._target.complete()
        if self._target is not None:
            yield from self._target.rest(only)
        if digests is not None:
            self._verify(comms, manifest, digests.differing(comms, packets))

    def _accept(self, comms: Communicators, encoded: bytes) -> Manifest:
        """Let every rank accept or refuse the entries, and report its blocks; all raise if one refuses.

        Args:
            comms: The group.
            encoded: The header, and the notes.

        Returns:
            The entries.
        """
        found: list[Manifest] = []

        def judge() -> dict[str, Any]:
            stop = 8 + int.from_bytes(encoded[:8], "little")
            self.noted = header.parse_json(encoded[stop:]) if encoded[stop:] else {}
            found.append(manifest := read(encoded[:stop]))
            return self._judged(comms, manifest)

        every = judged(comms, self.operation, judge)
        if rows := {rank: one["rows"] for rank, one in every.items() if "rows" in one}:
            advice = _FOR_OPTIMIZERS if "optimizer" in found[0].about else self.advice
            raise shared(comms, DisagreementError(disagreement(self.operation, self.named_source(), rows, advice)))
        self._reports = every
        return found[0]

    def _judged(self, comms: Communicators, manifest: Manifest) -> dict[str, Any]:
        """Return this rank's answer: the entries that do not fit, or else its blocks of entries that are not whole."""
        sources = manifest.about["sources"]
        if manifest.about["verify"]:
            Digests()
        rows = self._unlike(manifest) if comms.rank in sources else []
        if comms.rank in sources[1:]:
            self.confirm()
        if self.is_receiver(comms.rank, sources):
            self.check()
            self._target = self.target(manifest)
            rows += self._target.misfit()
        if rows:
            return {"rows": rows}
        if self._target is not None:
            self._target.allocate()
            parts = self._target.parts()
            return {**self.answer(), **({"wanted": parts} if parts else {})}
        if self._source is None:
            return {"wanted": None}
        return {"held": self._source.shards} if self._source.shards else {}

    def _unlike(self, manifest: Manifest) -> list[Row]:
        """Return the differences between the entries of a further source and those of the first one."""
        if self._source is not None:
            return []
        state = self._sent = self.state()
        names = named(state, self._wanted.keep, self._wanted.rename)
        dtype = manifest.about["dtype"]
        self._source = Source(state, names, None if dtype is None else getattr(torch, dtype), {}, manifest.names)
        return manifest.differing(read(bytes(self._source.header.numpy())))

    def _scheduled(self, comms: Communicators, manifest: Manifest, enough: Set[str] | None) -> list[Packet]:
        sources, reports = manifest.about["sources"], self._reports
        held = {rank: one["held"] for rank, one in reports.items() if "held" in one}
        # A rank that is no source, but does not receive either, has reported that it wants None.
        others = [rank for rank in range(comms.size) if rank not in sources or self.is_receiver(rank, sources)]
        answers = {rank: reports.get(rank, {}) for rank in others}
        wanted = {rank: one for rank in others if (one := answers[rank].get("wanted", {})) is not None}
        if enough is not None:
            kept = dict.fromkeys(manifest.index.keys() - enough)
            wanted |= {rank: one | kept for rank, one in wanted.items() if "lacks" not in answers[rank]}
        try:
            return manifest.packets(held, wanted, overlap=not self.takes_whole_mesh)
        except ValueError as error:
            raise shared(comms, IncompleteSourcesError(f"{self.operation}: {error}")) from None

    def _move(self, comms: Communicators, packets: Sequence[Packet], under_way: UnderWay) -> Iterator[None]:
        """Send each packet from its source to the ranks that want it, and yield on the way.

        Cost: one multicast for each packet, and a barrier if any does not concern all ranks.
        """
        carried: dict[str, Collectives | SharedBuffers] = {}
        carried |= carriers(comms, [(packet.kind, packet.nbytes) for packet in packets])
        buffers = None
        if "cuda" in carried and carried["cuda"].get_device().type == "cpu":
            buffers = opened(comms, self.operation, packets, under_way.room, receives=self._target is not None)
            carried |= {} if buffers is None else {"cuda": buffers}
        for packet in packets:
            comm = carried[packet.kind]
            under_way.admit(packet)
            buffer = self._buffer(packet, comms.rank, comm.get_device())
            under_way.add(packet, buffer, comm.multicast(buffer, packet.root, packet.ranks, async_op=True))
            yield
        under_way.finish()
        if buffers is not None:
            buffers.close()
        elif any(len({packet.root, *packet.ranks}) < comms.size for packet in packets):
            comms.control.barrier(async_op=False)  # all hear of a rank that fails, also if they share no packet with it
        yield

    def _buffer(self, packet: Packet, rank: int, there: torch.device) -> torch.Tensor:
        """Return the bytes to send, or the memory in which they arrive; memory that nobody touches on other ranks."""
        if self._source is not None and packet.root == rank:
            return self._source.load(packet, there)
        if self._target is not None and rank in packet.ranks:
            return self._target.buffer(packet, there)
        return torch.empty(packet.nbytes, dtype=torch.uint8, device=there)

    def _verify(self, comms: Communicators, manifest: Manifest, differing: list[int]) -> None:
        names = [manifest.entries[i].name for i in differing]
        if every := judged(comms, self.operation, lambda: names):
            raise shared(comms, WireError(damaged(self.operation, every)))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Any:
        """Return the state dict of this rank."""
        if self._target is not None:
            return self._target.finish()
        return self.state() if self._sent is None else self._sent


def _with_notes(header: torch.Tensor, notes: Mapping[str, Any]) -> torch.Tensor:
    """Append the notes to the header, as JSON."""
    if not notes:
        return header
    return torch.cat([header, torch.frombuffer(bytearray(json.dumps(notes).encode()), dtype=torch.uint8)])


def _in_group(comms: Communicators, ranks: Sequence[int], first: int) -> list[int]:
    """Convert ranks of the world to ranks of the group, and put ``first`` first.

    Raises:
        ValueError: Some of them are not in the group.
    """
    try:
        members = dist.get_process_group_ranks(comms.groups()[0])
        return [first] + [rank for rank in map(members.index, ranks) if rank != first]
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"the source is sharded over ranks {list(ranks)} of the default group, and this group does not contain "
            "all of them; pass group_src=[…] with the ranks inside the group that hold the shards"
        ) from error
