"""One broadcast of weights: the header, each rank's answer to it, the shards of the sources, then the data."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from easydist.agreement.agree import agree, shared
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb
from easydist.data.packing import dtype_name
from easydist.errors import DisagreementError, WireError
from easydist.format import header
from easydist.groups.communicators import Communicators
from easydist.verbs.ranks import checked_ranks
from easydist.weights.announced import Announced, announced as read
from easydist.weights.blocks import Block, is_covered, whole
from easydist.weights.digests import Digests
from easydist.weights.optimizers import described
from easydist.weights.schedule import Item, Message, schedule
from easydist.weights.source import Source, mesh_ranks, named, state_of
from easydist.weights.stream import Carriers, Side, move, progress
from easydist.weights.target import Row, Target, Wanted
from easydist.weights.texts import damaged, disagreement, uncovered, unlike
from easydist.weights.told import nbytes_of, told

BUCKET_NBYTES = 64 << 20


_LEAST = 1 << 10


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


class BroadcastWeights(Verb[Any]):
    """A broadcast of a state dict from the ranks that have it to all others.

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
        """True if a rank receives the entries."""
        return rank not in sources

    def notes(self) -> Mapping[str, Any]:
        """Return values that travel with the header and may differ each time."""
        return {}

    def check(self) -> None:
        """Raise on a receiver if it does not accept the notes."""

    def prepare(self, comms: Communicators) -> Call:
        """Prepare the source on the first source rank."""
        sources = checked_ranks(comms, "src", self._src)
        if not sources or len(set(sources)) < len(sources):
            raise ValueError(f"src={self._src!r} has to name each source once, and at least one")
        self._first = sources[0]
        if self._shows_progress:
            importlib.import_module("tqdm")  # a missing package must be noticed before other ranks wait
        call = Call({"src": sources[0] if len(sources) == 1 else tuple(sources)})
        if comms.rank == self._first:
            self._source = self._made_source(comms, sources)
            self._message = _with_notes(self._source.header, self.notes())
            call.payload, call.nbytes = [self._message], self._message.numel()
        return call

    def _made_source(self, comms: Communicators, sources: list[int]) -> Source:
        if self._sending.bucket_nbytes < _LEAST:
            raise ValueError(f"bucket_bytes={self._sending.bucket_nbytes} is less than {_LEAST}")
        state = self._sent = self.state()
        names = named(state, self._wanted.keep, self._wanted.rename)
        if len(sources) == 1 and (ranks := mesh_ranks(state, names)):
            sources = _in_group(comms, ranks, self._first)
        dtype, bucket_nbytes, verify = self._sending
        spoken = None if dtype is None else dtype_name(dtype)
        about: dict[str, Any] = {"sources": sources, "dtype": spoken, "bucket": bucket_nbytes, "verify": verify}
        if isinstance(self._model_or_dict, Optimizer):
            about["optimizer"] = described(self._model_or_dict)
        return Source(state, names, dtype, about)

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        """Announce the entries, make sure that all ranks accept them, and move them."""
        if comms.size == 1 and not self.is_receiver(0, [0]):
            return
        announced = self._accept(comms, self._heard(comms, agreed))
        messages = self._scheduled(comms, announced)
        digests = Digests() if announced.about["verify"] else None
        side = _Side(comms, self._source, self._target, digests)
        shown = self._shows_progress and comms.rank == 0
        with progress(shown, announced.nbytes, self.operation) as step:
            move(Carriers(comms, messages), messages, side, announced.about["bucket"], step)
        if digests is not None:
            self._verify(comms, announced, digests.differing(comms, messages))

    def _heard(self, comms: Communicators, agreed: Agreement) -> bytes:
        """Return the header and the notes. If they are short, they came with the call."""
        if agreed.has_payload:
            return bytes(agreed.payload(self._first).numpy())
        nbytes = agreed.nbytes[self._first]
        message = self._message if self._source else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        comms.control.broadcast(message, self._first, async_op=False)
        return bytes(message.numpy())

    def _accept(self, comms: Communicators, encoded: bytes) -> Announced:
        """Let every rank accept or refuse the entries, and report its shards; all raise if one refuses."""
        found: list[Announced] = []
        mine: dict[str, Any] = {}

        def judge() -> Call:
            stop = 8 + int.from_bytes(encoded[:8], "little")
            self.noted = header.parse_json(encoded[stop:]) if encoded[stop:] else {}
            found.append(announced := read(encoded[:stop]))
            mine.update(self._judged(comms, announced))
            return Call(nbytes=nbytes_of(mine))

        every = told(comms, agree(comms, self.operation, judge).nbytes, mine)
        rows = {rank: one["rows"] for rank, one in every.items() if "rows" in one}
        if rows:
            is_optimizer = "optimizer" in found[0].about
            raise shared(comms, DisagreementError(disagreement(self.operation, self._first, rows, is_optimizer)))
        self._shards = {rank: one["shards"] for rank, one in every.items()}
        return found[0]

    def _judged(self, comms: Communicators, announced: Announced) -> dict[str, Any]:
        """Return this rank's answer: the entries that do not fit, or else its blocks of sharded ones."""
        sources = announced.about["sources"]
        if announced.about["verify"]:
            Digests()
        rows = self._unlike(announced) if comms.rank in sources else []
        if self.is_receiver(comms.rank, sources):
            self.check()
            self._target = Target(self._model_or_dict, announced, self._received)
            rows += self._target.misfit()
        if rows:
            return {"rows": rows}
        if self._target is not None:
            self._target.allocate()
        return {"shards": self._source.shards} if self._source is not None and len(sources) > 1 else {}

    def _unlike(self, announced: Announced) -> list[Row]:
        """Return the differences between the entries of a further source and those of the first one."""
        if self._source is not None:
            return []
        state = self._sent = self.state()
        names = named(state, self._wanted.keep, self._wanted.rename)
        self._source = Source(state, names, _named_dtype(announced.about["dtype"]), {})
        return unlike(announced, read(bytes(self._source.header.numpy())))

    def _scheduled(self, comms: Communicators, announced: Announced) -> list[Message]:
        """Assign each block of each entry to a source; if several ranks hold a block, to the first one."""
        if not any(self._shards.values()):
            return announced.messages
        items = []
        for entry, kind in zip(announced.entries, announced.kinds, strict=True):
            held: dict[Block, int] = {}
            for rank in announced.about["sources"]:
                box = self._shards.get(rank, {}).get(entry.name)
                if box is not None and 0 not in box[1]:
                    held.setdefault(Block(*map(tuple, box)), rank)
            if held and not is_covered(entry.shape, list(held)):
                raise shared(
                    comms, DisagreementError(uncovered(self.operation, entry.name, announced.about["sources"]))
                )
            blocks = [(rank, block) for block, rank in held.items()] or [(self._first, whole(entry.shape))]
            items.append(Item(entry.dtype, kind, blocks))
        return schedule(items, announced.about["bucket"])

    def _verify(self, comms: Communicators, announced: Announced, differing: list[int]) -> None:
        names = [announced.entries[i].name for i in differing]
        mine = {"rows": names} if names else {}
        every = told(comms, agree(comms, self.operation, lambda: Call(nbytes=nbytes_of(mine))).nbytes, mine)
        if every:
            rows = {rank: one["rows"] for rank, one in every.items()}
            raise shared(comms, WireError(damaged(self.operation, rows)))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Any:
        """Return the state dict of this rank."""
        if self._target is not None:
            return self._target.finish()
        return self.state() if self._sent is None else self._sent


class _Side(Side):
    """Loading on the source of a message, storing on receivers; other ranks discard it."""

    def __init__(
        self, comms: Communicators, source: Source | None, target: Target | None, digests: Digests | None
    ) -> None:
        self._rank, self._source, self._target, self._digests = comms.rank, source, target, digests

    def buffer(self, message: Message, there: torch.device) -> torch.Tensor:
        if self._source is not None and message.root == self._rank:
            return self._source.load(message, there)
        if self._target is not None:
            return self._target.buffer(message, there)
        return torch.empty(message.nbytes, dtype=torch.uint8, device=there)

    def take(self, message: Message, buffer: torch.Tensor) -> None:
        if self._digests is not None:
            self._digests.update(message, buffer)
        if self._target is not None:
            self._target.take(message, buffer)


def _with_notes(header: torch.Tensor, notes: Mapping[str, Any]) -> torch.Tensor:
    """Append the notes to the header, as JSON."""
    if not notes:
        return header
    return torch.cat([header, torch.frombuffer(bytearray(json.dumps(notes).encode()), dtype=torch.uint8)])


def _named_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype with a name that ``dtype_name`` has returned."""
    return None if name is None else getattr(torch, name)


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
